"""A step's time monitored over not monitored, within one run.

Supervisors and sampler stand still in every other window. Two ranks of ``Trainer`` on this machine, Gloo, a sample
each second. The figure is the median of the ratios of neighbouring windows; the supervisor's own cost is in it as well.

    python -m tests.benchmarks.monitored_step [WINDOWS [STEPS [WIDTH]]]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile

from tests.conftest import PROGRAMS, ROOT
from tests.run.starting import SRUNDDP, bare, slurm

WINDOWS, STEPS, WIDTH = 50, 100, 512


def main() -> None:
    words = [*sys.argv[1:], *map(str, (WINDOWS, STEPS, WIDTH)[len(sys.argv) - 1 :])]
    with tempfile.TemporaryDirectory() as folder:
        monitor = ("--monitor=1", f"--monitor-dir={folder}")
        command = (*SRUNDDP, "--quiet", *monitor, str(PROGRAMS / "monitored_windows.py"), *words)
        ranks = [
            subprocess.Popen(command, cwd=ROOT, env=bare(slurm(rank)), stdout=subprocess.PIPE, text=True)
            for rank in (0, 1)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    figures = json.loads(outputs[0])
    ratios = [ours / theirs for ours, theirs in zip(figures["with"], figures["without"], strict=True)]
    step = 1000 * statistics.median(figures["without"]) / int(words[1])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"step {step:.3f} ms without; with over without: median {middle:.4f} (quartiles {low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
