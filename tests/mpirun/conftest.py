"""The five MPIs, each with its environment: Debian's Open MPI 4 and MPICH 4, and the wheels of Open
MPI 5, MPICH 5 and Intel MPI.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT, missing
from tests.slurm.conftest import Outcome, outcome

ALLOW_ROOT = dict.fromkeys(
    (
        "OMPI_ALLOW_RUN_AS_ROOT",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
        "PRTE_ALLOW_RUN_AS_ROOT",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
    ),
    "1",
)


LIMIT = 300.0  # seconds, which only what is broken reaches


@dataclass(frozen=True)
class Mpi:
    """One MPI.

    Attributes:
        name: What srunddp calls its launcher.
        mpirun: The program.
        options: With which more ranks than cores run.
        environment: Of Python.
        variables: That its users set, or that let mpi4py find its library.
    """

    name: str
    mpirun: str
    options: tuple[str, ...]
    environment: Path
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def is_hydra(self) -> bool:
        """Whether its mpirun is Hydra: MPICH's, or Intel's, which was made from that."""
        return self.name in ("Hydra", "Intel MPI")

    @property
    def channel(self) -> str:
        """Over which its ranks meet."""
        return "pmi" if self.is_hydra else "mpi"

    @property
    def python(self) -> str:
        return str(self.environment / "bin" / "python")

    def env(self) -> dict[str, str]:
        return {
            "VIRTUAL_ENV": str(self.environment),
            "OMP_NUM_THREADS": "1",
            **ALLOW_ROOT,
            **dict(self.variables),
        }

    def here(self) -> dict[str, str]:
        """All variables for a start on this machine, with a new folder for temporary files.

        An mpirun that is killed leaves its session folder ``ompi.PID``. A later mpirun of Open MPI
        5 that gets the same process id fails there: "The PMIx server's listener thread failed to
        start", exit code 213.
        """
        return {**os.environ, **self.env(), "TMPDIR": tempfile.mkdtemp(dir=_temporary().name)}

    def run(
        self, ranks: int, *words: str, env: dict[str, str] | None = None, timeout: float = LIMIT
    ) -> Outcome:
        command = [self.mpirun, *self.options, "-n", str(ranks), *words]
        variables = self.here() | (env or {})
        return outcome(
            subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=timeout, check=False
            )
        )


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """For this process's starts, removed at its end; the path is short, as those of sockets must
    be.
    """
    return tempfile.TemporaryDirectory(prefix="mpi-", ignore_cleanup_errors=True)


def _debian_openmpi() -> tuple[tuple[str, str], ...]:
    # mpi4py would take the MPI of its own environment.
    found = sorted(Path("/usr/lib").glob("*/libmpi.so.40"))
    if found:
        return (("MPI4PY_LIBMPI", str(found[0])),)
    return ()


def _debian_mpich() -> tuple[tuple[str, str], ...]:
    # Debian has given the library another name than MPICH's ABI says, by which mpi4py asks for it.
    found = sorted(Path("/usr/lib").glob("*/libmpich.so.12"))
    if not found:
        return ()
    link = ROOT / "build" / "mpich4" / "libmpi.so.12"
    link.parent.mkdir(parents=True, exist_ok=True)
    # Several processes of tests may be here at once.
    with suppress(FileExistsError):
        link.symlink_to(found[0])
    return (("LD_LIBRARY_PATH", str(link.parent)),)


_INTEL = ROOT / ".venv-intelmpi"

MPIS = {
    # Not mpirun: that is whichever of Debian's two the alternatives say.
    "openmpi4": Mpi(
        "Open MPI",
        "/usr/bin/mpirun.openmpi",
        ("--oversubscribe",),
        ROOT / ".venv",
        _debian_openmpi(),
    ),
    "openmpi5": Mpi(
        "Open MPI", str(ROOT / ".venv/bin/mpirun"), ("--oversubscribe",), ROOT / ".venv"
    ),
    "mpich4": Mpi("Hydra", "/usr/bin/mpirun.mpich", (), ROOT / ".venv-mpich", _debian_mpich()),
    "mpich": Mpi("Hydra", str(ROOT / ".venv-mpich/bin/mpirun"), (), ROOT / ".venv-mpich"),
    # Not mpirun: that is a shell script, which waits for this one and passes no signal on.
    "intelmpi": Mpi(
        "Intel MPI",
        str(_INTEL / "bin/mpiexec.hydra"),
        (),
        _INTEL,
        (("MPI4PY_LIBMPI", str(_INTEL / "lib/libmpi.so.12")),),
    ),
}


# For the fixtures: the gate has time for one MPI of each kind and generation, of which a wheel is
# quickly there.
_NIGHTLY = ("intelmpi", "mpich4")
MPI_NAMES = [
    pytest.param(name, marks=pytest.mark.nightly) if name in _NIGHTLY else name
    for name in sorted(MPIS)
]


@pytest.fixture(params=MPI_NAMES)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    return there(request.param)


def there(name: str) -> Mpi:
    found = MPIS[name]
    if not os.path.exists(found.mpirun) or not os.path.exists(found.python):
        missing(f"{found.mpirun} with {found.python}")
    return found
