"""``--monitor``: a recorder for each rank and a sampler for each node, from before the ranks meet to the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srunddp.telemetry import Marks


@dataclass(frozen=True)
class Plan:
    """What a rank knows of its monitoring before anything is started.

    Attributes:
        folder: for the files of this start of the run; node: for their names.
        rank: of this process; samples: whether it starts its node's sampler.
        seconds: between samples.
        script: the user's command, for the report.
    """

    folder: Path
    node: str
    rank: int
    samples: bool
    seconds: float
    script: tuple[str, ...] = ()


class Monitor:
    """Does nothing: a run without ``--monitor``. Its methods are called in this order.

    Attributes:
        marks: for the worker.
    """

    def __init__(self) -> None:
        self.marks = Marks()

    def start_sampler(self, interface: str, rank_variable: str, launcher: int | None) -> None:
        """In the supervisor, before it forks its worker.

        Args:
            interface: the network interface; rank_variable: tells a process of this node its rank.
            launcher: the process whose descendants all ranks of this node are; None where that is not known.
        """

    def in_worker(self) -> None:
        """Close there what is the supervisor's."""

    def start(self) -> None:
        """In the supervisor, after the fork."""

    def mark(self, name: str) -> None:
        """Something happens in the supervisor."""

    def describe(self, run: Mapping[str, Any]) -> None:
        """On rank 0, when all have met."""

    def stop_sampler(self) -> str:
        """The worker has ended, and what it left is about to be killed.

        Returns:
            Why the sampler had ended before; else nothing.
        """
        return ""

    def finish(self, code: int) -> None:
        """With the exit code to leave with."""


def open_monitor(plan: Plan | None) -> Monitor:
    """Make this rank's files, before any socket is opened.

    Raises:
        ConfigError: they cannot be written.
    """
    if plan is None:
        return Monitor()
    from srunddp.monitor.recording import Recording  # most runs need none of it

    return Recording(plan)
