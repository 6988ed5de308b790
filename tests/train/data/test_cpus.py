"""How many CPUs a rank has for itself, and torch's threads on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from srunddp.bootstrap.environment import cpus
from srunddp.bootstrap.environment.cpus import Cpus
from srunddp.train.data.workers import set_threads, share
from tests.train.worlds import StandIn

if TYPE_CHECKING:
    from tests.train.conftest import Ranks


@contextmanager
def on_one_cpu() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def test_a_rank_alone_has_its_affinity_and_not_the_machine() -> None:
    assert share(StandIn()) == len(os.sched_getaffinity(0))
    with on_one_cpu():
        assert share(StandIn()) == Cpus.here().allowed == 1
        assert Cpus.here().machine == os.cpu_count()


def test_ranks_of_a_node_divide_the_mask_that_they_share(three_ranks: Ranks) -> None:
    """But not one that is a task's own, nor with another node; and each has one CPU at least."""
    assert three_ranks["shares"] == [[3, 4, 8, 1], [3, 4, 8, 1], [3, 6, 8, 1]]


@pytest.mark.parametrize(("found", "expected"), [(2.5, 2), (0.5, 1), (100.0, 16), (None, 16)])
def test_a_quota_below_the_affinity_counts(found: float | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "quota", lambda: found)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert share(StandIn()) == expected


@pytest.mark.parametrize(
    ("before", "cpus", "wanted", "variables", "after"),
    [
        (4, 2, None, {}, 2),
        (1, 2, None, {}, 1),
        (4, 2, None, {"OMP_NUM_THREADS": "4"}, 4),
        (4, 2, None, {"MKL_NUM_THREADS": "4"}, 4),
        (4, 2, 3, {"OMP_NUM_THREADS": "4"}, 3),
        (1, 1, 2, {}, 2),
    ],
)
def test_torch_has_no_more_threads_than_cpus_unless_set(
    before: int, cpus: int, wanted: int | None, variables: dict[str, str], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    own = torch.get_num_threads()
    torch.set_num_threads(before)
    try:
        set_threads(cpus, wanted)
        assert torch.get_num_threads() == after
    finally:
        torch.set_num_threads(own)
