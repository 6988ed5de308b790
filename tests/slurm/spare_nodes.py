"""Trainings with a spare node on the real cluster, what happens to its nodes, and what has come of
a run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from tests.cluster.network import tool
from tests.cluster.nodes import Node, node
from tests.conftest import BED, PROGRAMS
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner
from tests.support.namespaces import rules
from tests.support.starting import workers_of

PROGRAM = str(PROGRAMS / "restarted.py")
OPTIONS = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
TRAINING = (
    "slow",
    "0",
    "--epochs=3",
    "--batch_size=8",
    "--checkpoint.every_steps=5",
    "--tensorboard=false",
)
LOST_AFTER = 15.0
FENCE = 18.0


@dataclass
class Note:
    """A step of a rank: in which start, on which node, and when by the machine's one clock."""

    start: int
    step: int
    rank: int
    node: str
    at: float


@dataclass
class SpareRun:
    """A training that runs.

    Attributes:
        folder: of its checkpoints; process: srun; output, errors: its files.
    """

    runner: SlurmJobRunner
    folder: Path
    process: subprocess.Popen[str]
    output: IO[str]
    errors: IO[str]
    lost: list[str] = field(default_factory=list)

    def notes(self) -> list[Note]:
        file = self.folder / "steps.txt"
        if file.exists():
            lines = file.read_text().splitlines()
        else:
            lines = []
        words = [line.split() for line in lines]
        return [Note(int(a), int(b), int(c), name, float(at)) for a, b, c, name, at in words]

    def said(self) -> str:
        return Path(self.errors.name).read_text()

    def training(self, start: int = 0, step: int = 12) -> bool:
        return any(note.start >= start and note.step >= step for note in self.notes())

    def finish(self, limit: float) -> int | None:
        """The exit code; None where it has not ended."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(limit)
        return None

    def ends_with(self, code: int, limit: float) -> bool:
        """Whether srun ends with this code after the loss of a node, which since Slurm 23.02 makes
        it end with 1.
        """
        return self.finish(limit) == (1 if BED else code)

    def weights(self) -> set[str]:
        lines = Path(self.output.name).read_text().splitlines()
        reports = [json.loads(line) for line in lines if line.startswith('{"')]
        return {report["weights"] for report in reports}

    def overlaps(self) -> list[Note]:
        """Steps of an older start after the first of a newer one."""
        first: dict[int, float] = {}
        for note in self.notes():
            first[note.start] = min(note.at, first.get(note.start, note.at))
        return [
            note
            for note in self.notes()
            if any(note.at > first[later] for later in first if later > note.start)
        ]

    def gap(self, lost_at: float) -> float:
        """Seconds from a loss to the first step of the next start."""
        return min(note.at for note in self.notes() if note.start and note.at > lost_at) - lost_at


@contextmanager
def training(
    runner: SlurmJobRunner,
    name: str,
    nodes: int = 6,
    *,
    spare: int = 1,
    options: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    epochs: int = 3,
) -> Iterator[SpareRun]:
    """One rank of a training on each node."""
    folder = runner.cluster.shared / name
    command = [f"-N{nodes}", "--time=5", *words, SRUNDDP, "--restarts=3"]
    command += [
        f"--spare-nodes={spare}",
        *options,
        PROGRAM,
        *TRAINING[:2],
        f"--output-dir={folder}",
        *TRAINING[2:],
    ]
    command.append(f"--epochs={epochs}")
    with launched(runner, folder, *command) as run:
        yield run


@contextmanager
def launched(runner: SlurmJobRunner, folder: Path, *words: str) -> Iterator[SpareRun]:
    """One task a node, of srun's other words; srun is on the login node. Afterwards all nodes are
    as before.
    """
    command = ["srun", *OPTIONS, "--ntasks-per-node=1", *words]
    runner.cluster.await_completing()
    with open(f"{folder}.out", "w") as output, open(f"{folder}.err", "w") as errors:
        env = {"SRUNDDP_IFACES": str(runner.ifaces), "OMP_NUM_THREADS": "1"}
        with runner.cluster.popen(*command, env=env, stdout=output, stderr=errors) as process:
            run = SpareRun(runner, folder, process, output, errors)
            try:
                yield run
            finally:
                if process.poll() is None:
                    process.kill()
                try:
                    runner.cluster.cancel_all()
                finally:
                    if run.lost:
                        runner.cluster.mend(*run.lost)


def pids(name: str, *of: str) -> list[int]:
    """The processes on a node, of these names."""
    found = [int(pid) for pid in tool("ip", "netns", "pids", node(name).namespace).split()]
    names: dict[int, str] = {}
    for pid in found:
        with suppress(psutil.NoSuchProcess):
            names[pid] = psutil.Process(pid).name()
    return [pid for pid, each in names.items() if not of or each in of]


def kill(name: str, *of: str) -> None:
    for pid in pids(name, *of):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def supervisors(name: str) -> list[int]:
    """srunddp's own processes on a node: the children of slurmstepd."""
    found = []
    for pid in pids(name):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            parent = process.parent()
            if (
                parent
                and parent.name() == "slurmstepd"
                and "srunddp" in " ".join(process.cmdline())
            ):
                found.append(pid)
    return found


def worker(name: str) -> int:
    """The first rank's on a node."""
    return workers_of(supervisors(name)[0])[0]


@contextmanager
def cut(name: str) -> Iterator[None]:
    """A node without its data network and without Slurm's."""
    for interface in ("mgmt0", node(name).data_interface):
        tool("ip", "-n", node(name).namespace, "link", "set", interface, "down")
    try:
        yield
    finally:
        for interface in ("mgmt0", node(name).data_interface):
            tool("ip", "-n", node(name).namespace, "link", "set", interface, "up")


@contextmanager
def network_in_two(here: Sequence[Node], there: Sequence[Node]) -> Iterator[None]:
    """Let nothing through between these nodes and those, for a time."""
    others = ", ".join(node.data for node in there)
    drops = {
        "input": f"ip saddr {{ {others} }} drop",
        "output": f"ip daddr {{ {others} }} drop",
    }
    with ExitStack() as stack:
        for each in here:
            stack.enter_context(rules(each.namespace, drops))
        yield
