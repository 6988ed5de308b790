"""CPU time of the supervisors and of the monitor, beside that of a step.

Two ranks of ``Trainer``, with Gloo and one thread each, train on this machine in steps of about 5
ms. Each has its own supervisor. All times are CPU times, divided by the number of steps, in windows
of a little more than 10 s. Such a window has at least two of the pings between supervisors and two
of the monitor's samples, as both come every 5 s.

The supervisor's time is that of its process, and of what its rank does to tell it of each step. The
monitor's time is that of the node's sampler, of the thread of the rank's supervisor that records
steps, and of what the rank does to measure each step. The time of a step is that of the rank's
process in the same window. In the rank the clock is read around each of these calls, and one
reading counts as part of the call.

A pair is a window of 50 steps while all run, and one while the supervisors and the sampler are
stopped by SIGSTOP. ``time`` is the wall time of a step. The file of the results has all windows, in
the order of the pairs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import srunddp
import srunddp.train.fit
import srunddp.train.trainer
from srunddp.train import Config, DataLoaderConfig
from srunddp.train.step_timer import StepTimer
from tests.benchmarks.benchmark import Case, Limit
from tests.conftest import ROOT
from tests.support.cost import cpu_of
from tests.support.starting import SRUNDDP, bare, slurm, workers_of

RANKS = 2
WIDTH = 640
BATCH = 32
PAIRED = 50  # steps
LIMITS = (Limit("CPU", "step", 0.005),)
Times = dict[str, float]


def cases(quick: bool) -> Iterator[Case]:
    repeats, pairs, seconds = (1, 1, 5.2) if quick else (3, 50, 10.4)
    with training() as plain:
        windows = functools.cache(lambda _: plain.window(plain.steps_in(seconds)))
        for rank in range(RANKS):
            yield Case(
                f"the supervisor of rank {rank}",
                in_same(windows, rank, "supervisor"),
                repeats,
                LIMITS,
                "ms",
            )
        yield Case("a step with supervisors", plain.pair(), pairs, unit="ms")
    with (
        TemporaryDirectory() as folder,
        training("--monitor", f"--monitor-dir={folder}") as monitored,
    ):
        windows = functools.cache(lambda _: monitored.window(monitored.steps_in(seconds)))
        yield Case(
            "the monitor of rank 0 and its node",
            in_same(windows, 0, "monitor"),
            repeats,
            LIMITS,
            "ms",
        )
        yield Case("a step with supervisors and --monitor", monitored.pair(), pairs, unit="ms")


def in_same(
    windows: Callable[[int], list[Times]], rank: int, what: str
) -> dict[str, Callable[[int], Times]]:
    """Both ways are of the same window."""

    def cpu(each: str, repeat: int) -> Times:
        return {"CPU": windows(repeat)[rank][each]}

    return {each: functools.partial(cpu, each) for each in (what, "step")}


@contextmanager
def training(*options: str) -> Iterator[Training]:
    """Two ranks and their supervisors, which wait for :meth:`Training.window`."""
    command = (*SRUNDDP, "--quiet", *options, __file__)
    pipe = subprocess.PIPE
    variables = [bare(slurm(rank, RANKS, PYTHONPATH=str(ROOT))) for rank in range(RANKS)]
    started = [
        subprocess.Popen(command, env=each, stdin=pipe, stdout=pipe, text=True)
        for each in variables
    ]
    try:
        yield Training(started, records=bool(options))
    finally:
        for process in started:
            process.send_signal(signal.SIGCONT)
            assert process.stdin
            process.stdin.close()  # which ends the rank; it waits for the other
        for process in started:
            process.wait()


class Training:
    """Trains in windows.

    Args:
        supervisors: which the ranks are children of; records: with ``--monitor``.
    """

    def __init__(self, supervisors: list[subprocess.Popen[str]], *, records: bool) -> None:
        self._supervisors = supervisors
        self._records = records
        workers = {int(answer(process)["process"]) for process in supervisors}
        self._samplers = [{*workers_of(process.pid)} - workers for process in supervisors]
        self.window(PAIRED)
        self._step = self.window(PAIRED)[0]["time"] / 1000

    def steps_in(self, seconds: float) -> int:
        """At least so long."""
        return math.ceil(seconds / self._step)

    def window(self, steps: int) -> list[Times]:
        """Train for so many steps; returns milliseconds a step, of each rank."""
        before = [self._used(rank) for rank in range(RANKS)]
        for process in self._supervisors:
            assert process.stdin
            print(steps, file=process.stdin, flush=True)
        found = [answer(process) for process in self._supervisors]
        for rank, times in enumerate(found):
            for name, seconds in self._used(rank).items():
                times[name] = times.get(name, 0.0) + seconds - before[rank][name]
        return [
            {name: 1000 * seconds / steps for name, seconds in times.items()} for times in found
        ]

    def _used(self, rank: int) -> Times:
        """Seconds of CPU so far, outside the rank's process."""
        supervisor = self._supervisors[rank].pid
        main = (
            int(Path(f"/proc/{supervisor}/task/{supervisor}/schedstat").read_text().split()[0])
            / 1e9
        )
        recorder = cpu_of(supervisor) - main if self._records else 0.0
        monitor = recorder + sum(map(cpu_of, self._samplers[rank]))
        return {"supervisor": cpu_of(supervisor) - recorder, "monitor": monitor}

    def pair(self) -> dict[str, Callable[[int], Times]]:
        """A window with what observes the ranks, and one without."""
        observers = {process.pid for process in self._supervisors}.union(*self._samplers)

        def window(number: int) -> Times:
            for process in observers:
                os.kill(process, number)
            times = self.window(PAIRED)[0]
            return {"time": times["time"], "CPU": times["step"]}

        return {
            "with": lambda _: window(signal.SIGCONT),
            "without": lambda _: window(signal.SIGSTOP),
        }


def answer(process: subprocess.Popen[str]) -> Times:
    """A line of a rank's."""
    assert process.stdout
    return dict(json.loads(process.stdout.readline()))


def read_clock() -> float:
    """Seconds of CPU of this thread, read a second time: a first reading after a step takes several
    times as long.
    """
    time.thread_time()
    return time.thread_time()


class CpuTime:
    """Seconds of CPU that this thread has used in some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is added."""

        def timed(*arguments: Any, **named: Any) -> Any:
            began = read_clock()
            found = function(*arguments, **named)
            self.seconds += time.thread_time() - began
            return found

        return timed

    def of_each(self, iterator: Iterator[Any], sign: int = 1) -> Iterator[Any]:
        """The same, whose time is added for each element, or subtracted."""
        while True:
            began = read_clock()
            element = next(iterator, None)
            self.seconds += sign * (time.thread_time() - began)
            if element is None:
                return
            yield element


def rank() -> None:
    """Makes a window for each line of standard input, and prints the seconds of CPU of each kind
    that it took.
    """
    torch.manual_seed(0)
    marks = CpuTime()
    monitor = CpuTime()
    for module in (srunddp.train.trainer, srunddp.train.fit):
        module.heartbeat = marks.of(srunddp.heartbeat)  # type: ignore[attr-defined]
    for name in ("epoch", "start_wait", "end_wait", "done"):
        setattr(StepTimer, name, monitor.of(getattr(StepTimer, name)))
    original = StepTimer.timed

    def timed(timer: StepTimer, steps: Iterator[Any]) -> Iterator[Any]:
        return monitor.of_each(original(timer, monitor.of_each(steps, -1)))

    StepTimer.timed = timed  # type: ignore[assignment, method-assign]
    with srunddp.init() as world:
        train = trainer(world)
        print(json.dumps({"process": os.getpid()}), flush=True)
        for line in sys.stdin:
            marks.seconds = monitor.seconds = 0.0
            wall = time.perf_counter()
            cpu = time.process_time()
            with contextlib.redirect_stdout(io.StringIO()):
                train(int(line))
            times = {"time": time.perf_counter() - wall, "step": time.process_time() - cpu}
            print(
                json.dumps({**times, "supervisor": marks.seconds, "monitor": monitor.seconds}),
                flush=True,
            )


def trainer(world: srunddp.World) -> Callable[[int], None]:
    """What trains for so many steps more."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )
    config = Config(
        batch_size=BATCH,
        num_threads=1,
        tensorboard=False,
        dataloader=DataLoaderConfig(num_workers=0),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = srunddp.Trainer(model, optimizer, nn.CrossEntropyLoss(), config, world=world)

    def train(steps: int) -> None:
        count = steps * BATCH * world.world_size
        data = TensorDataset(
            torch.randn(1, WIDTH).expand(count, WIDTH), torch.randint(10, (count,))
        )
        made.config = replace(config, epochs=made.state.epoch + 1)
        made.fit(data)

    return train


if __name__ == "__main__":
    rank()
