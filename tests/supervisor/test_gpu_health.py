"""What NVML says of GPUs that are not healthy. NVML is made up: no real GPU has been tried."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from srunddp.supervisor import gpu_health
from srunddp.supervisor.gpu_health import Gpu, GpuState, fault_of_event, faults_of, find_gpus

HEALTHY = GpuState(errors=5)
GPU = Gpu(3, object(), "GPU-d", {}, frozenset())
NO_INSTANCE = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("now", "before", "found"),
    [
        (HEALTHY, HEALTHY, []),
        (HEALTHY, None, []),  # errors of a time before the run
        (GpuState(errors=7), HEALTHY, ["hardware"]),
        (GpuState(errors=0), HEALTHY, []),  # after a reset
        (GpuState(is_gone=True), HEALTHY, ["hardware"]),
        (GpuState(needs_reset=True), None, ["hardware"]),
        (GpuState(has_remap_failed=True), None, ["hardware"]),
        (GpuState(is_remap_pending=True), GpuState(), ["hardware"]),
        # It was so before: the run has begun on this GPU none the less.
        (GpuState(is_remap_pending=True), GpuState(is_remap_pending=True), ["other"]),
        (GpuState(slowdowns=("slowed by heat",)), GpuState(), ["other"]),
    ],
)
def test_what_a_state_means(now: GpuState, before: GpuState | None, found: list[str]) -> None:
    assert [fault.kind for fault in faults_of(GPU, now, before)] == found


def of_mig(wanted: str, fake_nvml: Callable[..., None]) -> tuple[Any, list[Gpu]]:
    fake_nvml(
        {"uuid": "GPU-a"},
        {
            "uuid": "GPU-m",
            "instances": [{"uuid": "MIG-0", "instance": 7}, {"uuid": "MIG-1", "instance": 9}],
        },
    )
    nvml = gpu_health.load()
    return nvml, find_gpus(nvml, wanted)


@pytest.mark.parametrize(
    ("number", "instance", "uuid"),
    [
        (31, 9, "MIG-1"),
        (31, 7, None),  # another job's
        (79, NO_INSTANCE, "MIG-1"),  # the whole GPU's
        (95, 7, "MIG-0"),  # it reaches all instances
    ],
)
def test_an_event_of_a_mig_instance(
    number: int, instance: int, uuid: str | None, fake_nvml: Callable[..., None]
) -> None:
    nvml, gpus = of_mig("MIG-1", fake_nvml)
    [gpu] = gpus
    event = SimpleNamespace(device=gpu.handle, eventData=number, gpuInstanceId=instance)
    fault = fault_of_event(nvml, gpus, event)
    assert (fault and (fault.index, fault.uuid)) == (uuid and (1, uuid))


def test_only_gpus_that_cuda_shows_count(fake_nvml: Callable[..., None]) -> None:
    lost = {"uuid": "GPU-b", "failing": {"nvmlDeviceGetHandleByIndex": 15}}
    fake_nvml({"uuid": "GPU-a"}, lost, {"uuid": "GPU-c"})
    nvml = gpu_health.load()
    found = find_gpus(nvml, "1,2")
    assert [(gpu.index, gpu.uuid) for gpu in found] == [(1, ""), (2, "GPU-c")]
    assert [
        fault.what
        for gpu in found
        for fault in faults_of(gpu, gpu_health.state_of(nvml, gpu), None)
    ] == ["it does not answer any more"]


def test_a_gpu_of_another_job_is_not_faulty(fake_nvml: Callable[..., None]) -> None:
    other = {"uuid": "GPU-a", "failing": {"nvmlDeviceGetHandleByIndex": 4}}
    fake_nvml(other, {"uuid": "GPU-b"}, {"uuid": "GPU-c"})
    assert gpu_health.look(None) == []
    # CUDA begins to count at the first GPU that the process may use.
    found = find_gpus(gpu_health.load(), "1")
    assert [(gpu.index, gpu.uuid) for gpu in found] == [(2, "GPU-c")]


def test_a_uuid_that_a_gpu_does_not_say_is_not_made_up(fake_nvml: Callable[..., None]) -> None:
    fake_nvml(
        {"uuid": "GPU-a", "failing": {"nvmlDeviceGetUUID": 15, "nvmlDeviceGetMemoryInfo": 15}}
    )
    [fault] = gpu_health.look(None)
    assert (fault.uuid, fault.what) == ("", "it does not answer any more")


@pytest.mark.parametrize("own", ["MIG-0", "MIG-1"])
def test_of_two_mig_devices_in_one_instance_the_own_one_is_named(
    own: str, fake_nvml: Callable[..., None]
) -> None:
    shared = [{"uuid": "MIG-0", "instance": 7}, {"uuid": "MIG-1", "instance": 7}]
    fake_nvml({"uuid": "GPU-m", "instances": shared})
    nvml = gpu_health.load()
    [gpu] = find_gpus(nvml, own)
    event = SimpleNamespace(device=gpu.handle, eventData=31, gpuInstanceId=7)
    fault = fault_of_event(nvml, [gpu], event)
    assert fault
    assert fault.uuid == own
