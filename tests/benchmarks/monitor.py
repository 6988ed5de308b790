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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

SECONDS, SAMPLES, ROUNDS = 0.2, 50, 5
WARM = 6  # samples that read everything
RANK = "MONITOR_RANK"
SLEEP = "import time; time.sleep(3600)"
# Not all of a CPU, which the others need.
BUSY = "import time\nwhile True:\n sum(range(20000)); time.sleep(0.02)"
WORKER = f"import subprocess, sys\n[subprocess.Popen([sys.executable, '-c', each]) for each in ({SLEEP!r}, {BUSY!r})]\n"
# Each line that it reads is a folder and seconds, or an empty one to end the sampler.
SUPERVISOR = f"""
import os, subprocess, sys
from pathlib import Path
from srunddp.monitor.monitor import MonitorConfig
from srunddp.monitor.sampler.process import SamplerConfig, start
subprocess.Popen([sys.executable, '-c', {WORKER + BUSY!r}])
for line in sys.stdin:
    if words := line.split():
        run = MonitorConfig(Path(words[0]), "here", 0, True, float(words[1]))
        sampler = start(SamplerConfig(run, "eth0", "{RANK}", os.getpid(), os.getppid()))
        print(sampler.pid, flush=True)
    else:
        print(sampler.finish(5.0), flush=True)
"""


@contextmanager
def job() -> Iterator[subprocess.Popen[str]]:
    """Two tasks of this process; the supervisor of the first."""
    tasks = [_task(rank) for rank in range(2)]
    time.sleep(2.0)
    try:
        yield tasks[0]
    finally:
        for task in tasks:
            os.killpg(task.pid, signal.SIGKILL)
            task.wait()


@contextmanager
def others(number: int) -> Iterator[None]:
    """So many processes that sleep."""
    program = f"import os, time\nfor _ in range({number}):\n if not os.fork(): break\ntime.sleep(3600)"
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        time.sleep(1.0 + number / 500)
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _task(rank: int) -> subprocess.Popen[str]:
    pipe, variables = subprocess.PIPE, {**os.environ, RANK: str(rank)}
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], env=variables, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    )


def answer(supervisor: subprocess.Popen[str], line: str) -> str:
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    supervisor.stdin.write(line + "\n")
    supervisor.stdin.flush()
    return supervisor.stdout.readline().strip()


def cpu_of(pid: int) -> int:
    """Nanoseconds."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def during(pid: int, seconds: float, samples: int) -> float:
    """Milliseconds of CPU a sample."""
    time.sleep(WARM * seconds)
    before = cpu_of(pid)
    time.sleep(samples * seconds)
    return (cpu_of(pid) - before) / samples / 1e6


def of_ours(supervisor: subprocess.Popen[str], seconds: float, samples: int) -> float:
    with TemporaryDirectory() as folder:
        used = during(int(answer(supervisor, f"{folder} {seconds}")), seconds, samples)
        assert answer(supervisor, "") == ""
        rows = [line.split(",") for line in Path(folder, "here.tasks.csv").read_text().splitlines()[-2:]]
        assert [(row[1], int(row[4]) >= 4) for row in rows] == [("0", True), ("1", True)], rows
    return used


def of_top(_: subprocess.Popen[str], seconds: float, samples: int) -> float:
    with subprocess.Popen(["top", "-b", "-d", str(seconds)], stdout=subprocess.DEVNULL) as top:
        used = during(top.pid, seconds, samples)
        top.kill()
    return used


def main() -> None:
    given = [float(word) for word in sys.argv[1:]]
    seconds, *counts = [*given, *(SECONDS, SAMPLES, ROUNDS, 0)[len(given) :]]
    samples, rounds, number = map(int, counts)
    both: tuple[Callable[[subprocess.Popen[str], float, int], float], ...] = (of_ours, of_top)
    with job() as supervisor, others(number):
        used = [[each(supervisor, seconds, samples) for each in both] for _ in range(rounds)]
        processes = sum(name.isdecimal() for name in os.listdir("/proc"))
    ours, theirs = (statistics.median(column) for column in zip(*used, strict=True))
    print(f"every {seconds:g} s, {samples} samples, {rounds} rounds; {processes} processes on this machine")
    print(f"a sample of the monitor: {ours:.3f} ms of CPU; of top: {theirs:.3f} ms (medians of rounds)")
    ratios = sorted(one / other for one, other in used)
    print(f"ratio: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
