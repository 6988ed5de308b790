"""The GPUs of this node, as NVML describes them. NVML needs no CUDA context."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from srunddp.util.cuda_visible import VisibleDevice, visible
from srunddp.util.numa_nodes import SYSFS, numa_node_of_device

_READ = 0  # pynvml.NVML_P2P_CAPS_INDEX_READ is a tuple by mistake, which ctypes rejects
T = TypeVar("T")


class Device(VisibleDevice):
    """A GPU or MIG instance as NVML describes it.

    Attributes:
        name: The name of the GPU's model.
        total: Bytes of memory; 0 if unknown.
        free: Bytes of unused memory; 0 if unknown.
        address: The GPU's address on the PCI bus, written as in sysfs.
        numa: The GPU's NUMA node; -1 if unknown.
    """

    name: str
    total: int
    free: int
    address: str
    numa: int


@dataclass(frozen=True, kw_only=True)
class View:
    """What one process sees through NVML.

    Attributes:
        missing: Why NVML is not available; empty if it is.
        error: NVML's own error; empty if there was none.
        driver: The driver's version.
        cuda: The newest CUDA version that the driver supports.
        count: How many GPUs NVML shows, whatever ``CUDA_VISIBLE_DEVICES`` says.
        models: The model names of these GPUs, each once.
        devices: The GPUs and MIG instances that CUDA would show, in CUDA's order.
        unknown: The entry of ``CUDA_VISIBLE_DEVICES`` at which CUDA stops reading, because no
            device has this name or an earlier entry has named the same device; empty if there is
            none.
        separate: A list of three texts for each pair of ``devices`` that cannot read each other's
            memory: the two UUIDs and the reason.
    """

    missing: str = ""
    error: str = ""
    driver: str = ""
    cuda: str = ""
    count: int = 0
    models: list[str] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    unknown: str = ""
    separate: list[list[str]] = field(default_factory=list)


def look(wanted: str | None, sysfs: Path = SYSFS) -> View:
    """Ask NVML which GPUs there are, and work out which of them CUDA would show.

    Args:
        wanted: The value of ``CUDA_VISIBLE_DEVICES``; None if it is not set.
        sysfs: Where sysfs is mounted.
    """
    try:
        import pynvml
    except ImportError as error:
        return View(missing=str(error))
    try:
        pynvml.nvmlInit()
        try:
            return _view(pynvml, wanted, sysfs)
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        return View(missing=str(error))
    except pynvml.NVMLError as error:
        return View(error=str(error))


def _view(nvml: Any, wanted: str | None, sysfs: Path) -> View:
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    # Each entry lists a GPU's MIG instances, or the GPU itself.
    known = [
        [_device(nvml, each, gpu, sysfs) for each in instances(nvml, gpu) or [gpu]] for gpu in gpus
    ]
    devices, unknown = visible(wanted, known)
    # NVML encodes version 12.4 as 12040.
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    return View(
        driver=nvml.nvmlSystemGetDriverVersion(),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        count=len(gpus),
        models=sorted({gpu[0]["name"] for gpu in known}),
        devices=devices,
        unknown=unknown,
        separate=_separate(nvml, {nvml.nvmlDeviceGetUUID(gpu): gpu for gpu in gpus}, devices),
    )


def _device(nvml: Any, device: Any, gpu: Any, sysfs: Path) -> Device:
    memory = query_or(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(device), None)
    address = nvml.nvmlDeviceGetPciInfo(gpu).busId
    if isinstance(address, bytes):  # older versions of pynvml return bytes
        address = address.decode()
    address = address.lower()[-12:]  # NVML's domain has eight digits, sysfs's four
    uuid = nvml.nvmlDeviceGetUUID(device)
    parent = nvml.nvmlDeviceGetUUID(gpu)
    return Device(
        uuid=uuid,
        parent="" if uuid == parent else parent,
        name=nvml.nvmlDeviceGetName(device),
        total=memory.total if memory else 0,
        free=memory.free if memory else 0,
        address=address,
        numa=numa_node_of_device(address, sysfs),
    )


def _separate(nvml: Any, gpus: dict[str, Any], devices: list[Device]) -> list[list[str]]:
    """Return the UUIDs of each pair of devices that cannot read each other's memory (P2P), and the
    reason. MIG instances are left out, because they never can.
    """
    # pynvml has one status under two names, which end in SUPPORED and SUPPORTED. sorted() puts the
    # name with the correct spelling last, so that the dict has this one.
    names = {
        getattr(nvml, name): name.removeprefix("NVML_P2P_STATUS_").replace("_", " ").lower()
        for name in sorted(vars(nvml))
        if name.startswith("NVML_P2P_STATUS_")
    }
    found = []
    whole = [device["uuid"] for device in devices if device["uuid"] in gpus]
    for one, other in combinations(whole, 2):
        ask = partial(nvml.nvmlDeviceGetP2PStatus, gpus[one], gpus[other], _READ)
        # If the driver does not support the query, take the pair for connected, so that it is not
        # reported.
        status = query_or(nvml, ask, nvml.NVML_P2P_STATUS_OK)
        if one != other and status != nvml.NVML_P2P_STATUS_OK:
            found.append([one, other, names.get(status, str(status))])
    return found


def instances(nvml: Any, gpu: Any) -> list[Any]:
    """Return NVML's handles of a GPU's MIG instances; an empty list if MIG is off or cannot be
    queried.
    """
    if query_or(nvml, lambda: nvml.nvmlDeviceGetMigMode(gpu)[0], 0) != nvml.NVML_DEVICE_MIG_ENABLE:
        return []
    indices = range(query_or(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(gpu), 0))
    found = [
        query_or(nvml, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, index), None)
        for index in indices
    ]
    return [instance for instance in found if instance]


def query_or(nvml: Any, ask: Callable[[], T], default: T) -> T:
    """Call a function of NVML that the GPU may not support, and return its result.

    Args:
        nvml: The module ``pynvml``.
        ask: Makes the call.
        default: What to return if the GPU, the driver or this user's permissions do not allow the
            call.
    """
    try:
        return ask()
    except unsupported_errors(nvml):
        return default


def unsupported_errors(nvml: Any) -> tuple[type[Exception], ...]:
    """Return the classes of NVML's errors which mean that a call does not work on this GPU and need
    not be repeated.

    Args:
        nvml: The module ``pynvml``.
    """
    names = ("NotSupported", "NotFound", "InvalidArgument", "FunctionNotFound", "NoPermission")
    return tuple(getattr(nvml, f"NVMLError_{name}") for name in names)
