"""A step's time monitored over not monitored, within one run.

Supervisor and sampler stand still in every other window. One rank of ``Trainer``, so that of two cores one is theirs,
and a sample each second. The figures are the median of the ratios of neighbouring windows, and the ratio of the fastest
tenth of either kind, which a busy machine disturbs less; the supervisor's own cost is in them as well.

    python -m tests.benchmarks.monitored_step [WINDOWS [STEPS [WIDTH]]]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile

from tests.conftest import PROGRAMS, ROOT
from tests.support.starting import SRUNDDP, bare, slurm

WINDOWS, STEPS, WIDTH = 50, 100, 512


def main() -> None:
    words = [*sys.argv[1:], *map(str, (WINDOWS, STEPS, WIDTH)[len(sys.argv) - 1 :])]
    with tempfile.TemporaryDirectory() as folder:
        monitor = ("--monitor=1", f"--monitor-dir={folder}")
        command = (*SRUNDDP, "--quiet", *monitor, str(PROGRAMS / "monitored_windows.py"), *words)
        done = subprocess.run(command, cwd=ROOT, env=bare(slurm(0, 1)), stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout)
    ratios = [ours / theirs for ours, theirs in zip(figures["with"], figures["without"], strict=True)]
    step = 1000 * statistics.median(figures["without"]) / int(words[1])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"step {step:.3f} ms without; with over without: median {middle:.4f} (quartiles {low:.4f} to {high:.4f})")
    fastest = [statistics.fmean(sorted(figures[kind])[: max(1, len(ratios) // 10)]) for kind in ("with", "without")]
    print(f"of the fastest tenth: {fastest[0] / fastest[1]:.4f}")


if __name__ == "__main__":
    main()
