"""A long run of many ranks has its report soon, and in little memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, run

import pytest

from tests.support.made_up_run import MadeUp
from tests.support.starting import SRUNDDP, bare

pytestmark = pytest.mark.soak

_WITHIN = 30.0  # seconds
# bytes
_MEMORY = 160e6
_PAGE = 3e6


def test_a_day_of_64_ranks_is_reported_in_30_s_and_160_mb(tmp_path: Path) -> None:
    MadeUp(
        nodes=8, ranks_per_node=8, gpus_per_node=8, seconds=86400, epoch_s=3600, time_limit=90000.0
    ).write(tmp_path)
    begun = time.monotonic()
    # Below a small process: the memory that a fork of this one has at first would count as well.
    measured = (
        f"import resource, subprocess as s; s.run({[*SRUNDDP, 'report', str(tmp_path)]},"
        " check=True, stdout=2)\n"
    )
    measured += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    done = run(
        [sys.executable, "-c", measured],
        cwd=tmp_path,
        env=bare(),
        stdout=PIPE,
        stderr=DEVNULL,
        check=True,
    )
    assert time.monotonic() - begun < _WITHIN
    assert int(done.stdout) * 1024 < _MEMORY
    assert (tmp_path / "4711.0" / "report.html").stat().st_size < _PAGE
