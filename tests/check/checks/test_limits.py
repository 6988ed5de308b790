"""Full folders stop a job, scarce ones and low limits are warned of; each on its node."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from srunddp.check.checks.limits import CHECK, LimitFacts, evaluate, summary
from srunddp.check.finding import Severity
from tests.support.made_up_site import changed, reported, subject, travelled

GIB = 1 << 30
WELL = LimitFacts(files=1024, memlock=-1, rdma=True, free={"/dev/shm": 8 * GIB, "/tmp": 2 * GIB})


def test_the_facts_of_this_process_travel(tmp_path: Path) -> None:
    facts = travelled(CHECK, subject({"TMPDIR": str(tmp_path)}))
    assert facts.files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert set(facts.free) == {"/dev/shm", str(tmp_path)}
    assert all(free >= 0 for free in facts.free.values())
    assert set(travelled(CHECK, subject()).free) == {"/dev/shm", "/tmp"}
    gone = str(tmp_path / "gone")
    assert travelled(CHECK, subject({"TMPDIR": gone})).free[gone] == -1


@pytest.mark.parametrize(
    ("change", "level", "found"),
    [
        ({"free": {"/tmp": 0}}, Severity.FAIL, "0 MiB free in /tmp"),
        ({"free": {"/tmp": (8 << 20) - 1}}, Severity.FAIL, "7 MiB free in /tmp"),
        ({"free": {"/tmp": 8 << 20}}, Severity.WARN, "8 MiB free in /tmp"),
        ({"free": {"/dev/shm": 64 << 20}}, Severity.WARN, "64 MiB free in /dev/shm"),
        ({"free": {"/dev/shm": GIB - 1}}, Severity.WARN, "1023 MiB free in /dev/shm"),
        ({"free": {"/scratch/x": -1}}, Severity.FAIL, "/scratch/x is not there"),
        ({"files": 1023}, Severity.WARN, "1023 open files at most"),
        (
            {"memlock": 64 << 10},
            Severity.WARN,
            "64 KiB of locked memory at most, on a node with InfiniBand or RoCE",
        ),
    ],
)
def test_what_is_short_is_named_on_its_node(
    change: dict[str, Any], level: Severity, found: str
) -> None:
    assert reported(evaluate(changed(WELL, {3: change}))) == [(level, found, ("node02",), ())]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"free": {"/tmp": GIB}},
        {"files": -1},
        {"memlock": 64 << 10, "rdma": False},
        {"memlock": -1},
    ],
)
def test_what_is_enough_or_does_not_matter_is_not_named(change: dict[str, Any]) -> None:
    assert reported(evaluate(changed(WELL, {3: change}))) == []


def test_the_summary_has_the_least_room() -> None:
    seen = changed(WELL, {3: {"free": {"/dev/shm": GIB, "/tmp": 3 * GIB}}})
    assert summary(seen) == "/dev/shm 1.0 GiB free at least, /tmp 2.0 GiB free at least"
