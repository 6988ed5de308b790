"""Ranks of srunddp on this machine's GPUs, started as by Slurm, and plain Python to compare
with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.support.starting import bare, until, write
from tests.support.worlds import Ended, World, world

BACKEND = "nccl"
LIMIT = 240.0  # seconds: a start with CUDA and NCCL takes up to 20
_INHERITED = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES")

# Above every script.
PREAMBLE = """
import datetime
import torch
import torch.distributed as dist
import srunddp

def busy(seconds):
    # The GPU alone: the call returns at once.
    if torch.cuda.is_available():
        torch.cuda._sleep(int(seconds * 2e9))

def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()

def ones(world, count=4):
    return torch.ones(count, device=world.device)
"""


def variables_here(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a rank here needs of the shell's environment, and these."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return kept | {"PYTHONPATH": str(ROOT)} | dict(more or {})


@contextmanager
def started(
    folder: Path,
    script: str,
    *options: str,
    size: int = 2,
    backend: str = "",
    limit: float = LIMIT,
    **how: Any,
) -> Iterator[World]:
    """Ranks on this node; what is still there at the end is killed.

    Args:
        backend: NCCL unless another is named; how: as for :func:`tests.support.worlds.world`.
    """
    known = ("--backend", backend or BACKEND, *options)
    how["variables"] = variables_here(how.get("variables"))
    with world(folder, PREAMBLE + script, *known, size=size, limit=limit, **how) as it:
        yield it


def wait_for(it: World, *what: str) -> None:
    """Wait until all of these have been said; fail at once where a rank ends before."""

    def said() -> bool:
        assert all(rank.poll() is None for rank in it.ranks), it.written("stderr")
        return all(it.has_said(each) for each in what)

    until(said, LIMIT / 2, lambda: (what, it.written("stderr")))


def run(folder: Path, script: str, *options: str, **how: Any) -> Ended:
    """Ranks from their start to their end."""
    with started(folder, script, *options, **how) as it:
        return it.wait()


def ran(folder: Path, script: str, *options: str, size: int = 2, **how: Any) -> list[str]:
    """The same where all ranks are to end with 0: what each has printed."""
    done = run(folder, script, *options, size=size, **how)
    assert done.codes == [0] * size, done.text
    return done.printed


def plain(
    folder: Path, script: str, *before: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A script in plain Python, below the command before it; no srunddp."""
    return _single(folder, script, [*before, sys.executable], variables)


def alone(
    folder: Path, script: str, *before: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The same script as the only rank of srunddp, without a launcher."""
    return _single(
        folder,
        script,
        [*before, sys.executable, str(ROOT / "bin" / "srunddp"), "--quiet"],
        variables,
    )


def _single(
    folder: Path, script: str, command: list[str], variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    write(folder / "plain.py", script)
    environ = bare(variables_here(variables))
    null = subprocess.DEVNULL
    return subprocess.run(
        [*command, "plain.py"],
        cwd=folder,
        env=environ,
        stdin=null,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
