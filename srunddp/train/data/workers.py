"""How many loader workers a rank has, and how they start."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

from srunddp.bootstrap.environment import mpi
from srunddp.train.config import LoadingConfig

_INFINIBAND = Path("/sys/class/infiniband")
_MOST = 8


def default_workers(config: LoadingConfig, cpus: int, in_memory: bool) -> int:
    """Workers of one loader.

    Args:
        config: whose ``num_workers`` counts where it is given.
        cpus: that this rank may use for itself.
        in_memory: the data set is tensors in memory: indexing them is quicker than passing them on.
    """
    if config.num_workers is not None:
        return config.num_workers
    return 0 if in_memory else min(_MOST, max(cpus - 1, 0))


def start_method(config: LoadingConfig, backend: str) -> str:
    """``fork``, ``spawn`` or ``forkserver``; only for loaders that have workers.

    A fork of a process in which MPI runs, or which has memory registered for RDMA as NCCL has, may crash or hang. The
    fork server is started apart and has neither. As with spawn, each of its workers imports the script: one that would
    train there too, since it does not ask for its ``__name__``, gets fork.

    Args:
        config: whose ``multiprocessing_context`` counts where it is given.
        backend: of the process group.
    """
    method = config.multiprocessing_context
    if method is None:
        unsafe = mpi.is_running() or (backend == "nccl" and _has_rdma())
        method = "forkserver" if unsafe and _may_be_imported() else "fork"
    if method == "forkserver":
        # Once in the server, rather than for two seconds in each worker.
        multiprocessing.set_forkserver_preload(["torch"])
    return method


def _has_rdma() -> bool:
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def _may_be_imported() -> bool:
    """Whether importing the script runs it no second time, as far as its text tells."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return script is None or "__name__" in Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return True
