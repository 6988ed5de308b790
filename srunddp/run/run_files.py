"""The name of a run's folder, the ``--result`` file, and the metadata for ``srunddp report``."""

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
from srunddp.util.atomic_file import plain, write_output


def clear_result(path: str) -> None:
    """Empty the ``--result`` file, so that nobody takes an earlier run's result for that of this
    run. Called on rank 0 before the rendezvous.

    Raises:
        ConfigError: The file cannot be written.
    """
    _write_result(path, b"")


def write_result(path: str, *, exit_code: int, restarts: int) -> None:
    """Write the run's exit code and its number of restarts to the ``--result`` file. Called on rank
    0 when the run is over.

    The file is needed because Slurm may report a different exit code.

    Args:
        path: The ``--result`` file.
        exit_code: The run's exit code.
        restarts: How often all ranks were restarted within the job.

    Raises:
        ConfigError: The file cannot be written.
    """
    text = json.dumps({"exit_code": exit_code, "restarts": restarts})
    _write_result(path, f"{text}\n".encode())


def _write_result(path: str, content: bytes) -> None:
    with file_errors(
        f"{path} cannot be written",
        expected="a file that rank 0 can write",
        hint="name a file in a folder that exists and is writable",
        where="--result",
    ):
        write_output(Path(path), content)


def requeues() -> int:
    """Return how often Slurm has requeued this job; 0 outside Slurm."""
    text = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def run_name(environment: Environment) -> str:
    """Return the name of the run's folder. Under Slurm it is JOB.STEP, which stays the same when
    the job is requeued.
    """
    # Use only what is the same on all ranks, because the ranks have not communicated yet.
    if environment.step:
        return f"{environment.step.job}.{environment.step.step}"
    # A run of a single process outside a job step is named after the job, because the tasks of a
    # job array may run at the same time, and each has a different job number. A run of several
    # ranks is not named after the job, because mpirun may not pass the variable with the job's
    # number to processes on other nodes.
    if environment.world_size == 1:
        job = os.environ.get("SLURM_JOB_ID")
    else:
        job = None
    return os.environ.get("PMIX_NAMESPACE") or job or "run"


def run_metadata(setup: RankSetup, result: RendezvousResult) -> dict[str, Any]:
    """Return what ``srunddp report`` needs to know about the run. Called on rank 0 after the
    rendezvous.
    """
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
    """Return the job's time limit in seconds; None if Slurm does not say."""
    # Slurm 22.05 and older do not set SLURM_JOB_END_TIME.
    begin = os.environ.get("SLURM_JOB_START_TIME", "")
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if begin.isdecimal() and end.isdecimal():
        return int(end) - int(begin)
    return None
