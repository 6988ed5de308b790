"""What a training of ``resumable.py`` has written down so far, read without torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONG = 60.0  # a limit that only what is broken reaches


def until(condition: Callable[[], object], limit: float = LONG) -> bool:
    """Whether it became true within the limit."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.003)
    return True


@dataclass
class Course:
    """One training of so many ranks, in a folder of its own, over all its runs.

    Attributes:
        left: the temporary files that killed saves of earlier runs have left.
    """

    folder: Path
    ranks: int
    arguments: tuple[str, ...] = ()
    left: set[Path] = field(default_factory=set)

    def clear(self) -> None:
        """Before a run: no rank has started."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("pid*"):
            path.unlink()
        self.left = self._temporaries()

    def started(self) -> bool:
        """All ranks have come to their training since the last :meth:`clear`."""
        return len(list(self.folder.glob("pid*"))) == self.ranks

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid{rank}").read_text())

    def saving(self) -> bool:
        """A save is going on, or was cut off."""
        return bool(self._temporaries() - self.left)

    def _temporaries(self) -> set[Path]:
        return set((self.folder / "checkpoints").glob("step-*.tmp"))

    def tested(self) -> int:
        """Test batches so far, on rank 0."""
        path = self.folder / "tested0"
        return path.stat().st_size if path.exists() else 0

    def step(self) -> int:
        """The last one of rank 0."""
        path = self.folder / "ids0"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(lines[-1].split(maxsplit=1)[0]) if lines else 0

    def outcome(self) -> dict[str, Any]:
        """What it came to in the end, which must not depend on interruptions."""
        results = [json.loads((self.folder / f"result{rank}.json").read_text()) for rank in range(self.ranks)]
        return {"ids": [ids(self.folder / f"ids{rank}") for rank in range(self.ranks)], "results": results}


def ids(path: Path) -> dict[int, Any]:
    """The samples by step."""
    lines = (line.split(maxsplit=1) for line in path.read_text().splitlines())
    return {int(step): json.loads(samples) for step, samples in lines}
