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
    from srunddp.monitor.sampler import Sampler


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


class NullMonitor:
    """Does nothing: a run without ``--monitor``. Its methods are called in this order.

    Attributes:
        page: for the worker.
    """

    def __init__(self) -> None:
        self.page = TelemetryPage()

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


class RunMonitor(NullMonitor):
    """A recorder of this rank and, where the plan says so, the sampler of its node."""

    def __init__(self, plan: MonitorConfig) -> None:
        """Make the files.

        Raises:
            ConfigError: they cannot be written.
        """
        from srunddp.monitor.recorder import RUN, Recorder

        self.page = TelemetryPage(recording=True)
        self._plan = plan
        self._sampler: Sampler | None = None
        self._recorder = Recorder(plan.folder, f"{plan.node}.rank{plan.rank}", plan.seconds, self.page)
        try:
            self._recorder.open()
            if plan.rank == 0:  # of an earlier start in the same folder, as there may be outside Slurm
                (plan.folder / RUN).unlink(missing_ok=True)
        except OSError as error:
            place = error.filename or plan.folder
            raise ConfigError(
                f"{place} cannot be written: {os.strerror(error.errno or 0)}",
                expected="a folder in which every node may make files",
                hint="name another with --monitor-dir, or correct its permissions",
                where="--monitor",
                scope=Scope.RANK if os.path.lexists(place) else Scope.NODE,
            ) from None

    def start_sampler(self, interface: str, rank_variable: str, launcher: int | None) -> None:
        plan = self._plan
        if plan.samples:
            from srunddp.monitor.sampler import SamplerConfig, start  # one rank of a node needs it

            self._sampler = start(
                SamplerConfig(
                    folder=plan.folder,
                    node=plan.node,
                    seconds=plan.seconds,
                    interface=interface,
                    rank_variable=rank_variable,
                    rank=plan.rank,
                    supervisor=os.getpid(),
                    launcher=launcher,
                )
            )

    def in_worker(self) -> None:
        self._recorder.in_worker()
        if self._sampler:
            self._sampler.in_worker()

    def start(self) -> None:
        self._recorder.start()

    def mark(self, name: str) -> None:
        self._recorder.mark(name)

    def describe(self, run: Mapping[str, Any]) -> None:
        self._recorder.describe({"version": 1, **run, "script": self._plan.script, "seconds": self._plan.seconds})

    def stop_sampler(self) -> str:
        return self._sampler.finish(_WITHIN) if self._sampler else ""

    def finish(self, code: int) -> None:
        self._recorder.finish(code, _WITHIN)
