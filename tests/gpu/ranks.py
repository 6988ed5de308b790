"""Ranks of srunddp on this machine's GPUs, started as by Slurm, and plain Python to compare with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.support.starting import bare, write
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
    variables: Mapping[str, str] | None = None,
    below: dict[int, list[str]] | None = None,
) -> Iterator[World]:
    """Ranks on this node; what is still there at the end is killed.

    Args:
        backend: NCCL unless another is named; variables: for all ranks; below: for a rank the command that starts it.
    """
    known = ("--backend", backend or BACKEND, *options)
    with world(folder, PREAMBLE + script, *known, size=size, variables=variables_here(variables), below=below) as it:
        yield it


def wait_for(it: World, *what: str, limit: float = LIMIT / 2) -> None:
    """Wait until all of these have been said; fail at once where a rank ends before."""
    end = time.monotonic() + limit
    while not all(it.has_said(each) for each in what):
        assert all(rank.poll() is None for rank in it.ranks), "".join(said(it))
        assert time.monotonic() < end, f"{', '.join(what)}: not within {limit:g} s:\n{''.join(said(it))}"
        time.sleep(0.05)


def ended(it: World, limit: float = LIMIT) -> Ended:
    """Wait for the end of all ranks, and fail with what they said if they do not end."""
    end, codes = time.monotonic() + limit, []
    for rank in it.ranks:
        try:
            codes.append(rank.wait(timeout=max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the ranks did not end within {limit:g} s:\n{''.join(said(it))}") from None
    return Ended(codes, said(it))


def said(it: World) -> list[str]:
    """What each rank has written on standard error."""
    return [(it.folder / f"stderr.{rank}").read_text(errors="replace") for rank in range(len(it.ranks))]


def run(folder: Path, script: str, *options: str, limit: float = LIMIT, **how: Any) -> Ended:
    """Ranks from their start to their end."""
    with started(folder, script, *options, **how) as it:
        return ended(it, limit)


def ran(folder: Path, script: str, *options: str, size: int = 2, **how: Any) -> list[str]:
    """The same where all ranks are to end with 0: what each has printed."""
    done = run(folder, script, *options, size=size, **how)
    assert done.codes == [0] * size, done.text
    return printed(folder, size)


def printed(folder: Path, size: int) -> list[str]:
    return [(folder / f"stdout.{rank}").read_text() for rank in range(size)]


def plain(folder: Path, script: str, *before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script in plain Python, below the command before it; no srunddp."""
    return _single(folder, script, [*before, sys.executable], variables)


def alone(folder: Path, script: str, *before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same script as the only rank of srunddp, without a launcher."""
    return _single(folder, script, [*before, sys.executable, str(ROOT / "bin" / "srunddp"), "--quiet"], variables)


def _single(
    folder: Path, script: str, command: list[str], variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    write(folder / "plain.py", script)
    environ, null = bare(variables_here(variables)), subprocess.DEVNULL
    return subprocess.run(
        [*command, "plain.py"], cwd=folder, env=environ, stdin=null, capture_output=True, text=True, timeout=LIMIT
    )
