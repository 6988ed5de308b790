"""An error is shown although the script's own ``destroy_process_group()`` does not return."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from srunddp.run import teardown
from tests.support.starting import slurm, started, write

# What a communicator does that an error in the middle of a collective has left stuck.
STUCK = "dist.ProcessGroup.shutdown = lambda group: time.sleep(3600)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "take", ["import torch.distributed as dist", "from torch import distributed as dist"]
)
def test_the_error_is_shown_while_the_call_goes_on(take: str, tmp_path: Path) -> None:
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
finally:
    dist.destroy_process_group()
""",
    )
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(started("--quiet", "train.py", folder=tmp_path, **slurm(rank)))
            for rank in (0, 1)
        ]
        assert ranks[1].stderr is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("ValueError"):
            lines.append(ranks[1].stderr.readline())
            assert lines[-1], lines
        assert lines[0] == "\n"
        assert "rank 1" in lines[1]
        assert "destroy_process_group()" in lines[1]
        assert any("train.py" in line for line in lines)  # the traceback
        assert ranks[1].poll() is None
        assert ranks[0].poll() is None


def test_a_call_that_returns_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    destroy = teardown.watched(lambda: None, "rank 1", within=0.05)
    try:
        raise ValueError
    except ValueError:
        destroy()
    time.sleep(0.5)
    assert capfd.readouterr().err == ""


def test_a_call_without_an_error_may_take_its_time(capfd: pytest.CaptureFixture[str]) -> None:
    teardown.watched(lambda: time.sleep(0.5), "rank 1", within=0.05)()
    assert capfd.readouterr().err == ""


def test_no_thread_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error may be that none can be started."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    called = []
    monkeypatch.setattr(threading.Thread, "start", fail)
    try:
        raise MemoryError
    except MemoryError:
        teardown.watched(lambda: called.append(True), "rank 1", within=0.05)()
    assert called == [True]
