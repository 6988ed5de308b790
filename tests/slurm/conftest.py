"""The real cluster, started once, and srun of our own launcher on it."""

from __future__ import annotations

import json
import re
import subprocess
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.nodes import NODES
from tests.conftest import ROOT, missing
from tests.support.starting import until

PYTHON = str(ROOT / ".venv" / "bin" / "python")
SRUNDDP = str(ROOT / "bin" / "srunddp")
# States of a job that has ended.
OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY")

# Failures below us, upon which a run is repeated. Two threads or processes of Slurm 22.05's srun
# that try the same port at once, as those of a heterogeneous step do: the loser tries no other. And
# Open MPI under its PMIx, where MPI_Init crashes at the others' first messages, should the pause
# after MPI_Init not do (docs/measurements.md). A supervisor says that the worker ended there;
# without one, as in `srunddp check`, the printed stack has the function.
_NOT_OURS = (("cannot establish listening port",), ("*** Process received signal ***", "MPI_Init"))
TRIES = 4


@dataclass(frozen=True)
class Outcome:
    """How a command on the cluster ended: its exit code, and the JSON objects and other lines it
    printed.
    """

    code: int
    reports: list[dict[str, Any]]
    output: str
    errors: str

    def by_rank(self) -> dict[int, dict[str, Any]]:
        """The reports by rank; each rank reports once."""
        ranks = {int(report["rank"]): report for report in self.reports}
        assert len(ranks) == len(self.reports), self.reports
        return ranks


def outcome(done: subprocess.CompletedProcess[str]) -> Outcome:
    # At a terminal the end of the input is shown, in the same line.
    lines = [line.removeprefix("^@") for line in done.stdout.splitlines()]
    # Python's own dicts are others' words.
    reports = [json.loads(line) for line in lines if line.startswith('{"')]
    return Outcome(done.returncode, reports, done.stdout, done.stderr)


@dataclass(frozen=True)
class SlurmJobRunner:
    """The cluster, with an ifaces.conf for its data network."""

    cluster: Cluster

    @property
    def ifaces(self) -> Path:
        return self.cluster.shared / "ifaces.conf"

    def srun(
        self,
        *words: str,
        env: dict[str, str] | None = None,
        timeout: float = 300,
        ifaces: Path | None = None,
    ) -> Outcome:
        """Run srun with these words on the login node."""
        return self.on_login("srun", *words, env=env, timeout=timeout, ifaces=ifaces)

    def on_login(
        self,
        *words: str,
        env: dict[str, str] | None = None,
        timeout: float = 300,
        ifaces: Path | None = None,
    ) -> Outcome:
        if "--mpi=pmix" in words:
            need_pmix(self.cluster)
        variables = {
            "SRUNDDP_IFACES": str(ifaces or self.ifaces),
            "OMP_NUM_THREADS": "1",
            **site_mpi(),
        } | (env or {})
        for _ in range(TRIES):
            self.cluster.await_completing()
            done = self.cluster.run(*words, env=variables, timeout=timeout, check=False)
            seen = [signs for signs in _NOT_OURS if all(sign in done.stderr for sign in signs)]
            if not seen:
                break
            warnings.warn(f"a run is repeated after: {seen[0][0]}", stacklevel=2)
        return outcome(done)

    def batch(self, body: str, *options: str, timeout: float = 300) -> Outcome:
        """Submit a batch script, wait for its end, and return what it printed."""
        script = self.cluster.shared / "job.sh"
        log = self.cluster.shared / "job.out"
        log.unlink(missing_ok=True)
        script.write_text(
            f"#!/bin/bash\nexport SRUNDDP_IFACES={self.ifaces} OMP_NUM_THREADS=1\n{body}\n"
        )
        words = (
            "sbatch",
            "--parsable",
            "--output",
            str(log),
            f"--chdir={ROOT}",
            *options,
            str(script),
        )
        self.cluster.await_completing()
        number = self.cluster.run(*words).stdout.strip()
        code = until(lambda: self.exit_code(number), timeout, lambda: f"job {number} does not end")
        if log.exists():
            text = log.read_text()
        else:
            text = ""
        return outcome(subprocess.CompletedProcess(words, int(code), text, text))

    def exit_code(self, number: str) -> str:
        """The exit code of a batch job that is over; empty until then.

        `sbatch --wait` looks after 2 s, then after 8 s more, and then every 32 s.
        """
        shown = self.cluster.run("scontrol", "show", "job", number).stdout
        state = re.search(r"JobState=(\w+)", shown)
        code = re.search(r" ExitCode=(\d+)", shown)
        assert state, shown
        assert code, shown
        if state[1] in OVER:
            return code[1]
        return ""

    def write_ifaces(self, name: str, text: str) -> Path:
        path = self.cluster.shared / name
        path.write_text(text)
        return path


def need_pmix(cluster: Cluster) -> None:
    """Skip a test where this Slurm was built without PMIx, as Debian's 26.05."""
    types = cluster.run("srun", "--mpi=list")
    if "pmix" not in types.stdout + types.stderr:
        missing("srun --mpi=pmix: this Slurm has no such plugin")


def gated(values: Iterable[str], *names: str) -> list[object]:
    """Mark the values of these names, of all with which a test is parametrized, as those that the
    gate runs.
    """
    everything = list(values)
    assert set(names) <= set(everything), names
    return [
        pytest.param(value, marks=pytest.mark.gate) if value in names else value
        for value in everything
    ]


# Slurm's PMIx lets ranks of Open MPI out of MPI_Init before others are in it. On a busy machine
# that crashes them.
OPEN_MPI = pytest.mark.alone


def site_mpi() -> dict[str, str]:
    """Debian's Open MPI, as a site has one that suits its Slurm.

    The wheel's Open MPI 5.0.11 crashes there far more often.
    """
    found = sorted(Path("/usr/lib").glob("*/libmpi.so.40"))
    if found:
        return {"MPI4PY_LIBMPI": str(found[0])}
    return {}


def data_network(cluster: Cluster) -> Path:
    """Write an ifaces.conf for the cluster's data network."""
    ifaces = cluster.shared / "ifaces.conf"
    entry = '- nodes: {node.name}\n  interface: {node.data_interface}\n  address: "{{node}}-data"\n'
    ifaces.write_text("".join(entry.format(node=node) for node in NODES))
    return ifaces
