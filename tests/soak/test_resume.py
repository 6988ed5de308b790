"""Trainings that are killed and signalled at random moments, again and again, end as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS
from tests.soak.conftest import Show, campaign
from tests.support.starting import SRUNDDP, bare, slurm
from tests.train.course import Course, until

pytestmark = pytest.mark.soak

KILLS, SIGNALS, WORKERLESS = 100, 1000, 100
RANKS = 3
SETTINGS = ("--epochs=20", "--resume=auto")
NEARLY_DONE = 60  # steps before the end, from which on a run is left alone
LONG = 300.0  # seconds; a limit that only what is broken reaches
KILLED = 128 + signal.SIGKILL


def begin(course: Course, number: int) -> list[subprocess.Popen[str]]:
    """The ranks of a made-up step of Slurm, each started by srunddp."""
    course.clear()
    command = (*SRUNDDP, "--quiet", str(PROGRAMS / "resumable.py"), str(course.folder), *course.arguments)
    job = {"SLURM_JOB_ID": str(1_000_000 + 1000 * (os.getpid() % 100_000) + number), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command,
            env=bare(slurm(rank, course.ranks, **job)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(course.ranks)
    ]


def end(ranks: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    """Their exit codes, and what they said on standard error."""
    try:
        errors = [rank.communicate(timeout=LONG)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], "\n".join(errors)


def kill(course: Course, number: int, draw: random.Random) -> list[str]:
    """Start the training, and kill a rank at a random moment, every third time amid a save; what it hit."""
    ranks, first = begin(course, number), course.step()
    assert until(course.started, LONG), end(ranks)
    rank = draw.randrange(course.ranks)
    if number % 3 == 0 and until(course.saving, LONG):
        rank = 0
    else:
        time.sleep(draw.uniform(0.0, 3.0))
    assert all(rank.poll() is None for rank in ranks), "it had ended before"
    os.kill(course.pid(rank), signal.SIGKILL)
    codes, errors = end(ranks)
    assert codes == [KILLED] * course.ranks, errors
    assert f"rank {rank} on " in errors, errors
    return (
        ["kills", f"of rank {rank}"] + ["amid a save"] * course.saving() + ["before a step"] * (course.step() == first)
    )


def test_a_hundred_kills_change_no_sample_and_no_bit(tmp_path: Path, show: Show) -> None:
    reference = Course(tmp_path / "undisturbed", RANKS, SETTINGS)
    assert end(begin(reference, 0))[0] == [0] * RANKS
    expected, steps = reference.outcome(), reference.step()
    draw, counts, began = random.Random(0), Counter[str](), time.monotonic()
    while counts["kills"] < KILLS:
        counts["trainings"] += 1
        course = Course(tmp_path / f"course{counts['trainings']}", RANKS, SETTINGS)
        while course.step() < steps - NEARLY_DONE and counts["kills"] < KILLS:
            counts.update(kill(course, counts["kills"] + 1, draw))
        codes, errors = end(begin(course, 0))
        assert codes == [0] * RANKS, errors
        assert course.outcome() == expected, course.folder
    counted = ", ".join(f"{name} {count}" for name, count in counts.items())
    show(f"{counted}; {steps} steps each; {time.monotonic() - began:.0f} s")
    assert counts["amid a save"] >= KILLS // 10


@pytest.mark.parametrize(("kind", "number"), [("signals", SIGNALS), ("workerless", WORKERLESS)])
def test_a_thousand_signals_stop_after_a_step_and_change_no_bit(
    kind: str, number: int, tmp_path: Path, show: Show
) -> None:
    show(campaign("interrupted.py", tmp_path, kind, number, limit=7200).splitlines()[-1])
