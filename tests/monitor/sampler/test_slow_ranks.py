"""While a job runs, its log names slow ranks once, and what was measured of them."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests.support.made_up_run import MadeUp
from tests.support.sampled import Supervised, supervised
from tests.support.starting import until
from tests.support.worlds import is_gone


def said(job: Supervised) -> list[str]:
    lines: list[str] = ast.literal_eval(job.do("sampler.notes()"))
    return lines


def looks_of(sampler: int) -> list[int]:
    """The processes in which it looks."""
    children = Path(f"/proc/{sampler}/task/{sampler}/children")
    return [int(pid) for pid in children.read_text().split()]


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (MadeUp(slow={3: 0.05}), "the extra time is its own work, not the wait for data"),
        (MadeUp(slow_data={3: 0.05}), "the extra time is its wait for data"),
    ],
)
def test_a_slow_rank_is_named_once_while_the_job_runs(
    tmp_path: Path, run: MadeUp, why: str
) -> None:
    folder = run.write(tmp_path)
    with supervised(folder, seconds=0.02) as job:
        [line] = until(lambda: said(job))
        assert line.startswith("rank 3 on node02: 49.9 ms longer for its part of each step")
        assert line.endswith(why)
        # At the third sample after it, the sampler has reaped the look.
        count = len(job.rows("node"))
        until(lambda: len(job.rows("node")) > count + 200)
        assert said(job) == []
        assert looks_of(job.sampler) == []


@pytest.mark.parametrize("run", [MadeUp(), MadeUp(seconds=1.0, slow={3: 0.05})])
def test_a_healthy_run_and_a_short_one_name_nobody(tmp_path: Path, run: MadeUp) -> None:
    folder = run.write(tmp_path)
    with supervised(folder, seconds=0.02) as job:
        pid = until(lambda: looks_of(job.sampler))[0]
        until(lambda: pid not in looks_of(job.sampler))
        assert said(job) == []
        assert job.finish() == ""


def test_a_look_ends_with_its_sampler(tmp_path: Path) -> None:
    """Also if a file does not answer."""
    folder = MadeUp(slow={3: 0.05}).write(tmp_path)
    (folder / "run.json").unlink()
    os.mkfifo(folder / "run.json")
    with supervised(folder, seconds=0.02) as job:
        until(lambda: looks_of(job.sampler) or said(job))
        looks = looks_of(job.sampler)
        job.finish()
        until(lambda: all(map(is_gone, looks)))
