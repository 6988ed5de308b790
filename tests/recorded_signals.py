"""Records of the signals that a script and a child of its own got: read, compared, shown side by
side.
"""

from __future__ import annotations

import subprocess
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import PROGRAMS

RECORDER = PROGRAMS / "record_signals.py"
LIMIT = 400.0
# Seconds between two signals that a launcher sends one right after the other, as SIGCONT and
# SIGTERM.
MOMENT = 0.5


@dataclass
class Recorded:
    """One job, and its records as they were last read.

    Attributes:
        folder: The folder of the files that the recorders write.
        number: The job's number.
        srun: The job's srun, if it was not started by a batch script.
        records: For each recorder, such as ``0.script``, the signals it got, moment by moment.
        ready: The recorders that wait for signals.
    """

    folder: Path
    number: str = ""
    srun: subprocess.Popen[str] | None = None
    records: dict[str, list[list[str]]] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)

    def read(self) -> bool:
        """Read the records; whether there is anything new."""
        before = (self.ready, self.records)
        files = {
            file.name: file.read_text().splitlines() for file in sorted(self.folder.glob("[0-9].*"))
        }
        self.ready = {name for name, lines in files.items() if lines}
        self.records = {name: _moments(lines[1:]) for name, lines in files.items()}
        return (self.ready, self.records) != before

    def signals(self, name: str) -> list[str]:
        """Return all signals that one recorder got, in their order."""
        return [each for moment in self.records.get(name, []) for each in moment]

    def is_ready(self, ranks: int) -> bool:
        """Whether the scripts and children of all ranks wait for signals."""
        self.read()
        return len(self.ready) == 2 * ranks

    def has(self, least: int) -> bool:
        """Whether each script has got so many signals."""
        self.read()
        return all(
            len(self.signals(name)) >= least for name in self.records if name.endswith(".script")
        )


def table(jobs: Mapping[str, Mapping[str, Recorded]]) -> str:
    """Both lists of each row, as rank 0's script got them; and its child's."""
    lines = []
    for name, kinds in jobs.items():
        for kind, job in kinds.items():
            got = {who: " ".join(job.signals(f"0.{who}")) or "-" for who in ("script", "child")}
            lines.append(f"{name:45} {kind:8} script: {got['script']:28} child: {got['child']}")
    return "\n".join(lines)


def differences(plain: Recorded, ours: Recorded) -> list[str]:
    """Where a script below srunddp gets other signals than plain Python, or its children more."""
    found = []
    for name, moments in plain.records.items():
        expected = plain.signals(name)
        got = ours.signals(name)
        if name.endswith(".script"):
            differ = not is_one_order(moments, ours.records.get(name, []))
        else:
            differ = bool(Counter(got) - Counter(expected))
        if differ:
            found.append(f"{name}: plain {expected}, below srunddp {got}")
    return found


def is_one_order(first: list[list[str]], second: list[list[str]]) -> bool:
    """Return whether two records can be of signals that were sent in one order.

    Signals of one moment were pending together, and the kernel delivers these in any order. On a
    busy machine one record may have two moments where the other has one.
    """
    left = deque(map(Counter, first))
    right = deque(map(Counter, second))
    while left and right:
        common = left[0] & right[0]
        if not common:
            return False
        for side in (left, right):
            side[0] -= common
            if not side[0]:
                side.popleft()
    return not left and not right


def _moments(lines: list[str]) -> list[list[str]]:
    """Return the signals of a record, those of one moment together."""
    moments: list[list[str]] = []
    last = 0.0
    for name, at in map(str.split, lines):
        if not moments or float(at) > last + MOMENT:
            moments.append([])
        moments[-1].append(name)
        last = float(at)
    return [sorted(moment) for moment in moments]
