"""The supervisor's side of the process that asks NVML. NVML is made up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from srunddp.supervisor.failure import GpuFault
from srunddp.supervisor.gpu_watch import NodeGpus
from tests.support.starting import until

LOST = {"uuid": "GPU-a", "failing": {"nvmlDeviceGetHandleByIndex": 15}}


@pytest.fixture
def gpus() -> Iterator[NodeGpus]:
    found = NodeGpus()
    yield found
    found.stop()


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it is not reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def answer(gpus: NodeGpus) -> tuple[GpuFault, ...]:
    while (found := gpus.look()) is None:
        time.sleep(0.01)
    return found


@pytest.fixture
def ended(
    gpus: NodeGpus, fake_nvml: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> int:
    """The process that was to watch, and has found no NVML."""
    fake_nvml(LOST, error=9)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus.watch(None)
    pid = gpus.pid
    assert pid is not None
    until(lambda: has_ended(pid))
    fake_nvml(LOST)
    return pid


@pytest.mark.usefixtures("ended")
def test_if_the_watching_process_has_ended_another_is_asked(gpus: NodeGpus) -> None:
    gpus.ask()
    assert [fault.what for fault in answer(gpus)] == ["it does not answer any more"]


def test_each_process_is_waited_for(gpus: NodeGpus, ended: int) -> None:
    gpus.news()  # the supervisor has looked meanwhile
    gpus.ask()
    answer(gpus)
    gpus.stop()
    assert gpus.own > {ended}
    for pid in gpus.own:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
