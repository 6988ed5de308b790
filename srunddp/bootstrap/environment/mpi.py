"""MPI launchers: what their processes are told, and one broadcast over MPI itself.

mpi4py is imported inside functions only: its import starts MPI, which ends the process where it has
no world.
"""

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from types import ModuleType

from srunddp.bootstrap.environment.types import LauncherVariables
from srunddp.errors import ConfigError, RendezvousError, Scope

# Innermost first. Hydra's processes (MPICH, Intel MPI) are told from srun --mpi=pmi2, which sets
# PMI_RANK as well, by the local rank.
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

# How each library names itself, and the variables of which one at least proves that it has a world
# here.
_WORLDS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK"),
    "MPICH": ("PMI_FD", "PMI_PORT", "PMI_RANK", "PMIX_RANK"),
    "Intel(R) MPI": ("PMI_FD", "PMI_PORT", "PMI_RANK"),
    "MVAPICH": ("PMI_FD", "PMI_PORT", "PMI_RANK", "MV2_COMM_WORLD_SIZE"),
}


def is_installed() -> bool:
    """Whether mpi4py can be imported."""
    # This looks at the package's place alone; MPI starts when mpi4py.MPI is imported.
    return importlib.util.find_spec("mpi4py") is not None


# Started by srun, Open MPI lets a rank leave MPI_Init while others are still in it, and those crash
# at the first message that reaches them there (open-mpi/ompi#12495). Nothing says when all are out:
# all wait, longer on a busy node.
_PAUSE = 0.5  # seconds, to which twice the time of MPI_Init is added


class MpiNotLaunchedError(Exception):
    """This MPI library has no world of its own here, so it must not be initialised."""


def broadcast(message: str | None, world_size: int, interface: str | None) -> str:
    """Send rank 0's message to all ranks over MPI, initialising MPI where the script has not.

    MPI stays initialised, for the script may use it too, and is finalised when Python exits.

    Args:
        message: rank 0's; None on the others.
        world_size: what the launcher has told.
        interface: which MPI is to use for TCP; None for its own choice.

    Returns:
        Rank 0's message, on all ranks.

    Raises:
        MpiNotLaunchedError: initialising MPI here would end the process.
        RendezvousError: MPI's world has another size than the launcher's.
    """
    # MPI_Init reads these variables. For an MPI that the script has started already they come too
    # late, and do nothing.
    if interface:
        os.environ.update(interface_variables(os.environ, interface))
    import mpi4py

    mpi4py.rc.initialize = False
    # By default mpi4py finalises only what its import has initialised. Without MPI_Finalize Open
    # MPI's mpirun reports a failure.
    mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # mpi4py's wheels look for a library at import: a RuntimeError says that there is none.
        raise MpiNotLaunchedError(f"mpi4py does not find its MPI library: {error}") from None

    # The script may have started MPI itself, which is possible once in a process.
    if not MPI.Is_initialized():
        library = MPI.Get_library_version()
        require_world(library, os.environ)
        before = time.monotonic()
        MPI.Init_thread()
        # mpirun sets that variable, srun does not.
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
    """Return what Open MPI and MPICH read when they are initialised, so that they use an interface.

    Args:
        variables: the rank's; what the user has set of these stays, and is left out.
        interface: the name of the interface.
    """
    names = ["MPICH_NETWORK_IFACE", "FI_TCP_IFACE"]
    # Open MPI accepts a list to include or one to exclude, not both.
    if "OMPI_MCA_btl_tcp_if_exclude" not in variables:
        names.append("OMPI_MCA_btl_tcp_if_include")
    return {name: interface for name in names if name not in variables}


def require_world(library: str, variables: Mapping[str, str]) -> None:
    """Refuse an MPI that would make no world here, or end the process.

    Args:
        library: how it names itself, ``MPI.Get_library_version()``.
        variables: the rank's, by which its launcher is known.

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
    """Whether the script has started MPI by mpi4py."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized()) and not module.Is_finalized()


def was_started() -> bool:
    """Whether MPI was started in this process by mpi4py, also if it is over; it cannot start
    twice.
    """
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


def do_not_start() -> None:
    """Let the script import mpi4py.MPI without starting MPI; nothing happens without mpi4py."""
    with contextlib.suppress(ImportError):
        import mpi4py

        mpi4py.rc.initialize = False


def finalize() -> None:
    """Finalise MPI where it runs, as mpi4py does when Python ends."""
    if is_running():
        sys.modules["mpi4py.MPI"].Finalize()


class Mpi4pyImportBlocker:
    """Refuses ``from mpi4py import MPI`` after a rendezvous over PMI: MPI would end the process on
    that used socket.

    An ImportError, so that a script for which MPI is optional goes on without it.
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
    """Refuse prterun and prun, whose processes are told a rank and nothing else.

    Args:
        variables: the rank's.

    Raises:
        ConfigError: it was started by one of them.
    """
    # srun --mpi=pmix sets the first alone. Open MPI's mpirun sets both, and OMPI_* by which it has
    # been recognised before.
    if "PMIX_RANK" in variables and "PRTE_LAUNCHED" in variables:
        raise ConfigError(
            f"PMIX_RANK={variables['PMIX_RANK']} from prterun, with no world size and no local"
            " rank",
            expected="OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK as mpirun sets them",
            hint="start with Open MPI's mpirun instead of prterun",
            scope=Scope.JOB,
        )
