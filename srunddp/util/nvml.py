"""The GPUs of this node by NVML, which needs no CUDA context."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from srunddp.util.cuda_visible import VisibleDevice, visible
from srunddp.util.numa_nodes import SYSFS, numa_node_of_device

_READ = 0  # pynvml.NVML_P2P_CAPS_INDEX_READ is a tuple, which ctypes refuses
T = TypeVar("T")


class Device(VisibleDevice):
    """What is known of one.

    Attributes:
        name: of the model.
        total: bytes of memory, 0 where NVML does not tell.
        free: bytes of it that nobody uses, 0 where NVML does not tell.
        address: on the PCI bus, as in sysfs.
        numa: its NUMA node, -1 where nothing tells.
    """

    name: str
    total: int
    free: int
    address: str
    numa: int


@dataclass(frozen=True, kw_only=True)
class View:
    """What one process sees.

    Attributes:
        missing: why there is no NVML to ask, else empty.
        error: NVML's own, else empty.
        driver: the driver's version.
        cuda: the version of CUDA that it supports.
        count: GPUs that NVML shows, whatever ``CUDA_VISIBLE_DEVICES`` says.
        models: their names, each once.
        devices: that CUDA would show, in its order.
        unknown: in ``CUDA_VISIBLE_DEVICES``, of no GPU or of one named before: CUDA heeds nothing
            from there on.
        separate: pairs of these devices that cannot read each other's memory, by UUID, with the
            reason.
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
    """Ask NVML what it shows, and which of that CUDA would show.

    Args:
        wanted: ``CUDA_VISIBLE_DEVICES``; None where it is not set.
        sysfs: where it is mounted.
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
    # Each as its MIG instances or as itself.
    known = [
        [_device(nvml, each, gpu, sysfs) for each in instances(nvml, gpu) or [gpu]] for gpu in gpus
    ]
    devices, unknown = visible(wanted, known)
    # 12040 is 12.4.
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
    if isinstance(address, bytes):  # of older versions of its Python module
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
    """Pairs without P2P. MIG instances have none at all, and are none of these GPUs."""
    # pynvml has the name of one status twice, spelled SUPPORED and SUPPORTED, with the same number.
    # Sorted, the right spelling comes later and is kept.
    names = {
        getattr(nvml, name): name.removeprefix("NVML_P2P_STATUS_").replace("_", " ").lower()
        for name in sorted(vars(nvml))
        if name.startswith("NVML_P2P_STATUS_")
    }
    found = []
    whole = [device["uuid"] for device in devices if device["uuid"] in gpus]
    for one, other in combinations(whole, 2):
        ask = partial(nvml.nvmlDeviceGetP2PStatus, gpus[one], gpus[other], _READ)
        # A driver that cannot tell gives no reason to report a pair.
        status = query_or(nvml, ask, nvml.NVML_P2P_STATUS_OK)
        if one != other and status != nvml.NVML_P2P_STATUS_OK:
            found.append([one, other, names.get(status, str(status))])
    return found


def instances(nvml: Any, gpu: Any) -> list[Any]:
    """List NVML's handles of the MIG instances of a GPU; empty where MIG is off."""
    if query_or(nvml, lambda: nvml.nvmlDeviceGetMigMode(gpu)[0], 0) != nvml.NVML_DEVICE_MIG_ENABLE:
        return []
    indices = range(query_or(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(gpu), 0))
    found = [
        query_or(nvml, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, index), None)
        for index in indices
    ]
    return [instance for instance in found if instance]


def query_or(nvml: Any, ask: Callable[[], T], default: T) -> T:
    """Ask a GPU something that it need not know.

    Args:
        nvml: the module.
        ask: asks it.
        default: the answer where the GPU, the driver or this user is not to ask that.
    """
    try:
        return ask()
    except unsupported_errors(nvml):
        return default


def unsupported_errors(nvml: Any) -> tuple[type[Exception], ...]:
    """Return NVML's errors by which this GPU, driver or user cannot be asked that, now or later."""
    names = ("NotSupported", "NotFound", "InvalidArgument", "FunctionNotFound", "NoPermission")
    return tuple(getattr(nvml, f"NVMLError_{name}") for name in names)
