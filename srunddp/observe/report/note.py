"""A note of the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """One finding.

    Attributes:
        rule: its name; found, threshold: the figure with what it is of, and the limit that it passes.
        cure: the next thing to change.
    """

    rule: str
    found: str
    threshold: str
    cure: str

    def __str__(self) -> str:
        return f"{self.found} (threshold: {self.threshold}) -> {self.cure}"
