"""What a rank knows of its monitoring before anything is started."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MonitorConfig:
    """What a rank knows of its monitoring before anything is started.

    Attributes:
        folder: for the files of this start of the run.
        node: for their names.
        rank: of this process.
        samples: whether it starts its node's sampler.
        seconds: between samples.
        script: the user's command, for the report.
    """

    folder: Path
    node: str
    rank: int
    samples: bool
    seconds: float
    script: tuple[str, ...] = ()
