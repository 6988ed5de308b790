"""Rank 0 comes late: from its start until all ranks have joined

Six ranks on this machine; `wall` is the time from rank 0's start until the last rank has made the
first all-reduce. *env://* is plain torch with a fixed port.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from functools import partial

from tests.benchmarks.benchmark import Case, Sample
from tests.conftest import PROGRAMS, ROOT

RANKS = 6
PYTHON = (str(ROOT / ".venv/bin/python"),)
WAYS = {"srunddp": (*PYTHON, str(ROOT / "bin" / "srunddp"), "--quiet"), "env://": PYTHON}


def measure(way: str, late: float, repeat: int) -> Sample:
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29600 + repeat),
        "WORLD_SIZE": str(RANKS),
    }
    environ = os.environ | common | {"LOCAL_WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    started = []
    for rank in [*range(1, RANKS), 0]:
        if rank == 0:
            time.sleep(late)
            began = time.time()
        variables = environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        words = [*WAYS[way], str(PROGRAMS / "joined.py")]
        started.append(subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True))
    return {"wall": max(float(process.communicate(timeout=120)[0]) for process in started) - began}


def cases(quick: bool) -> Iterator[Case]:
    for late in (3.0,) if quick else (0.0, 3.0):
        ways = {way: partial(measure, way, late) for way in WAYS}
        yield Case(f"rank 0 {late:g} s late", ways, 1 if quick else 3)
