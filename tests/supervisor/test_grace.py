"""What the end of a script may take: uploads in atexit end, and who does not end is ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.starting import python, srunddp, until, write
from tests.support.worlds import SIZE, Ended, named, world

UPLOADS = """
def upload():
    time.sleep(3)
    say("uploaded")
atexit.register(upload)
"""
FAILS = UPLOADS + "if RANK == {rank}: raise ValueError('boom')\nrest()"
STOPS = UPLOADS + "from srunddp.errors import Stopped\nraise Stopped('stopped after step 5', 75)"


def like_slurm(folder: Path, script: str, *options: str) -> tuple[Ended, float]:
    """A world whose launcher kills all at the first bad end, as srun --kill-on-bad-exit=1; how long it took."""
    with world(folder, script, *options) as it:
        it.workers()
        began = time.monotonic()
        until(lambda: any(rank.poll() for rank in it.ranks))
        time.sleep(0.3)  # until srun has told all nodes
        for rank in it.ranks:
            rank.kill()
        return it.wait(), time.monotonic() - began


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_rank_s_exit_handlers_end_first(tmp_path: Path, rank: int) -> None:
    ended, _ = like_slurm(tmp_path, FAILS.format(rank=rank))
    named(ended, rank, 1, "ValueError: boom")
    assert [(tmp_path / f"uploaded.{each}").exists() for each in range(SIZE)] == [each == rank for each in range(SIZE)]


def test_after_a_stop_the_exit_handlers_of_all_ranks_end(tmp_path: Path) -> None:
    ended, _ = like_slurm(tmp_path, STOPS)
    assert ended.codes == [75] * SIZE, ended.text
    assert all((tmp_path / f"uploaded.{rank}").exists() for rank in range(SIZE))


def test_an_end_that_takes_longer_than_grace_is_cut_short(tmp_path: Path) -> None:
    endless = "atexit.register(time.sleep, 600)\nif RANK == 1: raise ValueError('boom')\nrest()"
    with world(tmp_path, endless, "--grace", "1") as it:
        it.workers()
        began = time.monotonic()
        named(it.wait(), 1, 1, "ValueError: boom")
    assert 1.0 < time.monotonic() - began < 10.0


@pytest.mark.parametrize("end", ["raise ValueError('boom')", "sys.exit(3)"])
def test_a_single_process_has_no_limit(tmp_path: Path, end: str) -> None:
    script = write(
        tmp_path / "train.py",
        f"import atexit, sys, time\natexit.register(print, 'uploaded')\natexit.register(time.sleep, 3)\n{end}",
    )
    ours = srunddp("--quiet", "--grace", "0.5", script, folder=tmp_path)
    theirs = python(script, folder=tmp_path)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ours.stdout == "uploaded\n"
