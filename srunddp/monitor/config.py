"""What a rank knows of its monitoring before anything is started."""

from pathlib import Path

from srunddp.util.quick_dataclass import dataclass


@dataclass(frozen=True)
class MonitorConfig:
    """How ``--monitor`` is set up for one rank.

    Attributes:
        folder: The folder for the files of this start of the run.
        node: The node's name, used in file names.
        rank: The rank of this process.
        samples: Whether this rank starts the node's sampler.
        seconds: The interval between samples.
        script: The user's command, for the report.
    """

    folder: Path
    node: str
    rank: int
    samples: bool
    seconds: float
    script: tuple[str, ...] = ()
