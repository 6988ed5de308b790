"""A program of tests/interop/programs under its own launcher, under `mpirun srunddp` and under `srun srunddp`.

Each takes `--out FOLDER` and leaves rankR.json there: rank, local_rank, world_size, and the losses as float.hex().
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, missing
from tests.mpirun.conftest import there
from tests.slurm.conftest import SRUNDDP, Bench, bench, cancelled  # noqa: F401

ENVIRONMENT = ROOT / ".venv-interop"
PYTHON = str(ENVIRONMENT / "bin" / "python")
PROGRAMS = ROOT / "tests" / "interop" / "programs"
RANKS = 2
LIMIT = 120.0  # seconds for one program

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """How a program ended: what its ranks left, by rank, and what was printed on standard error."""

    records: list[Record]
    errors: str

    def losses(self) -> list[list[str]]:
        """Of each rank, each to the bit."""
        return [record["losses"] for record in self.records]

    def places(self) -> list[tuple[int, int, int]]:
        """Of each rank: itself, its local rank and the world's size."""
        return [(record["rank"], record["local_rank"], record["world_size"]) for record in self.records]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.interop)


def program(name: str) -> str:
    return str(PROGRAMS / f"{name}.py")


def alone(words: list[str], out: Path, env: dict[str, str] | None = None) -> Run:
    """The environment's Python with these words: a program that starts its own ranks, or a launcher's module."""
    command = [PYTHON, *words, "--out", str(out)]
    return _finished(subprocess.run(command, env=_env(env), capture_output=True, text=True, timeout=LIMIT), out)


def torchrun(name: str, out: Path, *arguments: str, ranks: int = RANKS, env: dict[str, str] | None = None) -> Run:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return alone([*launcher, program(name), *arguments], out, env)


def accelerate_launch(
    name: str, out: Path, *arguments: str, ranks: int = RANKS, env: dict[str, str] | None = None
) -> Run:
    options = ["--cpu", "--multi_cpu" if ranks > 1 else "--num_machines=1", f"--num_processes={ranks}"]
    launcher = ["-m", "accelerate.commands.launch", *options, "--num_cpu_threads_per_process=1"]
    return alone([*launcher, program(name), *arguments], out, env)


def mpirun(name: str, out: Path, *arguments: str, ranks: int = RANKS, env: dict[str, str] | None = None) -> Run:
    """Under srunddp below the wheel's Open MPI."""
    libmpi = {"MPI4PY_LIBMPI": str(ROOT / ".venv" / "lib" / "libmpi.so.40")}  # another environment than the wheel's
    words = (SRUNDDP, program(name), *arguments, "--out", str(out))
    done = there("openmpi5").run(ranks, *words, env=_ours() | libmpi | (env or {}), timeout=LIMIT)
    return _read(out, done.code, done.errors)


def srun(
    bench: Bench,  # noqa: F811
    name: str,
    *arguments: str,
    nodes: int = 1,
    per_node: int = RANKS,
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> Run:
    """Under srunddp below srun; options are srun's."""
    layout = (f"--nodes={nodes}", f"--ntasks-per-node={per_node}", "--kill-on-bad-exit=1", *options)
    return on_login(bench, ("srun", *layout), name, *arguments, env=env)


def on_login(
    bench: Bench,  # noqa: F811
    launcher: tuple[str, ...],
    name: str,
    *arguments: str,
    env: dict[str, str] | None = None,
) -> Run:
    """Under srunddp below any launcher, from the cluster's login node."""
    out = shared(bench, name)
    words = (*launcher, SRUNDDP, program(name), *arguments, "--out", str(out))
    done = bench.on_login(*words, env=_ours() | (env or {}), timeout=LIMIT)
    return _read(out, done.code, done.errors)


def shared(bench: Bench, name: str) -> Path:  # noqa: F811
    """A new folder that all nodes see: each has a /tmp of its own."""
    number = len(list(bench.cluster.shared.glob(f"{name}.*")))
    folder = bench.cluster.shared / f"{name}.{number}"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    if not os.path.exists(PYTHON):
        missing(f"{ENVIRONMENT.name} -> bin/test --interop")


def _ours() -> dict[str, str]:
    # Sums of several threads would differ in their last bits.
    return {"VIRTUAL_ENV": str(ENVIRONMENT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _env(env: dict[str, str] | None) -> dict[str, str]:
    return {**os.environ, **_ours(), **(env or {})}


def _finished(done: subprocess.CompletedProcess[str], out: Path) -> Run:
    return _read(out, done.returncode, done.stderr)


def _read(out: Path, code: int, errors: str) -> Run:
    assert code == 0, errors
    records = [json.loads(file.read_text()) for file in out.glob("rank*.json")]
    assert records, f"no rank has written to {out}\n{errors}"
    return Run(sorted(records, key=lambda record: int(record["rank"])), errors)
