"""Records of the signals that a script and a child of its own got: read, compared, shown side by
side.
"""

from __future__ import annotations

import subprocess
from collections import Counter
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
    """One job, and its records as they were last read: by name, such as ``0.script``, the signals
    in their order.
    """

    folder: Path
    number: str = ""
    srun: subprocess.Popen[str] | None = None
    records: dict[str, list[str]] = field(default_factory=dict)

    def read(self) -> bool:
        """Read the records; whether there is anything new."""
        files = {
            file.name: file.read_text().splitlines() for file in sorted(self.folder.glob("[0-9].*"))
        }
        before = self.records
        self.records = {name: _in_order(lines) for name, lines in files.items()}
        return self.records != before

    def is_ready(self, ranks: int) -> bool:
        """Whether the scripts and children of all ranks wait for signals."""
        self.read()
        return sum("ready" in record for record in self.records.values()) == 2 * ranks

    def has(self, least: int) -> bool:
        """Whether each script has got so many signals."""
        self.read()
        return all(
            len(record) > least for name, record in self.records.items() if name.endswith(".script")
        )


def table(jobs: Mapping[str, Mapping[str, Recorded]]) -> str:
    """Both lists of each row, as rank 0's script got them; and its child's."""
    lines = []
    for name, kinds in jobs.items():
        for kind, job in kinds.items():
            got = {
                who: " ".join(job.records.get(f"0.{who}", [])[1:]) or "-"
                for who in ("script", "child")
            }
            lines.append(f"{name:45} {kind:8} script: {got['script']:28} child: {got['child']}")
    return "\n".join(lines)


def differences(plain: Recorded, ours: Recorded) -> list[str]:
    """Where a script below srunddp gets other signals than plain Python, or its children more."""
    found = []
    for name, signals in plain.records.items():
        got = ours.records.get(name, [])
        if got != signals if name.endswith(".script") else Counter(got) - Counter(signals):
            found.append(f"{name}: plain {signals[1:]}, below srunddp {got[1:]}")
    return found


def _in_order(lines: list[str]) -> list[str]:
    """The lines of a record. Signals of one moment are sorted: pending together, they come in any
    order.
    """
    moments: list[list[str]] = []
    last = 0.0
    for name, at in map(str.split, lines):
        if len(moments) < 2 or float(at) > last + MOMENT:  # the first is no signal
            moments.append([])
        moments[-1].append(name)
        last = float(at)
    return [name for moment in moments for name in sorted(moment)]
