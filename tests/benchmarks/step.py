"""A step's time observed over that of a step alone, within one run: what observes stands still in every other window.

Two ranks of a small model, Gloo, and their supervisors; with ``monitor`` one rank of ``Trainer``, so that of two cores
one is the supervisor's and the sampler's, and a sample each second. The figures are the median of the ratios of
neighbouring windows, and the ratio of the fastest tenth of either kind, which a busy machine disturbs less.

    python -m tests.benchmarks.step [supervisor|monitor [WINDOWS [STEPS [WIDTH]]]]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile

from tests.benchmarks import quartiles
from tests.conftest import PROGRAMS, ROOT
from tests.support.starting import SRUNDDP, bare, slurm

DEFAULTS = ("supervisor", "50", "100", "512")


def main() -> None:
    kind, *words = [*sys.argv[1:], *DEFAULTS[len(sys.argv) - 1 :]]
    size = 1 if kind == "monitor" else 2
    with tempfile.TemporaryDirectory() as folder:
        monitor = ("--monitor=1", f"--monitor-dir={folder}") if kind == "monitor" else ()
        command = (*SRUNDDP, "--quiet", *monitor, str(PROGRAMS / "windows.py"), kind, *words)
        ranks = [
            subprocess.Popen(command, cwd=ROOT, env=bare(slurm(rank, size)), stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    figures = json.loads(outputs[0])
    ratios = [ours / theirs for ours, theirs in zip(figures["with"], figures["without"], strict=True)]
    step = 1000 * statistics.median(figures["without"]) / int(words[1])
    print(f"step {step:.3f} ms without; with over without: {quartiles(ratios, 4)}")
    fastest = [statistics.fmean(sorted(figures[each])[: max(1, len(ratios) // 10)]) for each in ("with", "without")]
    print(f"of the fastest tenth: {fastest[0] / fastest[1]:.4f}")


if __name__ == "__main__":
    main()
