"""Which GPUs of a node CUDA shows to a process, by what NVML says of them and ``CUDA_VISIBLE_DEVICES``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

NO_GPU = ("", "-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES; the last is Slurm's


class VisibleDevice(TypedDict):
    """A GPU, or a MIG instance of one.

    Attributes:
        uuid: its own; parent: of the GPU that it is an instance of, else empty.
    """

    uuid: str
    parent: str


T = TypeVar("T")
D = TypeVar("D", bound=VisibleDevice)


def visible(wanted: str | None, gpus: Sequence[Sequence[D]]) -> tuple[list[D], str]:
    """What CUDA makes of ``CUDA_VISIBLE_DEVICES``, and the entry that it does not understand.

    It heeds nothing after such an entry, shows no GPU where one is named twice, and of MIG instances shows the first.

    Args:
        wanted: indices, UUIDs or beginnings of them; None where it is not set.
        gpus: of the node, each as its MIG instances or as itself.
    """
    chosen: list[D] = []
    if wanted is None:
        chosen = [device for gpu in gpus for device in gpu]
    for entry in [] if wanted is None else wanted.split(","):
        device = _named(entry.strip(), gpus)
        if device is None:
            return _of_mig(chosen), "" if entry.strip() in NO_GPU else entry.strip()
        if device in chosen:
            return [], entry.strip()
        chosen.append(device)
    return _of_mig(chosen), ""


def _named(entry: str, gpus: Sequence[Sequence[D]]) -> D | None:
    if number := re.match(r"\d+", entry):
        index = int(number[0])
        return gpus[index][0] if index < len(gpus) else None
    found = [gpu[0] for gpu in gpus if (gpu[0]["parent"] or gpu[0]["uuid"]).startswith(entry)]
    found += [device for gpu in gpus for device in gpu if device["parent"] and device["uuid"].startswith(entry)]
    return found[0] if entry and len(found) == 1 else None


def _of_mig(devices: list[D]) -> list[D]:
    instances = [device for device in devices if device["parent"]]
    return instances[:1] or devices


def instances(nvml: Any, gpu: Any) -> list[Any]:
    """NVML's handles of the MIG instances of a GPU."""
    if query_or(nvml, lambda: nvml.nvmlDeviceGetMigMode(gpu)[0], 0) != nvml.NVML_DEVICE_MIG_ENABLE:
        return []
    indices = range(query_or(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(gpu), 0))
    found = [query_or(nvml, lambda at=at: nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, at), None) for at in indices]  # type: ignore[misc]
    return [instance for instance in found if instance]


def query_or(nvml: Any, ask: Callable[[], T], default: T) -> T:
    """What a GPU says, or ``default`` where it does not know of such things."""
    try:
        return ask()
    except unsupported_errors(nvml):
        return default


def unsupported_errors(nvml: Any) -> tuple[type[Exception], ...]:
    """NVML's errors that say that this GPU, driver or user is not to ask that, now or later."""
    return (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NotFound,
        nvml.NVMLError_InvalidArgument,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_NoPermission,
    )
