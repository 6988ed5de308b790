"""A step's time with a supervisor over that without one, within one run: it stands still in every other window.

Two ranks of a small model on this machine, Gloo. The figure is the median of the ratios of neighbouring windows.

    python -m tests.benchmarks.step [WINDOWS [STEPS]]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from tests.conftest import PROGRAMS, ROOT
from tests.support.starting import SRUNDDP, bare, slurm

WINDOWS, STEPS = 50, 100


def main() -> None:
    words = [*sys.argv[1:], *map(str, (WINDOWS, STEPS)[len(sys.argv) - 1 :])]
    command = (*SRUNDDP, "--quiet", str(PROGRAMS / "windows.py"), *words)
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=bare(slurm(rank)), stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    figures = json.loads(outputs[0])
    ratios = [ours / theirs for ours, theirs in zip(figures["with"], figures["without"], strict=True)]
    step = 1000 * statistics.median(figures["without"]) / int(words[1])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"step {step:.3f} ms without; with over without: median {middle:.4f} (quartiles {low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
