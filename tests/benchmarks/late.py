"""Rank 0 comes late: from its start until all ranks have joined, srunddp against plain ``env://`` on a fixed port.

python -m tests.benchmarks.late [RUNS [RANKS]]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from tests.conftest import PROGRAMS, ROOT

LATE = (0.0, 3.0, 8.0)
PYTHON = (str(ROOT / ".venv/bin/python"),)
WAYS = {"env://": PYTHON, "srunddp": (*PYTHON, str(ROOT / "bin" / "srunddp"), "--quiet")}


def measure(way: str, late: float, ranks: int, port: int) -> float:
    """Seconds from the start of rank 0 to the last rank's end of ``init_process_group`` and an all-reduce."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    environ = os.environ | common | {"LOCAL_WORLD_SIZE": str(ranks)}
    started = []
    for rank in [*range(1, ranks), 0]:
        if rank == 0:
            time.sleep(late)
            began = time.time()
        variables = environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        words = [*WAYS[way], str(PROGRAMS / "joined.py")]
        started.append(subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True))
    return max(float(process.communicate(timeout=120)[0]) for process in started) - began


def main() -> None:
    runs = int(sys.argv[1]) if sys.argv[1:] else 5
    ranks = int(sys.argv[2]) if sys.argv[2:] else 6
    for late in LATE:
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for run in range(runs):
            for way in sorted(WAYS, reverse=bool(run % 2)):
                taken[way].append(measure(way, late, ranks, 29600 + run))
        middle = {way: statistics.median(seconds) for way, seconds in taken.items()}
        print(f"rank 0 late by {late:g} s: " + ", ".join(f"{way} {middle[way]:.2f} s" for way in WAYS), end="; ")
        print(f"ratio of medians {middle['srunddp'] / middle['env://']:.2f}", flush=True)


if __name__ == "__main__":
    main()
