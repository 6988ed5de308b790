"""A program of tests/interop/programs under its own launcher, under `mpirun srunddp` and under
`srun srunddp`.

Each takes `--out FOLDER` and leaves rankR.json there: rank, local_rank, world_size, and the losses
as float.hex().
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import socket
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, missing
from tests.mpirun.conftest import ALLOW_ROOT, there
from tests.slurm.conftest import SRUNDDP, Outcome, SlurmJobRunner, outcome
from tests.slurm.test_mpirun_in_allocation import NETWORK

ENVIRONMENT = ROOT / ".venv-interop"
PYTHON = str(ENVIRONMENT / "bin" / "python")
PROGRAMS = ROOT / "tests" / "interop" / "programs"
RANKS = 2
STARTS_ITS_RANKS = ("lightning_trainer", "lightning_fabric")
FOR_ACCELERATE = ("hf_trainer", "accelerate_loop")  # the other programs are for torchrun
# Their ranks work on the same samples, and have the same losses.
ONE_LOSS = ("pipelining", "tensor_parallel")
LIMIT = 300.0  # seconds for one program
TRIES = 3
# A failure below us, upon which a run is repeated if all ranks have left their results: one of
# Gloo's threads still at work when Python takes its objects down, seen with FSDP2
# (docs/interop.md).
NOT_OURS = "terminate called without an active exception"
# Of Open MPI's mpirun, upon which it is repeated too.
NOT_STARTED = "The PMIx server's listener thread failed to start"
# The wheel is in another environment.
LIBMPI = {"MPI4PY_LIBMPI": str(ROOT / ".venv" / "lib" / "libmpi.so.40")}

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """How a program ended: what its ranks left, by rank, and what was printed on standard error."""

    records: list[Record]
    errors: str

    def results(self) -> list[Record]:
        """All that they left but `launch`, what may be another thing under another launcher."""
        return [
            {name: value for name, value in record.items() if name != "launch"}
            for record in self.records
        ]

    def losses(self) -> list[list[str]]:
        """Of each rank, each to the bit."""
        return [record["losses"] for record in self.records]

    def trained(self, steps: int = 20, *, apart: bool = True) -> bool:
        """Whether each rank made so many steps, upon data of its own if they are apart, and the
        loss fell.
        """
        values = [list(map(float.fromhex, losses)) for losses in self.losses()]
        whole = all(
            len(losses) == steps and sum(losses[-5:]) < sum(losses[:5]) for losses in values
        )
        return whole and len(set(map(tuple, values))) == (len(values) if apart else 1)

    def places(self) -> list[tuple[int, int, int]]:
        """Of each rank: itself, its local rank and the world's size."""
        return [
            (record["rank"], record["local_rank"], record["world_size"]) for record in self.records
        ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.interop)


def program(name: str) -> str:
    return str(PROGRAMS / f"{name}.py")


def words(name: str) -> tuple[str, ...]:
    """What a launcher is given: a program's file, or a module where the name has a dot."""
    return ("-m", name) if "." in name else (program(name),)


def alone(command: list[str], out: Path, env: dict[str, str] | None = None) -> Run:
    """The environment's Python with this: a program that starts its own ranks, or a launcher's
    module.
    """
    whole = [PYTHON, *command, "--out", str(out)]
    variables = {**os.environ, **ours(), **(env or {})}

    def start() -> Outcome:
        return outcome(
            subprocess.run(
                whole,
                env=variables,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
        )

    return _finished(out, start)


def torchrun(name: str, out: Path, *arguments: str, ranks: int = RANKS) -> Run:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return alone([*launcher, *words(name), *arguments], out)


def accelerate_launch(name: str, out: Path) -> Run:
    """On CPUs it starts several ranks only with a file of hosts, and by mpirun; they find their
    places as MPI's.
    """
    mpi = there("openmpi5")
    hosts = out / "hosts"
    hosts.write_text(f"localhost slots={RANKS}\n")
    options = [
        "--cpu",
        f"--num_processes={RANKS}",
        "--mpirun_hostfile",
        str(hosts),
        "--num_machines=1",
    ]
    options += ["--mixed_precision=no", "--dynamo_backend=no", "--num_cpu_threads_per_process=1"]
    launcher = ["-m", "accelerate.commands.launch", *options, f"--main_process_port={_free_port()}"]
    path = {"PATH": f"{Path(mpi.mpirun).parent}:{os.environ['PATH']}"}
    return alone([*launcher, program(name)], out, ALLOW_ROOT | path)


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def mpirun(name: str, out: Path, *arguments: str, ranks: int = RANKS, mpi: str = "openmpi5") -> Run:
    """Under srunddp below the wheel's Open MPI, or another of tests/mpirun."""
    command = (SRUNDDP, *words(name), *arguments, "--out", str(out))
    return _finished(
        out, lambda: there(mpi).run(ranks, *command, env=ours() | LIBMPI, timeout=LIMIT)
    )


def srun(
    runner: SlurmJobRunner,
    name: str,
    *arguments: str,
    nodes: int = 1,
    per_node: int = RANKS,
    options: tuple[str, ...] = (),
) -> Run:
    """Under srunddp below srun; options are srun's."""
    layout = (f"--nodes={nodes}", f"--ntasks-per-node={per_node}", "--kill-on-bad-exit=1", *options)
    return on_login(runner, ("srun", *layout), name, *arguments)


def on_login(runner: SlurmJobRunner, launcher: tuple[str, ...], name: str, *arguments: str) -> Run:
    """Under srunddp below any launcher, from the cluster's login node."""
    out = shared(runner, name)
    command = (*launcher, SRUNDDP, *words(name), *arguments, "--out", str(out))
    return _finished(out, lambda: runner.on_login(*command, env=ours(), timeout=LIMIT))


def mpirun_in_job(
    runner: SlurmJobRunner,
    name: str,
    *arguments: str,
    nodes: int = 1,
    per_node: int = RANKS,
    wrapper: str = "",
) -> tuple[Path, Outcome]:
    """Under srunddp below the wheel's mpirun in a batch job: the ranks inherit the daemons' SLURM_
    variables.

    Returns:
        The folder of what the ranks leave, for `read`, and how the job ended.
    """
    out = shared(runner, name)
    exports = there("openmpi5").env() | ours() | LIBMPI | NETWORK["openmpi5"]
    lines = [f"export {key}={shlex.quote(value)}" for key, value in exports.items()]
    command = [
        there("openmpi5").mpirun,
        *wrapper.split(),
        SRUNDDP,
        *words(name),
        *arguments,
        "--out",
        str(out),
    ]
    body = "\n".join([*lines, shlex.join(command)])
    return out, runner.batch(
        body, f"--nodes={nodes}", f"--ntasks-per-node={per_node}", timeout=LIMIT
    )


def shared(runner: SlurmJobRunner, name: str) -> Path:
    """A new folder that all nodes see: each has a /tmp of its own."""
    number = len(list(runner.cluster.shared.glob(f"{name}.*")))
    folder = runner.cluster.shared / f"{name}.{number}"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """A program's run with two ranks under its own launcher, which is made once."""

    @functools.cache
    def run(name: str) -> Run:
        out = tmp_path_factory.mktemp(name)
        if name in STARTS_ITS_RANKS:
            done = alone([program(name)], out)
        else:
            done = accelerate_launch(name, out) if name in FOR_ACCELERATE else torchrun(name, out)
        assert done.places() == [(0, 0, 2), (1, 1, 2)]
        assert done.trained(apart=name not in ONE_LOSS)
        return done

    return run


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    if not os.path.exists(PYTHON):
        missing(f"{ENVIRONMENT.name} -> bin/test --interop")


def ours() -> dict[str, str]:
    # Sums of several threads would differ in their last bits.
    return {"VIRTUAL_ENV": str(ENVIRONMENT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _finished(out: Path, start: Callable[[], Outcome]) -> Run:
    for _ in range(TRIES):
        done = start()
        found = [words for words in (NOT_OURS, NOT_STARTED) if words in done.errors]
        if done.code == 0 or not found or (found == [NOT_OURS] and not _whole(out)):
            break
        warnings.warn(f"a run is repeated after: {found[0]}", stacklevel=3)
        for file in out.glob("rank*.json"):
            file.unlink()
    return read(out, done.code, done.errors)


def read(out: Path, code: int, errors: str) -> Run:
    assert code == 0, errors
    records = _left(out)
    assert records, f"no rank has written to {out}\n{errors}"
    assert [record["rank"] for record in records] == list(range(records[0]["world_size"])), errors
    return Run(records, errors)


def _whole(out: Path) -> bool:
    try:
        records = _left(out)
    except ValueError:  # a rank was ended while it wrote
        return False
    return bool(records) and len(records) == records[0]["world_size"]


def _left(out: Path) -> list[Record]:
    """What the ranks have left, by rank."""
    records: list[Record] = [json.loads(file.read_text()) for file in out.glob("rank*.json")]
    return sorted(records, key=lambda record: int(record["rank"]))
