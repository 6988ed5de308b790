"""Defines how ``--monitor`` is set up for one rank."""

from pathlib import Path

from srunddp.util.quick_dataclass import dataclass


@dataclass(frozen=True)
class MonitorConfig:
    """Settings of ``--monitor`` for one rank, known before any process or thread is started.

    Attributes:
        folder: The folder for the files of this start of the run.
        node: The node's name, used in file names.
        rank: The rank of this process.
        samples: Whether this rank starts the node's sampler.
        seconds: The interval between readings, in seconds.
        script: The words that would follow ``python`` on the user's command line, for the report.
    """

    folder: Path
    node: str
    rank: int
    samples: bool
    seconds: float
    script: tuple[str, ...] = ()
