"""The examples of a loop without Trainer: what a signal has stopped goes on, and ends in the same
bits.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import srunddp
from srunddp.errors import Stopped
from srunddp.train import Preemption
from tests.examples import loaded
from tests.train.local_world import LocalWorld, run_ranks

SIGNALLED = 12  # the step after which one rank gets the signal


def trained(world: LocalWorld, name: str, folder: Path, signalled: bool) -> tuple[int, Any]:
    """How often it was stopped, as an exit code, and what its models came to."""
    module = loaded(name)
    beats = 0

    def beat(**_: bool) -> None:
        nonlocal beats
        beats += 1
        if signalled and beats == SIGNALLED and world.rank == world.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR2)

    srunddp.heartbeat = beat
    try:
        with Preemption(world, environ={}) as preemption:
            outcome = module.train(world, preemption, module.Settings(epochs=1, output_dir=folder))
    except Stopped as stopped:
        return stopped.code, beats
    return 0, list(outcome.parameters())


@pytest.mark.parametrize("name", ["own_loop", "gan"])
def test_an_own_loop_that_was_stopped_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    """One of three ranks gets the signal amid an epoch; all stop after the same step."""
    whole = run_ranks(3, tmp_path / "world", trained, name, tmp_path / "whole", False)
    stopped = run_ranks(3, tmp_path / "world", trained, name, tmp_path / "cut", True)
    assert stopped == [(75, stopped[0][1])] * 3
    assert stopped[0][1] >= SIGNALLED
    resumed = run_ranks(3, tmp_path / "world", trained, name, tmp_path / "cut", False)
    for (code, outcome), (_, expected) in zip(resumed, whole, strict=True):
        assert code == 0
        assert all(map(torch.equal, outcome, expected))
