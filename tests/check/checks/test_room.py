"""What room a training needs in /dev/shm and /tmp, and what to do where the file system itself is too small."""

from __future__ import annotations

from pathlib import Path

import pytest

from srunddp.check.checks import limits
from srunddp.check.finding import Finding, Severity
from tests.support.made_up_site import seen, subject, travelled

MIB, GIB = 1 << 20, 1 << 30


def found(folder: str, free: int, total: int) -> list[Finding]:
    facts = limits.LimitFacts(files=1 << 20, memlock=-1, rdma=False, free={folder: free}, total={folder: total})
    return list(limits.judge(seen([facts])))


@pytest.mark.parametrize(
    ("free", "total", "level"),
    [
        (0, MIB, Severity.FAIL),
        (8 * MIB - 1, 100 * GIB, Severity.FAIL),
        (8 * MIB, 100 * GIB, Severity.WARN),
        (64 * MIB - 4096, 64 * MIB, Severity.WARN),  # a container of Docker's
        (GIB - 1, 100 * GIB, Severity.WARN),
    ],
)
def test_little_room_is_warned_of_and_next_to_none_stops_the_job(free: int, total: int, level: Severity) -> None:
    (finding,) = found("/dev/shm", free, total)
    assert (finding.level, finding.found) == (level, f"{free // MIB} MiB free in /dev/shm")


def test_room_enough_is_nothing_to_say() -> None:
    assert found("/dev/shm", GIB, GIB) == []


def test_a_full_folder_is_to_be_cleared_and_a_small_one_to_be_made_larger() -> None:
    (full,), (container,), (small,) = (
        found("/dev/shm", 0, 100 * GIB),
        found("/dev/shm", 63 * MIB, 64 * MIB),
        found("/tmp", 0, MIB),
    )
    assert full.hint == "clear /dev/shm"
    assert container.hint.startswith(
        "it has 64 MiB in all: start a container with --shm-size or --ipc=host; else mount"
    )
    assert small.hint.startswith("it has 1 MiB in all: name a folder with more room in TMPDIR")


def test_the_size_of_each_folder_that_is_there_is_collected(tmp_path: Path) -> None:
    facts = travelled(limits.CHECK, subject({"TMPDIR": str(tmp_path / "none")}))
    assert facts.free[str(tmp_path / "none")] == -1
    assert facts.total.keys() == facts.free.keys() - {str(tmp_path / "none")}
    assert all(facts.total[folder] >= facts.free[folder] >= 0 for folder in facts.total)
