"""``--monitor``: a recorder for each rank and a sampler for each node, from before the ranks meet to the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srunddp.errors import ConfigError, Scope
from srunddp.telemetry import TelemetryPage

if TYPE_CHECKING:
    from srunddp.monitor.recorder import Recorder
    from srunddp.monitor.sampler.process import Sampler

_WITHIN = 0.5


@dataclass(frozen=True)
class MonitorConfig:
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
    """What watches one rank and, where the config says so, its node. Its methods are called in this order.

    Attributes:
        page: for the worker.
    """

    def __init__(self, config: MonitorConfig | None = None) -> None:
        """Make the files; without ``--monitor`` there are none, and nothing else is done here.

        Raises:
            ConfigError: they cannot be written.
        """
        self.page = TelemetryPage(recording=config is not None)
        self._config = config
        self._sampler: Sampler | None = None
        self._recorder = _open_recorder(config, self.page) if config else None

    def start_sampler(self, interface: str, rank_variable: str, launcher: int | None) -> None:
        """In the supervisor, before it forks its worker.

        Args:
            interface: the network interface; rank_variable: tells a process of this node its rank.
            launcher: the process whose descendants all ranks of this node are; None where that is not known.
        """
        config = self._config
        if config and config.samples:
            from srunddp.monitor.sampler.loop import SamplerConfig  # one rank of a node needs them
            from srunddp.monitor.sampler.process import start

            self._sampler = start(SamplerConfig(config, interface, rank_variable, os.getpid(), launcher))

    def in_worker(self) -> None:
        """Close there what is the supervisor's."""
        for each in (self._recorder, self._sampler):
            if each:
                each.in_worker()

    def start(self) -> None:
        """In the supervisor, after the fork."""
        if self._recorder:
            self._recorder.start()

    def mark(self, name: str) -> None:
        """Something happens in the supervisor."""
        if self._recorder:
            self._recorder.mark(name)

    def describe(self, run: Mapping[str, Any]) -> None:
        """On rank 0, when all have met."""
        if self._recorder and self._config:
            own = {"script": self._config.script, "seconds": self._config.seconds}
            self._recorder.describe({"version": 1, **run, **own})

    def stop_sampler(self) -> str:
        """The worker has ended, and what it left is about to be killed.

        Returns:
            Why the sampler had ended before; else nothing.
        """
        return self._sampler.finish(_WITHIN) if self._sampler else ""

    def finish(self, code: int) -> None:
        """With the exit code to leave with."""
        if self._recorder:
            self._recorder.finish(code, _WITHIN)


def _open_recorder(config: MonitorConfig, page: TelemetryPage) -> Recorder:
    from srunddp.monitor.recorder import RUN, Recorder  # most runs need none of it

    recorder = Recorder(config.folder, f"{config.node}.rank{config.rank}", config.seconds, page)
    try:
        recorder.open()
        if config.rank == 0:  # of an earlier start in the same folder, as there may be outside Slurm
            (config.folder / RUN).unlink(missing_ok=True)
    except OSError as error:
        place = error.filename or config.folder
        raise ConfigError(
            f"{place} cannot be written: {os.strerror(error.errno or 0)}",
            expected="a folder in which every node may make files",
            hint="name another with --monitor-dir, or correct its permissions",
            where="--monitor",
            scope=Scope.RANK if os.path.lexists(place) else Scope.NODE,
        ) from None
    return recorder
