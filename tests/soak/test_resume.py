"""Trainings that are killed and signalled at random moments, again and again, end as if nothing had
happened.
"""

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
from tests.soak.conftest import Show
from tests.support.starting import SRUNDDP, bare, slurm
from tests.train.interrupted import Training, signals, until

pytestmark = pytest.mark.soak

KILLS = 100
SIGNALS = 1000
WORKERLESS = 100
RANKS = 3
SETTINGS = ("--epochs=20", "--resume=auto")
NEARLY_DONE = 60  # steps before the end, from which on a run is left alone
LONG = 300.0  # seconds; a limit that only what is broken reaches
KILLED = 128 + signal.SIGKILL


def begin(training: Training, number: int) -> list[subprocess.Popen[str]]:
    """The ranks of a made-up step of Slurm, each started by srunddp."""
    training.clear()
    command = (
        *SRUNDDP,
        "--quiet",
        str(PROGRAMS / "resumable.py"),
        str(training.folder),
        *training.arguments,
    )
    job = {
        "SLURM_JOB_ID": str(1_000_000 + 1000 * (os.getpid() % 100_000) + number),
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            command,
            env=bare(slurm(rank, training.ranks, **job)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(training.ranks)
    ]


def end(ranks: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    """Their exit codes, and what they said on standard error."""
    try:
        errors = [rank.communicate(timeout=LONG)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], "\n".join(errors)


def kill(training: Training, number: int, draw: random.Random) -> list[str]:
    """Start the training, and kill a rank at a random moment, every third time amid a save; what it
    hit.
    """
    ranks = begin(training, number)
    first = training.step()
    assert until(training.started, LONG), end(ranks)
    rank = draw.randrange(training.ranks)
    if number % 3 == 0 and until(training.saving, LONG):
        rank = 0
    else:
        time.sleep(draw.uniform(0.0, 3.0))
    assert all(rank.poll() is None for rank in ranks), "it had ended before"
    os.kill(training.pid(rank), signal.SIGKILL)
    codes, errors = end(ranks)
    assert codes == [KILLED] * training.ranks, errors
    assert f"rank {rank} on " in errors, errors
    hit = {"amid a save": training.saving(), "before a step": training.step() == first}
    return ["kills", f"of rank {rank}", *(name for name, there in hit.items() if there)]


def test_a_hundred_kills_change_no_sample_and_no_bit(tmp_path: Path, show: Show) -> None:
    reference = Training(tmp_path / "undisturbed", RANKS, SETTINGS)
    assert end(begin(reference, 0))[0] == [0] * RANKS
    expected = reference.outcome()
    steps = reference.step()
    draw = random.Random(0)
    counts = Counter[str]()
    began = time.monotonic()
    while counts["kills"] < KILLS:
        counts["trainings"] += 1
        training = Training(tmp_path / f"training{counts['trainings']}", RANKS, SETTINGS)
        while training.step() < steps - NEARLY_DONE and counts["kills"] < KILLS:
            counts.update(kill(training, counts["kills"] + 1, draw))
        codes, errors = end(begin(training, 0))
        assert codes == [0] * RANKS, errors
        assert training.outcome() == expected, training.folder
    counted = ", ".join(f"{name} {count}" for name, count in counts.items())
    show(f"{counted}; {steps} steps each; {time.monotonic() - began:.0f} s")
    assert counts["amid a save"] >= KILLS // 10


@pytest.mark.parametrize(
    ("number", "arguments"),
    [(SIGNALS, ("--epochs=12",)), (WORKERLESS, ("--epochs=6", "--dataloader.num_workers=0"))],
    ids=["signals", "workerless"],
)
def test_a_thousand_signals_stop_after_a_step_and_change_no_bit(
    number: int, arguments: tuple[str, ...], tmp_path: Path, show: Show
) -> None:
    """Workerless: the rank itself reads, and draws what is random in that."""
    began = time.monotonic()
    said = signals(tmp_path, number, arguments)
    show(f"{said}; {time.monotonic() - began:.0f} s")
