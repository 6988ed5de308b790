"""The training loop beside loops by hand and those of other libraries.

CPU time of a step of ``srunddp.Trainer``, of all threads of a rank, with one thread of torch: the
network has three layers, a batch 64 samples, AdamW its fused kernel. The loops by hand are with
DistributedDataParallel, and without its wrap (bare), which the stricter comparison is: in a single
process Trainer needs none either. The loop of Fabric and Accelerate is the one by hand with their
objects in it. Each way is a process of its own with the same Python, which trains a new model for
an epoch in each repeat. The eighth of an epoch that took least is given, or the 400 steps with a
checkpoint, as other work of the machine comes and goes; the start and the end of an epoch are not
in it. Trainer syncs each checkpoint to the disk and reads it back; the others do neither. The ten
metrics are each updated at each step. In the steps of 20 ms, Trainer and the bare loop make the
same large operations of torch, by its profiler: the rest is the machine's. Two ranks use Gloo;
there both sides are in DistributedDataParallel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.benchmark import Case, Limit, NotMeasuredError, Sample
from tests.benchmarks.runner import INTEROP
from tests.benchmarks.training_loops import BARE, DDP, OURS, PEERS, STOCK, Task
from tests.conftest import ROOT

# Widths; the first two make steps of about 0.7 and 20 ms.
SMALL = 224
LARGE = 1792
GRADIENTS_OF_20_MB = 2200
TASKS = {
    "samples one by one, a step of 0.7 ms": Task(SMALL, 400),
    "tensors in memory, a step of 0.7 ms": Task(SMALL, 400, "tensors"),
    "a stream, a step of 0.7 ms": Task(SMALL, 400, "stream"),
    "ten metrics of one's own, a step of 1 ms": Task(SMALL, 300, metrics="functions"),
    "ten metrics of torchmetrics, a step of 1 ms": Task(SMALL, 300, metrics="torchmetrics"),
    "a checkpoint each 400 steps of 0.7 ms": Task(SMALL, 1250, save_every=400),
    "samples one by one, a step of 20 ms": Task(LARGE, 20),
}
OF_TWO = {
    "two ranks, a small step": Task(SMALL, 200, "tensors"),
    "two ranks, 20 MB of gradients": Task(GRADIENTS_OF_20_MB, 12, "tensors"),
}


class Processes:
    """The ranks of one way, which wait for their tasks."""

    def __init__(self, way: str, size: int, folder: Path) -> None:
        folder.mkdir()
        self._log = folder / "log"
        python = INTEROP / "bin" / "python"
        command = [
            python if python.exists() else sys.executable,
            "-m",
            "tests.benchmarks.training_loops",
            way,
        ]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        options: Any = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "text": True,
            "cwd": ROOT,
        }
        with open(self._log, "w") as log:
            self._ranks = [
                subprocess.Popen(
                    [*command, str(rank), str(size), folder], stderr=log, env=environment, **options
                )
                for rank in range(size)
            ]

    def measure(self, task: Task, metrics: Iterable[str], repeat: int) -> Sample:
        """The mean over the ranks."""
        try:
            for rank in self._ranks:
                print(json.dumps(asdict(task)), file=rank.stdin, flush=True)
            found = [answer(rank) for rank in self._ranks]
        except (BrokenPipeError, json.JSONDecodeError):
            raise NotMeasuredError(self._log.read_text().splitlines()[-1]) from None
        return {metric: sum(each[metric] for each in found) / len(found) for metric in metrics}

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.communicate()


def answer(rank: subprocess.Popen[str]) -> Sample:
    """A line of a rank's."""
    assert rank.stdout
    return dict(json.loads(rank.stdout.readline()))


def cases(quick: bool) -> Iterator[Case]:
    repeats, peers = (1, ()) if quick else (7, PEERS)
    of_one = (TASKS, (OURS, DDP, BARE, *peers), 1)
    of_two = (OF_TWO, (OURS, DDP, STOCK), 2)
    for tasks, ways, size in [of_one] if quick else [of_one, of_two]:
        with TemporaryDirectory() as folder, ExitStack() as stack:
            processes = {way: Processes(way, size, Path(folder, way)) for way in ways}
            for each in processes.values():
                stack.callback(each.close)
            for name, task in list(tasks.items())[: 1 if quick else None]:
                yield Case(name, measures(processes, task), repeats, limits(task, size), "ms")


def measures(processes: dict[str, Processes], task: Task) -> dict[str, Callable[[int], Sample]]:
    if task.save_every or STOCK in processes:
        metrics: tuple[str, ...] = ("CPU", "wall")
    else:
        metrics = ("CPU",)
    # Hugging Face's Trainer has no metrics of training.
    ways = [way for way in processes if not (task.metrics and way == "Hugging Face")]
    return {way: partial(processes[way].measure, task, metrics) for way in ways}


def limits(task: Task, size: int) -> tuple[Limit, ...]:
    if size == 1 and task.width == SMALL:
        peers = tuple(PEERS)
    else:
        peers = ()
    return (Limit("CPU", DDP, 1.02), *(Limit("CPU", peer, 1.0) for peer in peers))
