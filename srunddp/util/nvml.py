"""The GPUs of this node by NVML, which needs no CUDA context, and which of them
``CUDA_VISIBLE_DEVICES`` shows.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from srunddp.util.hostlist import numbers_of
from srunddp.util.kernel_file import text_of

NO_GPU = ("", "-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES; the last is Slurm's
_READ = 0  # pynvml.NVML_P2P_CAPS_INDEX_READ is a tuple, which ctypes refuses
SYSFS = Path("/sys")
T = TypeVar("T")
D = TypeVar("D", bound="VisibleDevice")


class VisibleDevice(TypedDict):
    """A GPU, or a MIG instance of one; ``parent``: the UUID of the GPU that it is an instance of,
    else empty.
    """

    uuid: str
    parent: str


class Device(VisibleDevice):
    """What is known of one.

    Attributes:
        total, free: bytes of memory, 0 where NVML does not tell.
        address: on the PCI bus, as in sysfs; numa: its NUMA node, -1 where nothing tells.
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
        missing: why there is no NVML to ask, else empty; error: NVML's own.
        driver, cuda: the driver's version, and of the CUDA that it supports.
        count: GPUs that NVML shows, whatever ``CUDA_VISIBLE_DEVICES`` says; models: their names,
            each once.
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
    """What NVML says; ``wanted`` is ``CUDA_VISIBLE_DEVICES``, None where it is not set."""
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
    # Sysfs's has a short domain.
    address = (address.decode() if isinstance(address, bytes) else address).lower()[-12:]
    uuid = nvml.nvmlDeviceGetUUID(device)
    parent = nvml.nvmlDeviceGetUUID(gpu)
    return Device(
        uuid=uuid,
        parent="" if uuid == parent else parent,
        name=nvml.nvmlDeviceGetName(device),
        total=memory.total if memory else 0,
        free=memory.free if memory else 0,
        address=address,
        numa=of_device(address, sysfs),
    )


def _separate(nvml: Any, gpus: dict[str, Any], devices: list[Device]) -> list[list[str]]:
    """Pairs without P2P. MIG instances have none at all, and are none of these GPUs."""
    names = {
        getattr(nvml, name): name.removeprefix("NVML_P2P_STATUS_").replace("_", " ").lower()
        for name in sorted(vars(nvml))
        if name.startswith("NVML_P2P_STATUS_")
    }
    found = []
    for one, other in combinations(
        [device["uuid"] for device in devices if device["uuid"] in gpus], 2
    ):
        ask = partial(nvml.nvmlDeviceGetP2PStatus, gpus[one], gpus[other], _READ)
        status = query_or(nvml, ask, nvml.NVML_P2P_STATUS_OK)
        if one != other and status != nvml.NVML_P2P_STATUS_OK:
            found.append([one, other, names.get(status, str(status))])
    return found


def of_device(address: str, sysfs: Path = SYSFS) -> int:
    """The NUMA node of the PCI device ``0000:17:00.0``; -1 where nothing tells, as on machines with
    one node.
    """
    return int(text_of(sysfs / "bus/pci/devices" / address / "numa_node") or -1)


def of_cpus(cpus: set[int], sysfs: Path = SYSFS) -> list[int]:
    """The NUMA nodes that have any of these CPUs."""
    nodes = (sysfs / "devices/system/node").glob("node[0-9]*")
    return sorted(
        int(each.name.removeprefix("node"))
        for each in nodes
        if cpus & numbers_of(text_of(each / "cpulist"))
    )


def visible(wanted: str | None, gpus: Sequence[Sequence[D]]) -> tuple[list[D], str]:
    """What CUDA makes of ``CUDA_VISIBLE_DEVICES``, and the entry that it does not understand.

    It heeds nothing after such an entry, shows no GPU where one is named twice, and of MIG
    instances shows the first.

    Args:
        wanted: indices, UUIDs or beginnings of them; None where it is not set.
        gpus: of the node, each as its MIG instances or as itself.
    """
    if wanted is None:
        return _of_mig([device for gpu in gpus for device in gpu]), ""
    chosen: list[D] = []
    for entry in wanted.split(","):
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
    found += [
        device
        for gpu in gpus
        for device in gpu
        if device["parent"] and device["uuid"].startswith(entry)
    ]
    if entry and len(found) == 1:
        return found[0]
    return None


def _of_mig(devices: list[D]) -> list[D]:
    return [device for device in devices if device["parent"]][:1] or devices


def instances(nvml: Any, gpu: Any) -> list[Any]:
    """NVML's handles of the MIG instances of a GPU."""
    if query_or(nvml, lambda: nvml.nvmlDeviceGetMigMode(gpu)[0], 0) != nvml.NVML_DEVICE_MIG_ENABLE:
        return []
    indices = range(query_or(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(gpu), 0))
    found = [
        query_or(nvml, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, index), None)
        for index in indices
    ]
    return [instance for instance in found if instance]


def query_or(nvml: Any, ask: Callable[[], T], default: T) -> T:
    """What a GPU says, or ``default`` where it does not know of such things."""
    try:
        return ask()
    except unsupported_errors(nvml):
        return default


def unsupported_errors(nvml: Any) -> tuple[type[Exception], ...]:
    """NVML's errors that say that this GPU, driver or user is not to ask that, now or later."""
    names = ("NotSupported", "NotFound", "InvalidArgument", "FunctionNotFound", "NoPermission")
    return tuple(getattr(nvml, f"NVMLError_{name}") for name in names)
