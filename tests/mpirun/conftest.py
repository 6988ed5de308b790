"""The three MPIs: Debian's Open MPI 4, the wheels of Open MPI 5 and MPICH, each with its
environment.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
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
    """One MPI: its mpirun, the options that let more ranks than cores run, and its Python
    environment.
    """

    name: str
    mpirun: str
    options: tuple[str, ...]
    environment: Path
    variables: tuple[tuple[str, str], ...] = ()

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


def _debian() -> tuple[tuple[str, str], ...]:
    # mpi4py would take the Open MPI of its own environment.
    found = sorted(Path("/usr/lib").glob("*/libmpi.so.40"))
    if found:
        return (("MPI4PY_LIBMPI", str(found[0])),)
    return ()


MPIS = {
    "openmpi4": Mpi("Open MPI", "/usr/bin/mpirun", ("--oversubscribe",), ROOT / ".venv", _debian()),
    "openmpi5": Mpi(
        "Open MPI", str(ROOT / ".venv/bin/mpirun"), ("--oversubscribe",), ROOT / ".venv"
    ),
    "mpich": Mpi("Hydra", str(ROOT / ".venv-mpich/bin/mpirun"), (), ROOT / ".venv-mpich"),
}


@pytest.fixture(params=sorted(MPIS))
def mpi(request: pytest.FixtureRequest) -> Mpi:
    return there(request.param)


def there(name: str) -> Mpi:
    found = MPIS[name]
    if not os.path.exists(found.mpirun) or not os.path.exists(found.python):
        missing(f"{found.mpirun} with {found.python}")
    return found
