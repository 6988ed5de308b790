"""What a rank that only imports torch costs from start to end: bare Python, srunddp, and ``srunddp --fast-exit``.

The runs alternate; the figure of a kind is its minimum, of wall time and of CPU time with the supervisor's.

    python -m tests.benchmarks.exit [RUNS]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.starting import SRUNDDP, bare

RUNS = 9


def measure(words: list[str]) -> tuple[float, float]:
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, env=bare(), check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text("import torch\n")
        kinds = {
            "bare": [sys.executable, str(script)],
            "srunddp": [*SRUNDDP, "--quiet", str(script)],
            "srunddp --fast-exit": [*SRUNDDP, "--quiet", "--fast-exit", str(script)],
        }
        figures: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(int(sys.argv[1]) if sys.argv[1:] else RUNS):
            for kind, words in kinds.items():
                figures[kind].append(measure(words))
    for kind, taken in figures.items():
        wall, cpu = (min(figure[index] for figure in taken) for index in (0, 1))
        print(f"{kind:<20} wall {wall:.2f} s, CPU {cpu:.2f} s")


if __name__ == "__main__":
    main()
