"""In a loop of one's own all ranks stop after the same step, as in Trainer's."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from srunddp.errors import ConfigError, Stopped
from srunddp.train import Preemption
from tests.support.cost import in_empty_calls
from tests.support.starting import until
from tests.train.local_world import LocalWorld, run_ranks

SIGNALLED = 40  # the step in which one rank gets a signal


def own_loop(world: LocalWorld, number: int) -> tuple[int, list[int], int, str]:
    """The last step, those after which a checkpoint was due, and how it ended; the last rank gets
    the signal.
    """
    wanted = world.rank == 1
    due = []
    with Preemption(world, environ={}) as preemption:
        for step in range(1, 10_000):
            time.sleep(0.005)
            if step == SIGNALLED and world.rank == world.world_size - 1:
                os.kill(os.getpid(), number)
            stop = preemption.should_stop(checkpoint_due=wanted and step > 5)
            if preemption.checkpoint_due:
                due.append(step)
                wanted = False
            if stop:
                break
        os.kill(os.getpid(), signal.SIGINT)  # amid the last checkpoint
        assert preemption.should_stop(), "it stays so, without another all-reduce"
        try:
            preemption.stop(step, f"step-{step}.pt")
        except Stopped as stopped:
            return step, due, stopped.code, str(stopped)


@pytest.mark.parametrize(
    ("number", "code", "rest"),
    [
        (signal.SIGUSR1, 75, "; not requeued: no job of Slurm -> start it again with resume=auto"),
        (signal.SIGTERM, 143, ""),
    ],
)
def test_all_ranks_stop_after_the_step_that_they_agree_on(
    number: signal.Signals, code: int, rest: str, tmp_path: Path
) -> None:
    """Within about a second; one rank's wish for a checkpoint is known to all as well."""
    ends = run_ranks(3, tmp_path, own_loop, number)
    step, due, *_ = ends[0]
    assert SIGNALLED <= step <= SIGNALLED + 2 * 64
    assert len(due) == 1
    assert due[0] > 5
    assert [end[:3] for end in ends] == [(step, due, code)] * 3
    said = f"stopped after step {step} by {number.name}; checkpoint step-{step}.pt"
    assert all(sentence.startswith(said) for *_, sentence in ends)
    assert ends[0][3] == said + rest


def test_a_stop_that_is_not_agreed_on_is_refused() -> None:
    with Preemption(LocalWorld(), environ={}) as preemption:
        assert not preemption.should_stop()
        with pytest.raises(
            ConfigError, match=r"^stop\(\) without an agreement.*; expected should_stop\(\).* -> "
        ):
            preemption.stop(1, "step-1.pt")


def test_a_loop_in_another_thread_hears_of_signals() -> None:
    """The main thread, which notes them, has entered it."""
    with Preemption(LocalWorld(), environ={}) as preemption:
        thread = threading.Thread(target=until, args=(preemption.should_stop,), daemon=True)
        thread.start()
        os.kill(os.getpid(), signal.SIGUSR1)
        thread.join(60.0)
        assert not thread.is_alive()


def agreed_at(
    step_seconds: Callable[[int], float],
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    *restarts: int,
) -> list[float]:
    """The seconds from one agreement of the ranks to the next; they are told before which steps
    others begin.
    """
    now = [0.0]
    monkeypatch.setattr(
        "srunddp.train.preemption.preemption.time", SimpleNamespace(perf_counter=lambda: now[0])
    )
    preemption = Preemption(LocalWorld(), environ={})
    times = []
    for step in range(steps):
        if step in restarts:
            preemption.restart_interval()
        now[0] += step_seconds(step)
        preemption.should_stop(checkpoint_due=True)
        if preemption.checkpoint_due:
            times.append(now[0])
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize("seconds", [0.02, 0.3, 2.5])
def test_ranks_agree_about_once_a_second(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    late = agreed_at(lambda step: seconds, 600, monkeypatch)[8:]
    assert all(max(seconds, 0.5) - 0.01 <= gap <= max(seconds, 1.0) + 0.01 for gap in late), late


@pytest.mark.parametrize(("restarts", "most"), [((), 64.0), ((1000,), 2.0)], ids=["unsaid", "said"])
def test_ranks_agree_soon_where_slower_steps_begin(
    restarts: tuple[int, ...], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        max(agreed_at(lambda step: 1e-4 if step < 1000 else 1.0, 1200, monkeypatch, *restarts))
        <= most
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_iterating_leaves_the_loader_as_it_was(workers: int) -> None:
    """Its batches are its own, and so is the function that initialises a worker; the rank's signals
    are not blocked.
    """
    data: Any = torch.arange(4)  # it has a length and elements, and that is all it takes
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=2, num_workers=workers, worker_init_fn=print
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with Preemption(LocalWorld(), environ={}) as preemption:
        assert [batch.tolist() for batch in preemption.iterate(loader)] == [[0, 1], [2, 3]]
    assert loader.worker_init_fn is print
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_step_costs_no_more_than_some_empty_calls() -> None:
    """One in 64 is an all-reduce, of a world of one here."""
    with Preemption(LocalWorld(), environ={}) as preemption:
        assert in_empty_calls(preemption.should_stop) < 20
