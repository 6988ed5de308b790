"""Records of trials as a table for docs/measurements.md.

python -m tests.chaos.figures trials.jsonl...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(records: Sequence[dict[str, Any]]) -> str:
    """One row for each kind of failure, and one for all, in Markdown."""
    kinds = sorted({record["kind"] for record in records})
    rows = [_row(kind, [record for record in records if record["kind"] == kind]) for kind in kinds]
    head = "| failure | trials | right | gone p50 | p95 | max | launcher back p50 | p95 | max |\n" + "|---" * 9 + "|"
    return "\n".join([head, *rows, _row("all", records)])


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that this part of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]


def _row(name: str, records: Sequence[dict[str, Any]]) -> str:
    right = sum(not record["wrong"] for record in records)
    times = [text for what in ("gone", "back") for text in _times([record[what] for record in records])]
    return f"| {name} | {len(records)} | {right} | {' | '.join(times)} |"


def _times(values: Sequence[float | None]) -> list[str]:
    # What never ended counts as the longest.
    known = [float("inf") if value is None else value for value in values]
    return [f"{quantile(known, part):.2f} s" for part in (0.5, 0.95, 1.0)]


if __name__ == "__main__":
    lines = [line for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    print(table([json.loads(line) for line in lines]))
