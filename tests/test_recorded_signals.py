"""Two records are compared by what the kernel promises of the order of signals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorded_signals import Recorded, differences

# The seconds between signals of one moment, and of two.
TOGETHER = 0.01
APART = 5.0


def recorded(folder: Path, *signals: tuple[str, float]) -> Recorded:
    """Return the record of one script: signals, and how long each comes after the one before."""
    folder.mkdir()
    at = 1000.0
    lines = [f"ready {at:.3f}"]
    for name, after in signals:
        at += after
        lines.append(f"{name} {at:.3f}")
    (folder / "0.script").write_text("\n".join(lines) + "\n")
    job = Recorded(folder)
    assert job.read()
    return job


@pytest.mark.parametrize(
    ("plain", "ours", "equal"),
    [
        ([("SIGCONT", 1), ("SIGTERM", TOGETHER)], [("SIGTERM", 1), ("SIGCONT", TOGETHER)], True),
        ([("SIGCONT", 1), ("SIGTERM", APART)], [("SIGTERM", 1), ("SIGCONT", APART)], False),
        ([("SIGCONT", 1), ("SIGTERM", APART)], [("SIGTERM", 1), ("SIGCONT", TOGETHER)], True),
        (
            [("SIGTERM", 1), ("SIGCONT", APART), ("SIGTERM", TOGETHER)],
            [("SIGCONT", 1), ("SIGTERM", TOGETHER), ("SIGTERM", APART)],
            True,
        ),
        ([("SIGTERM", 1)], [("SIGTERM", 1), ("SIGTERM", TOGETHER)], False),
        ([("SIGTERM", 1), ("SIGTERM", TOGETHER)], [("SIGTERM", 1)], False),
        ([], [], True),
        ([], [("SIGTERM", 1)], False),
        ([("SIGUSR1", 1)], [("SIGUSR2", 1)], False),
    ],
)
def test_signals_of_one_moment_may_come_in_any_order(
    tmp_path: Path,
    plain: list[tuple[str, float]],
    ours: list[tuple[str, float]],
    equal: bool,
) -> None:
    found = differences(recorded(tmp_path / "plain", *plain), recorded(tmp_path / "ours", *ours))
    assert (not found) == equal, found
