"""What a sampler is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Site:
    """What is to be watched on this node.

    Attributes:
        folder: of this start; it exists.
        node: its name, as files may be called.
        seconds: from one sample to the next.
        interface: the chosen network interface.
        rank_variable: that tells a task its rank; empty for a world of one.
        rank: of the supervisor's own task.
        supervisor: process id of who forks the sampler.
        launcher: process id of whose children the tasks of this node are; None or 0 where that is not known.
    """

    folder: Path
    node: str
    seconds: float
    interface: str
    rank_variable: str
    rank: int
    supervisor: int
    launcher: int | None
