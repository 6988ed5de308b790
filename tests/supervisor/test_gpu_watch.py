"""The supervisor's side of the process that asks NVML. NVML is made up."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from srunddp.supervisor.failure import GpuFault
from srunddp.supervisor.gpu_watch import NodeGpus
from srunddp.supervisor.limits import DEFAULT_LIMITS
from tests.support.starting import until

LOST = {"uuid": "GPU-a", "failing": {"nvmlDeviceGetHandleByIndex": 15}}


@pytest.fixture
def gpus() -> Iterator[NodeGpus]:
    # A busy machine may need longer than a failure waits.
    patient = replace(DEFAULT_LIMITS, gpus_answer_within=60.0, gpus_killed_within=60.0)
    found = NodeGpus(limits=patient)
    yield found
    found.stop()


OLD = {"uuid": "GPU-a", "errors": 1, "remapped": [0, 0, 0, 0]}
NEW_ERRORS = "2 uncorrected memory errors (ECC) since the start of the run"
PENDING = "rows or pages of its memory are retired at the next reset"


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


@pytest.fixture
def noted(
    gpus: NodeGpus, fake_nvml: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., None]:
    """Of a GPU that has had an error before, the figures of the start are read. The fixture says
    what becomes of the GPU.
    """
    fake_nvml(OLD)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpus.note_start()
    pid = gpus.pid
    assert pid is not None
    until(lambda: has_ended(pid))

    def becomes(**what: object) -> None:
        (tmp_path / "nvml.json.now").write_text(json.dumps({"0": what}))

    return becomes


@pytest.mark.parametrize(
    ("becomes", "found"),
    [
        ({}, []),
        ({"errors": 3}, [(NEW_ERRORS, "hardware")]),
        ({"remapped": [0, 1, 1, 0]}, [(PENDING, "hardware")]),
        ({"errors": 0}, []),  # the driver was loaded again
    ],
    ids=str,
)
def test_without_a_watch_a_failure_is_compared_with_the_start(
    gpus: NodeGpus,
    noted: Callable[..., None],
    becomes: dict[str, object],
    found: list[tuple[str, str]],
) -> None:
    noted(**becomes)
    gpus.ask()
    assert [(fault.what, fault.kind) for fault in answer(gpus)] == found


def test_a_process_that_still_reads_the_start_does_not_keep_a_failure_waiting(
    gpus: NodeGpus, fake_nvml: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The driver did not answer then, and does now: what stays is found."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    fake_nvml(OLD | {"hangs": True})
    gpus.note_start()
    hanging = gpus.pid
    assert hanging is not None
    until((tmp_path / "nvml.json.hangs").exists)
    fake_nvml(LOST)
    gpus.ask()
    assert [fault.what for fault in answer(gpus)] == ["it does not answer any more"]
    with pytest.raises(ProcessLookupError):
        os.kill(hanging, 0)


def test_each_question_has_an_answer_of_its_own(gpus: NodeGpus, noted: Callable[..., None]) -> None:
    """Also the next one, which comes before the process of the first has ended."""
    noted(errors=3)
    for _ in range(3):
        gpus.ask()
        assert [fault.what for fault in answer(gpus)] == [NEW_ERRORS]


def test_a_gpu_with_another_number_is_compared_with_itself(
    gpus: NodeGpus, fake_nvml: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML gives the others new numbers if one GPU leaves its list."""
    first = {"uuid": "GPU-0", "errors": 0}
    fake_nvml(first, OLD)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    gpus.note_start()
    pid = gpus.pid
    assert pid is not None
    until(lambda: has_ended(pid))
    fake_nvml(OLD | {"errors": 3})
    gpus.ask()
    assert [fault.what for fault in answer(gpus)] == [NEW_ERRORS]
