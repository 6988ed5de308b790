"""CPUs before a job: what makes a training slow is found, and nothing where all is well."""

from __future__ import annotations

import os
from typing import Any

import pytest

from srunddp.check.checks.cpus import CHECK, CpuFacts
from srunddp.check.finding import Severity
from tests.support.facts import tells
from tests.support.made_up_site import changed, reported, subject, travelled

WELL = CpuFacts(mask=[0, 1], quota=0.0, threads=1, variable="OMP_NUM_THREADS", advice=[])
ADVICE = (
    "4 CPUs per task were asked for, and this rank may use 2; expected 4, but srun forgets -> srun"
    " --cpus-per-task=4"
)
NODES = tuple(f"node{number:02d}" for number in range(1, 7))


@pytest.mark.parametrize(
    ("changes", "found", "ranks"),
    [
        ({5: {"advice": [ADVICE]}}, ADVICE.partition(";")[0], (5,)),
        ({5: {"threads": 3}}, "OMP_NUM_THREADS=3 on 2 CPUs", (5,)),
        ({5: {"threads": 2, "quota": 1.5}}, "OMP_NUM_THREADS=2 on 1 CPU", (5,)),
        ({4: {"threads": 2}}, "2 ranks with 3 threads share 2 CPUs", (4, 5)),
        (
            {4: {"mask": [1, 2], "threads": 2}, 5: {"threads": 2}},
            "2 ranks with 4 threads share 3 CPUs",
            (4, 5),
        ),
        ({5: {"mask": [1]}}, "a rank has 1 CPU", (5,)),
        ({4: {"mask": [2]}, 5: {"mask": [3]}}, "a rank has 1 CPU", (4, 5)),
    ],
)
def test_what_slows_a_rank_is_found(
    changes: dict[int, dict[str, Any]], found: str, ranks: tuple[int, ...]
) -> None:
    assert reported(CHECK.evaluate(changed(WELL, changes))) == [
        (Severity.WARN, found, ("node03",), ranks)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {rank: {"threads": 0, "variable": ""} for rank in range(12)},
        {rank: {"quota": 2.0} for rank in range(12)},
        {rank: {"mask": [2 * (rank % 2), 2 * (rank % 2) + 1], "threads": 2} for rank in range(12)},
    ],
)
def test_nothing_is_found_where_threads_fit(changes: dict[int, dict[str, Any]]) -> None:
    """On six nodes with two ranks each, also where the nodes are one machine."""
    assert reported(CHECK.evaluate(changed(WELL, changes))) == []


def test_the_hint_fits_and_the_summary_says_what_is_left() -> None:
    (finding,) = CHECK.evaluate(changed(WELL, {0: {"threads": 2}}))
    assert tells(finding.hint, "OMP_NUM_THREADS", 1, "--cpus-per-task")
    apart = {0: {"mask": [0, 1, 2]}, 1: {"mask": [3, 4, 5]}}
    assert tells(CHECK.summary(changed(WELL, apart, 2)), "3 CPUs", "2 loader workers")
    assert tells(CHECK.summary(changed(WELL, {})), "1 CPU", "0 loader workers")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("", 0)),
        ({"OMP_NUM_THREADS": "4"}, ("OMP_NUM_THREADS", 4)),
        ({"OMP_NUM_THREADS": "4,2", "MKL_NUM_THREADS": "8"}, ("OMP_NUM_THREADS", 4)),
        ({"OMP_NUM_THREADS": "", "MKL_NUM_THREADS": "8"}, ("MKL_NUM_THREADS", 8)),
    ],
)
def test_this_rank_s_cpus_and_threads_are_collected(
    variables: dict[str, str], expected: tuple[str, int]
) -> None:
    facts = travelled(CHECK, subject(variables))
    assert facts.mask == sorted(os.sched_getaffinity(0))
    assert (facts.variable, facts.threads) == expected
    asked = {"SLURM_CPUS_PER_TASK": "4096"}
    assert tells(travelled(CHECK, subject(asked)).advice[0], "4096 CPUs")
