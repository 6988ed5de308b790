"""What tests/programs/requeued.py has written, over all its starts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import PROGRAMS

PROGRAM = PROGRAMS / "requeued.py"
SAMPLES = 800


@dataclass(frozen=True)
class Trained:
    """Of the ranks of one training."""

    folder: Path

    def steps(self, start: int) -> list[dict[int, list[int]]]:
        """Of each rank in that start: its samples by step. A line that is being written is left
        out.
        """
        files = sorted(self.folder.glob(f"samples.{start}.?"))
        lines = [file.read_text().rpartition("\n")[0].splitlines() for file in files]
        return [
            {step: samples for step, *samples in (map(int, line.split()) for line in of_rank)}
            for of_rank in lines
        ]

    def trains(self, start: int = 0, ranks: int = 2) -> bool:
        """Whether all ranks have made some steps."""
        return [len(steps) > 3 for steps in self.steps(start)] == ranks * [True]

    def processes(self, start: int = 0) -> list[int]:
        return [int(file.read_text()) for file in sorted(self.folder.glob(f"process.{start}.?"))]

    def weights(self) -> list[str]:
        return [file.read_text() for file in sorted(self.folder.glob("weights.?"))]

    def epochs(self) -> list[dict[str, Any]]:
        """The figures of each, without the time."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [
            {name: line[name] for name in line if name != "time"}
            for line in lines
            if line["kind"] == "epoch"
        ]

    def wrong(self, stopped: int, epochs: int) -> list[str]:
        """What is lost or twice there, of a training that stopped after a step and went on."""
        first = self.steps(0)
        second = self.steps(1)
        seen = Counter(
            sample for steps in first + second for samples in steps.values() for sample in samples
        )
        checks = {
            "all ranks stopped after that step": [max(steps, default=0) for steps in first]
            == [stopped] * len(first),
            "all ranks went on behind it": [min(steps, default=0) for steps in second]
            == [stopped + 1] * len(first),
            "every sample once an epoch": seen == dict.fromkeys(range(SAMPLES), epochs),
        }
        return [name for name, holds in checks.items() if not holds]

    def unequal(self, stopped: int, whole: Trained) -> list[str]:
        """The same, and what is not as in a training without an interruption."""
        both = [a | b for a, b in zip(self.steps(0), self.steps(1), strict=False)]
        checks = {
            "each step's samples": both == whole.steps(0),
            "figures of the epochs": self.epochs() == whole.epochs(),
            "weights to the bit": self.weights() == whole.weights()
            and len(set(self.weights())) == 1,
        }
        return self.wrong(stopped, len(whole.epochs())) + [
            name for name, holds in checks.items() if not holds
        ]
