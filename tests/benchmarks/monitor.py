"""CPU time of a sample of the monitor over that of ``top -b -d``, both watching the same machine in turns.

The job is two tasks below one launcher, each a supervisor that sleeps, a busy worker and two loader workers, of which
one is busy. Rounds of the one and the other alternate; each is one process whose CPU time at the end of a round is
compared with that at its beginning, so that starting does not count. ``top`` reads every process of the machine, and a
node with 128 CPUs has well over a thousand threads of the kernel alone: OTHERS processes that sleep stand for them.

    python -m tests.benchmarks.monitor [SECONDS [SAMPLES [ROUNDS [OTHERS]]]]
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.sampled import RANK, Supervised, supervised

SECONDS, SAMPLES, ROUNDS = 0.2, 50, 5
WARM = 6  # samples that read everything
SLEEP = "import time; time.sleep(3600)"
# Not all of a CPU, which the others need.
BUSY = "import time\nwhile True:\n sum(range(20000)); time.sleep(0.02)"
WORKER = f"import subprocess, sys\n[subprocess.Popen([sys.executable, '-c', each]) for each in ({SLEEP!r}, {BUSY!r})]\n"
START_WORKER = f"__import__('subprocess').Popen([__import__('sys').executable, '-c', {WORKER + BUSY!r}])"


@contextmanager
def running(program: str, **variables: str) -> Iterator[None]:
    """Python with this program and what it starts, some time after its start; killed at the end."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=os.environ | variables, start_new_session=True) as process:
        time.sleep(2.0)
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def job(folder: Path, seconds: float) -> Iterator[Supervised]:
    """Two tasks of this process; the first one's supervisor has the sampler."""
    with supervised(folder, seconds, RANK, os.getpid()) as first:
        first.do(START_WORKER)
        with running(f"{START_WORKER}\n{SLEEP}", **{RANK: "1"}):
            yield first


def during(pid: int, seconds: float, samples: int) -> float:
    """Milliseconds of CPU a sample of a process."""
    clock = (~pid << 3) | 2
    time.sleep(WARM * seconds)
    before = time.clock_gettime_ns(clock)
    time.sleep(samples * seconds)
    return (time.clock_gettime_ns(clock) - before) / samples / 1e6


def both(seconds: float, samples: int) -> tuple[float, float]:
    """A round: the sampler's and top's."""
    with TemporaryDirectory() as folder, job(Path(folder), seconds) as first:
        ours = during(first.sampler, seconds, samples)
        assert first.finish() == ""
        rows = [(row["rank"], int(row["processes"]) >= 4) for row in first.rows("tasks")[-2:]]
        assert rows == [("0", True), ("1", True)], rows
        with subprocess.Popen(["top", "-b", "-d", str(seconds)], stdout=subprocess.DEVNULL) as top:
            theirs = during(top.pid, seconds, samples)
            top.kill()
    return ours, theirs


def main() -> None:
    given = [float(word) for word in sys.argv[1:]]
    seconds, *counts = [*given, *(SECONDS, SAMPLES, ROUNDS, 0)[len(given) :]]
    samples, rounds, number = map(int, counts)
    with running(f"import os, time\nfor _ in range({number}):\n if not os.fork(): break\ntime.sleep(3600)"):
        used = [both(seconds, samples) for _ in range(rounds)]
        processes = sum(name.isdecimal() for name in os.listdir("/proc"))
    ours, theirs = (statistics.median(column) for column in zip(*used, strict=True))
    print(f"every {seconds:g} s, {samples} samples, {rounds} rounds; {processes} processes on this machine")
    print(f"a sample of the monitor: {ours:.3f} ms of CPU; of top: {theirs:.3f} ms (medians of rounds)")
    ratios = sorted(one / other for one, other in used)
    print(f"ratio: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
