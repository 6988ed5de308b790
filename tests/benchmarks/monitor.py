"""CPU time of a sample of the monitor, beside that of ``top -b -d``.

Both watch the same machine every 0.2 s, in turns: while one is measured, the other is stopped by
SIGSTOP. The job has two tasks of one launcher. Each task is a supervisor that sleeps, a busy worker
and two loader workers, of which one is busy. ``top`` reads all processes of the machine, the
monitor those of the job. A node with 128 CPUs has more than a thousand threads of the kernel alone:
1,000 processes that sleep stand for them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.benchmark import Case, Limit
from tests.support.cost import cpu_of
from tests.support.sampled import RANK, Supervised, supervised
from tests.support.starting import until

SECONDS = 0.2
OTHERS = 1000
WARM = 3  # samples
SLEEP = "import time; time.sleep(3600)"
# Not all of a CPU, which the others need.
BUSY = "import time\nwhile True:\n sum(range(20000)); time.sleep(0.02)"
WORKER = (
    "import subprocess, sys\n[subprocess.Popen([sys.executable, '-c', each]) for each in"
    f" ({SLEEP!r}, {BUSY!r})]\n"
)
START_WORKER = (
    f"__import__('subprocess').Popen([__import__('sys').executable, '-c', {WORKER + BUSY!r}])"
)
FORK = f"import os, time\nfor _ in range({OTHERS}):\n if not os.fork(): break\ntime.sleep(3600)"


def cases(quick: bool) -> Iterator[Case]:
    repeats, samples = (2, 10) if quick else (5, 30)
    with (
        running(sys.executable, "-c", FORK),
        TemporaryDirectory() as folder,
        job(Path(folder)) as sampler,
    ):
        until(lambda: all(found_by(sampler, rank) >= 4 for rank in ("0", "1")))
        with running("top", "-b", "-d", str(SECONDS)) as top:
            ways = {"monitor": sampler.sampler, "top": top}
            for process in ways.values():
                os.kill(process, signal.SIGSTOP)
            name = f"a sample, beside {OTHERS:,} other processes"
            limit = Limit("CPU", "top", 0.03)
            measured = {way: partial(sample, process, samples) for way, process in ways.items()}
            yield Case(name, measured, repeats, (limit,), unit="ms")


@contextmanager
def running(*command: str, **variables: str) -> Iterator[int]:
    """A process and what it starts, killed at the end; yields its process id."""
    null = subprocess.DEVNULL
    with subprocess.Popen(
        command, env=os.environ | variables, stdout=null, start_new_session=True
    ) as process:
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def job(folder: Path) -> Iterator[Supervised]:
    """Two tasks of this process; the first one's supervisor has the sampler."""
    with supervised(folder, SECONDS, RANK, os.getpid()) as first:
        first.do(START_WORKER)
        with running(sys.executable, "-c", f"{START_WORKER}\n{SLEEP}", **{RANK: "1"}):
            yield first


def found_by(sampler: Supervised, rank: str) -> int:
    """How many processes of a task are in its last sample."""
    return max(
        (int(row["processes"]) for row in sampler.rows("tasks")[-2:] if row["rank"] == rank),
        default=0,
    )


def sample(process: int, samples: int, _: int) -> dict[str, float]:
    """Milliseconds of CPU a sample, of a process that is stopped before and after."""
    os.kill(process, signal.SIGCONT)
    time.sleep(WARM * SECONDS)
    before = cpu_of(process)
    time.sleep(samples * SECONDS)
    used = cpu_of(process) - before
    os.kill(process, signal.SIGSTOP)
    return {"CPU": 1000 * used / samples}
