"""Knows the variables that MPI launchers set in their processes, and makes one broadcast over MPI.

mpi4py.MPI is imported only inside functions: the import starts MPI, and MPI ends a process in which
it has no world.
"""

import contextlib
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from srunddp.bootstrap.environment.types import LauncherVariables
from srunddp.errors import ConfigError, RendezvousError, Scope
from srunddp.util.descriptors import opening_high

# If a process has the variables of several launchers, the one that comes first in this list is the
# innermost. Hydra (MPICH, Intel MPI) is recognised by the local rank's variable, because srun
# --mpi=pmi2 sets PMI_RANK too.
LAUNCHERS = (
    LauncherVariables(
        "Open MPI",
        *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ),
    LauncherVariables("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    LauncherVariables(
        "MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"
    ),
    LauncherVariables("Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    LauncherVariables(
        "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"
    ),
    LauncherVariables("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
)

# By library (the beginning of the text that its MPI.Get_library_version() returns), some variables:
# if none of them is set, no launcher has started this process as a rank of that library.
_WORLDS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK"),
    "MPICH": ("PMI_FD", "PMI_PORT", "PMI_RANK", "PMIX_RANK"),
    "Intel(R) MPI": ("PMI_FD", "PMI_PORT", "PMI_RANK"),
    "MVAPICH": ("PMI_FD", "PMI_PORT", "PMI_RANK", "MV2_COMM_WORLD_SIZE"),
}


def is_installed() -> bool:
    """Whether mpi4py can be imported."""
    # find_spec() only locates the package; MPI starts when mpi4py.MPI is imported.
    return importlib.util.find_spec("mpi4py") is not None


# Under srun, Open MPI lets a rank leave MPI_Init while others are still in it, and those crash if a
# message reaches them there (open-mpi/ompi#12495). A rank cannot find out when all have left
# MPI_Init, so each waits for this time, and longer if its own MPI_Init was slow.
_PAUSE = 0.5  # seconds; twice the time of MPI_Init is added


class MpiNotLaunchedError(Exception):
    """This MPI library has no world in this process, so it must not be initialised."""


# Give MPI's descriptors high numbers. Otherwise a script that closes the low ones, as daemons do,
# would close MPI's too, and MPI_Finalize would wait for ever.
@opening_high()
def broadcast(message: str | None, world_size: int, interface: str | None) -> str:
    """Send rank 0's message to all ranks over MPI; initialise MPI if the script has not done so.

    MPI stays initialised, because the script may use it too. It is finalised when Python exits.

    Args:
        message: the text on rank 0; None on the other ranks.
        world_size: the number of ranks by the launcher's variables.
        interface: the network interface that MPI is to use for TCP; None for MPI's own choice.

    Returns:
        Rank 0's message, on all ranks.

    Raises:
        MpiNotLaunchedError: initialising MPI here would end the process.
        RendezvousError: MPI's world has another size than the launcher's.
    """
    # MPI_Init reads these variables. If the script has already started MPI, they have no effect.
    if interface:
        os.environ.update(interface_variables(os.environ, interface))
    import mpi4py

    mpi4py.rc.initialize = False
    # By default mpi4py finalises MPI only if the import of mpi4py.MPI initialised it. Without
    # MPI_Finalize, Open MPI's mpirun reports a failure.
    mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # mpi4py's wheels look for an MPI library at import, and raise a RuntimeError without one.
        raise MpiNotLaunchedError(f"mpi4py does not find its MPI library: {error}") from None

    # The script may have started MPI already, and MPI can start only once in a process.
    if not MPI.Is_initialized():
        library = MPI.Get_library_version()
        require_world(library, os.environ)
        before = time.monotonic()
        MPI.Init_thread()
        # mpirun sets this variable and srun does not, and only srun makes the pause necessary.
        if library.startswith("Open MPI") and "OMPI_COMM_WORLD_RANK" not in os.environ:
            time.sleep(_PAUSE + 2 * (time.monotonic() - before))
    # An MPI that does not know this launcher may make each process a world of its own.
    if MPI.COMM_WORLD.Get_size() != world_size:
        raise RendezvousError(
            f"MPI's world has {MPI.COMM_WORLD.Get_size()} ranks, the launcher's {world_size}",
            expected="one world",
            hint=(
                "mpi4py uses another MPI than the launcher; install mpi4py for this MPI, or use"
                " --channel slurm"
            ),
        )
    return str(MPI.COMM_WORLD.bcast(message, root=0))


def interface_variables(variables: Mapping[str, str], interface: str) -> dict[str, str]:
    """Return the environment variables that make Open MPI and MPICH use an interface; they read
    these in MPI_Init.

    Args:
        variables: the rank's environment variables. A variable that is set here is left out of the
            result, so that the user's value stays.
        interface: the name of the interface.
    """
    names = ["MPICH_NETWORK_IFACE", "FI_TCP_IFACE"]
    # Open MPI accepts a list to include or one to exclude, not both.
    if "OMPI_MCA_btl_tcp_if_exclude" not in variables:
        names.append("OMPI_MCA_btl_tcp_if_include")
    return {name: interface for name in names if name not in variables}


def require_world(library: str, variables: Mapping[str, str]) -> None:
    """Refuse an MPI library that would form no world here, or would end the process.

    Args:
        library: the library's name for itself, from ``MPI.Get_library_version()``.
        variables: the rank's environment variables, which show what launched it.

    Raises:
        MpiNotLaunchedError: nothing shows that this MPI has a world here.
    """
    for name, proofs in _WORLDS.items():
        if library.startswith(name):
            if any(proof in variables for proof in proofs):
                return
            raise MpiNotLaunchedError(f"mpi4py uses {name}, and none of {', '.join(proofs)} is set")
    raise MpiNotLaunchedError(
        f"mpi4py uses an MPI that srunddp does not know: {library.split(',')[0]}"
    )


def is_running() -> bool:
    """Whether mpi4py has initialised MPI in this process, and MPI is not yet finalised."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized()) and not module.Is_finalized()


def was_started() -> bool:
    """Whether mpi4py has initialised MPI in this process, so that MPI cannot start again. MPI may
    be finalised by now.
    """
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


def do_not_start() -> None:
    """Let the script import mpi4py.MPI without starting MPI; do nothing if mpi4py is missing."""
    with contextlib.suppress(ImportError):
        import mpi4py

        mpi4py.rc.initialize = False


def finalize() -> None:
    """Finalise MPI if it is running, as mpi4py does when Python exits."""
    if is_running():
        sys.modules["mpi4py.MPI"].Finalize()


def finalize_on_exec() -> None:
    """Finalise MPI before the script replaces this process by another program, for example Python
    with other variables.

    mpirun takes a process that has called MPI_Init and ends without MPI_Finalize for a failed one,
    and the script does not know that srunddp has called MPI_Init. MPI_Finalize waits for all ranks,
    so every rank must replace its process, or exit.
    """
    process = os.getpid()

    def finalizing(execute: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(execute)
        def finalize_and_execute(path: Any, *arguments: Any, **named: Any) -> NoReturn:
            # Do not finalise in a process that the script has forked, because MPI has not started
            # there. And do not finalise before a call that will fail: os.execvp tries the program
            # in each folder of PATH, and only an executable file replaces this process.
            if os.getpid() == process and (isinstance(path, int) or os.access(path, os.X_OK)):
                finalize()
            execute(path, *arguments, **named)

        return finalize_and_execute

    # The other functions of the family, such as os.execvp, call one of these two.
    os.execv = finalizing(os.execv)
    os.execve = finalizing(os.execve)


class Mpi4pyImportBlocker:
    """An import hook that refuses ``from mpi4py import MPI`` after a rendezvous over PMI: MPI would
    find that the PMI socket has already been used, and end the process.

    It raises an ImportError, so that a script for which MPI is optional goes on without MPI.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == "mpi4py.MPI":
            raise ImportError(
                "the ranks met over PMI, after which MPI cannot start -> use srunddp --channel mpi"
            )


def block() -> None:
    """Refuse the import of mpi4py.MPI from now on."""
    sys.meta_path.insert(0, Mpi4pyImportBlocker())


def is_blocked() -> bool:
    """Whether the import of mpi4py.MPI is refused in this process."""
    return any(isinstance(finder, Mpi4pyImportBlocker) for finder in sys.meta_path)


def reject_prterun(variables: Mapping[str, str]) -> None:
    """Refuse a rank that prterun or prun started: they give a process its rank, but no world size.

    Args:
        variables: the rank's environment variables.

    Raises:
        ConfigError: prterun or prun started the rank.
    """
    # srun --mpi=pmix sets PMIX_RANK, but not PRTE_LAUNCHED. Open MPI's mpirun sets both, but the
    # caller has found mpirun's ranks before by their OMPI_* variables.
    if "PMIX_RANK" in variables and "PRTE_LAUNCHED" in variables:
        raise ConfigError(
            f"PMIX_RANK={variables['PMIX_RANK']} from prterun, with no world size and no local"
            " rank",
            expected="OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK as mpirun sets them",
            hint="start with Open MPI's mpirun instead of prterun",
            scope=Scope.JOB,
        )
