"""The names of a run's folders, its result, and what its report has to know."""

import json
import os
import time
from pathlib import Path
from typing import Any

from srunddp._version import __version__
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.rendezvous.protocol import RendezvousResult
from srunddp.bootstrap.rendezvous.rank_setup import RankSetup
from srunddp.errors import file_errors
from srunddp.util.atomic_file import plain, replace_file


def clear_result(path: str) -> None:
    """Leave nothing of an earlier run in the file of ``--result``; on rank 0, before ranks meet.

    Raises:
        ConfigError: it cannot be written.
    """
    _write_result(path, b"")


def write_result(path: str, *, exit_code: int, restarts: int) -> None:
    """Write how the run has ended, of which Slurm may make another exit code; on rank 0.

    Args:
        path: the file of ``--result``.
        exit_code: the run's.
        restarts: how often all ranks started anew.

    Raises:
        ConfigError: it cannot be written.
    """
    text = json.dumps({"exit_code": exit_code, "restarts": restarts})
    _write_result(path, f"{text}\n".encode())


def _write_result(path: str, content: bytes) -> None:
    with file_errors(
        f"{path} cannot be written",
        expected="a file of rank 0's",
        hint="name a file in a folder that is there and may be written to",
        where="--result",
    ):
        replace_file(Path(path), content)


def requeues() -> int:
    """Return how often Slurm has started this job again; 0 outside of Slurm."""
    text = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def run_name(environment: Environment) -> str:
    """Name a run's folder, the same on all ranks and after a requeue."""
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
    """Collect what the report of the run has to know, and rank 0 knows after the rendezvous."""
    environment = setup.environment
    ranks = [
        (rank, node) for rank, node in sorted(result.nodes.items()) if rank < environment.world_size
    ]
    step = environment.step
    return {
        "srunddp": __version__,
        "job": str(step.job) if step else "",
        "step": str(step.step) if step else "",
        "restarts": requeues() + setup.options.generation,
        "run": plain(run_name(environment)),
        "launcher": environment.launcher,
        "world_size": environment.world_size,
        "nodes": list(dict.fromkeys(node for _, node in ranks)),
        "ranks": {str(rank): node for rank, node in ranks},
        "interfaces": {environment.node: setup.interface.name},
        "backend": setup.options.backend,
        "started": time.time(),
        "time_limit_s": _time_limit(),
    }


def _time_limit() -> int | None:
    """Seconds that Slurm gives the job; None where it does not say."""
    # Slurm 22.05 and older do not tell the end.
    begin = os.environ.get("SLURM_JOB_START_TIME", "")
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if begin.isdecimal() and end.isdecimal():
        return int(end) - int(begin)
    return None
