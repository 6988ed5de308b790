"""An error is told although the script's own ``destroy_process_group()`` does not return."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from srunddp.run import teardown
from tests.support.starting import LONG, ended, slurm, started, write

# What a communicator does that an error in the middle of a collective has left stuck.
STUCK = "dist.ProcessGroup.shutdown = lambda group: time.sleep(3600)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "take", ["import torch.distributed as dist", "from torch import distributed as dist"]
)
def test_the_error_is_told_and_the_run_ends(take: str, tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        f"""
import time
{take}
{STUCK}
dist.init_process_group("gloo")
try:
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("the user's own error")
    dist.barrier()
finally:
    dist.destroy_process_group()
""",
    )
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started("--quiet", "--grace=1s", "train.py", folder=tmp_path, **slurm(rank))
            )
            for rank in (0, 1)
        ]
        ends = [ended(rank) for rank in ranks]
    assert [code for code, _, _ in ends] == [1, 1]
    errors = ends[0][2]
    assert "rank 1" in errors
    assert "ValueError: the user's own error" in errors
    assert "destroy_process_group()" in errors
    assert "train.py" in errors  # the traceback


class Reports:
    """What is reported, and by a thread."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.there = threading.Event()

    def add(self, error: BaseException, _: float) -> None:
        self.errors.append(error)
        self.there.set()


def test_a_call_that_returns_is_not_reported() -> None:
    reports = Reports()
    destroy = teardown.watched(lambda: None, reports.add, within=0.05)
    try:
        raise ValueError
    except ValueError:
        destroy()
    assert not reports.there.wait(0.5)


def test_a_call_without_an_error_may_take_its_time() -> None:
    reports = Reports()
    teardown.watched(lambda: time.sleep(0.5), reports.add, within=0.05)()
    assert not reports.there.is_set()


def test_the_error_that_is_handled_is_reported_while_the_call_goes_on() -> None:
    reports = Reports()
    destroy = teardown.watched(reports.there.wait, reports.add, within=0.05)
    error = ValueError("the error")

    def script() -> None:
        try:
            raise error
        finally:
            destroy(timeout=LONG)

    with pytest.raises(ValueError, match="the error"):
        script()
    assert reports.errors == [error]
