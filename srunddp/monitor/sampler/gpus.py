"""The GPUs of the job by NVML: each its own row, known by its UUID."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from srunddp.bootstrap.environment.cuda_visible_devices import Named, instances, visible
from srunddp.monitor.sampler.gpu import FIELDS, Gpu

COLUMNS = ("time", "uuid", "index", "name", *FIELDS)


class _Known(Named):
    index: int
    name: str
    handle: Any
    gpu: Any


class Gpus:
    """Those that the tasks of this node see together. None where there is no NVML.

    NVML shows what the device rules of this process's control group let through: where Slurm gives each task a GPU
    of its own, those of the other tasks are out of sight.

    Args:
        seconds: from one sample to the next.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._nvml, self._known = _look()
        self._gpus: dict[str, Gpu] = {}

    def choose(self, wanted: Iterable[str | None]) -> bool:
        """Ask the GPUs that these values of ``CUDA_VISIBLE_DEVICES`` show; returns whether there are any."""
        for each in wanted:
            for device in visible(each, self._known)[0]:
                if device["uuid"] not in self._gpus:
                    self._gpus[device["uuid"]] = self._gpu(device)
        return bool(self._gpus)

    def _gpu(self, device: _Known) -> Gpu:
        name = device["name"].replace(",", " ")
        return Gpu(
            self._nvml,
            device["handle"],
            device["gpu"] if device["parent"] else None,
            f"{device['uuid']},{device['index']},{name}",
            self._seconds,
        )

    def rows(self, time: str) -> str:
        """A line for each."""
        return "".join(f"{time},{gpu.label},{gpu.sample()}\n" for gpu in self._gpus.values())


def _look() -> tuple[Any, list[list[_Known]]]:
    """NVML, and the GPUs that it shows, each as its MIG instances or as itself."""
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [_as_known(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None, []


def _as_known(nvml: Any, index: int) -> list[_Known]:
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        parent, name = nvml.nvmlDeviceGetUUID(gpu), nvml.nvmlDeviceGetName(gpu)
        found = [(nvml.nvmlDeviceGetUUID(each), each) for each in instances(nvml, gpu)]
    except nvml.NVMLError:
        # One that is lost already keeps its place, for those that are named by their number.
        return [_Known(uuid=f"GPU-{index}-failed", parent="", index=index, name="", handle=None, gpu=None)]
    if not found:
        return [_Known(uuid=parent, parent="", index=index, name=name, handle=gpu, gpu=gpu)]
    return [_Known(uuid=uuid, parent=parent, index=index, name=name, handle=handle, gpu=gpu) for uuid, handle in found]
