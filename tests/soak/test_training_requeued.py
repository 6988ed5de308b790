"""Trainings that reach their time limit, again and again: each ends in its next start, to the
bit.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.slurm.conftest import SlurmJobRunner
from tests.slurm.jobs import STOPPED, Job, found, look, until
from tests.slurm.test_training_requeued import REQUEUED, trained, training, wrong
from tests.soak.conftest import Show
from tests.trained import Trained

pytestmark = pytest.mark.soak

# ten of each kind, four at once
ROUNDS = 5
EACH = 2
ROUND = 300.0
CAUSES = {"limit": "SIGUSR2", "end": "the end of the job's time"}


@pytest.fixture
def whole(runner: SlurmJobRunner) -> Trained:
    job = training(runner, "whole", pace=0.0)
    until(job.is_over, [job])
    assert job.state == "COMPLETED", job
    return trained(job)


def test_a_time_limit_costs_nothing_at_any_moment(
    runner: SlurmJobRunner, whole: Trained, show: Show
) -> None:
    """By ``--signal=USR2@30``, which Slurm sends up to 60 s before the end, and by the known end of
    the job.
    """
    draw = random.Random(0)
    results = []
    for number in range(ROUNDS):
        jobs = [
            (kind, started(runner, kind, f"{number}-{each}", draw))
            for kind in CAUSES
            for each in range(EACH)
        ]
        every = [job for _, job in jobs]
        until(partial(look, every), every, ROUND)
        results += [(kind, wrong(job, CAUSES[kind], REQUEUED, whole), job) for kind, job in jobs]
    show(table(results))
    assert [(job.folder.name, broken, job.output) for _, broken, job in results if broken] == []


def started(runner: SlurmJobRunner, kind: str, name: str, draw: random.Random) -> Job:
    """With a pace of its own, so that what stops it does so anywhere in a step."""
    if kind == "limit":
        options = "--time=2 --signal=USR2@30"
        lead = 0.0
        pace = draw.uniform(0.32, 0.4)
    else:
        options = "--time=1"
        lead = draw.uniform(8.0, 28.0)
        pace = draw.uniform(0.2, 0.25)
    return training(
        runner,
        f"{kind} {name}",
        *options.split(),
        settings=f"--preemption.lead-seconds={lead:.2f}",
        pace=pace,
    )


def table(results: list[tuple[str, list[str], Job]]) -> str:
    lines = []
    for kind, cause in CAUSES.items():
        ours = [(broken, job) for of, broken, job in results if of == kind]
        good = [
            int(found(job.output, STOPPED.format(cause, REQUEUED)))
            for broken, job in ours
            if not broken
        ]
        lines.append(
            f"{kind}: {len(good)} of {len(ours)} equal to the bit, stopped after the steps"
            f" {sorted(good)}"
        )
    return "\n".join(lines)
