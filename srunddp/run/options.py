"""What the command line says about a run, and the folders and files that follow from it."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srunddp._version import __version__
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.rendezvous.meet import RankSetup
from srunddp.bootstrap.rendezvous.protocol import RendezvousResult
from srunddp.errors import Scope, UsageError, file_errors
from srunddp.monitor.config import MonitorConfig
from srunddp.run.script import Script
from srunddp.supervisor.limits import LOST_AFTER, STALL_TIMEOUT
from srunddp.util.atomic_file import plain, replace_file


@dataclass(frozen=True)
class RunOptions:
    """What the command line says about a run, apart from how its ranks meet.

    Attributes:
        stall_timeout: seconds without a step of any rank; 0 for no limit.
        lost_after: seconds without an answer of a node; spare_nodes: how many wait to take the
            ranks of such a one.
        grace: seconds that a failed rank's own end may take.
        restart_grace: the same for all ranks before a restart.
        result: the file for :func:`write_result`; None for none.
        log_dir, prefix, show_ranks: where output goes, see
            :func:`srunddp.supervisor.output.redirect.output_target`.
        fast_exit: end without taking Python's objects down.
        offline: export what :func:`srunddp.stage.paths.offline` says.
        staged: run in the copies that :mod:`srunddp.stage.paths` reads of.
        monitor: seconds between samples; None for none; monitor_dir: where they go, see
            :func:`plan_monitor`.
    """

    stall_timeout: float = STALL_TIMEOUT
    lost_after: float = LOST_AFTER
    spare_nodes: int = 0
    grace: float = 30.0
    restart_grace: float = 2.0
    result: str | None = None
    log_dir: str | None = None
    prefix: bool = False
    show_ranks: str | None = None
    fast_exit: bool = False
    offline: bool = False
    staged: bool = False
    monitor: float | None = None
    monitor_dir: str | None = None


def plan_monitor(
    options: RunOptions, environment: Environment, script: Script, generation: int = 0
) -> MonitorConfig | None:
    """Where this rank's files of ``--monitor`` go; None without it. Nothing is opened yet.

    Their folder is below that of the logs unless ``--monitor-dir`` names another; each start and
    generation has one.

    Raises:
        UsageError: ``--monitor-dir`` has no ``--monitor``.
    """
    if options.monitor is None:
        if options.monitor_dir is not None:
            raise UsageError(
                "--monitor-dir without --monitor", hint="add --monitor", scope=Scope.JOB
            )
        return None
    folder = Path(options.monitor_dir or options.log_dir or "logs", plain(run_name(environment)))
    return MonitorConfig(
        folder=folder / (f"monitor.{_restarts()}" + (f".{generation}" if generation else "")),
        node=plain(environment.node),
        rank=environment.rank,
        samples=environment.local_rank == 0,
        seconds=options.monitor,
        script=script.words,
    )


def write_result(path: str, **result: int) -> None:
    """On rank 0: how the run has ended, of which Slurm may make another exit code; a ConfigError
    where that fails.
    """
    hint = "name a file in a folder that is there and may be written to"
    with file_errors(
        f"{path} cannot be written", expected="a file of rank 0's", hint=hint, where="--result"
    ):
        replace_file(Path(path), (json.dumps(result) + "\n").encode() if result else b"")


def _restarts() -> int:
    text = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def run_name(environment: Environment) -> str:
    """The name of a run's folder."""
    # The same on all ranks before any of them has heard of another.
    if environment.step:
        return f"{environment.step.job}.{environment.step.step}"
    # A batch script's own run has no step, and an array's tasks, each a job, may run at once. What
    # mpirun starts on other nodes may not be told the job.
    if environment.world_size == 1:
        job = os.environ.get("SLURM_JOB_ID")
    else:
        job = None
    return os.environ.get("PMIX_NAMESPACE") or job or "run"


def run_metadata(setup: RankSetup, result: RendezvousResult) -> dict[str, Any]:
    """What the report of the run has to know, and rank 0 knows after the rendezvous."""
    environment = setup.environment
    ranks = [
        (rank, node) for rank, node in sorted(result.nodes.items()) if rank < environment.world_size
    ]
    step = environment.step
    begin, end = (os.environ.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END"))
    return {
        "srunddp": __version__,
        "job": str(step.job) if step else "",
        "step": str(step.step) if step else "",
        "restarts": _restarts() + setup.options.generation,
        "run": plain(run_name(environment)),
        "launcher": environment.launcher,
        "world_size": environment.world_size,
        "nodes": list(dict.fromkeys(node for _, node in ranks)),
        "ranks": {str(rank): node for rank, node in ranks},
        "interfaces": {environment.node: setup.interface.name},
        "backend": setup.options.backend,
        "started": time.time(),
        "time_limit_s": int(end) - int(begin) if begin.isdecimal() and end.isdecimal() else None,
    }
