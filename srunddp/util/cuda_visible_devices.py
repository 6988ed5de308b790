"""Which GPUs of a node CUDA shows to a process, by NVML and ``CUDA_VISIBLE_DEVICES``; and which of them a rank uses."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from srunddp.errors import ConfigError

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


def has_own(variables: Mapping[str, str], local_world_size: int, visible: int) -> bool:
    """Whether Slurm shows each rank several GPUs of its own, as with ``--gpus-per-task=2``, and not the node's to all.

    Args:
        variables: ``SLURM_GPUS_PER_TASK`` has that option where sbatch was given it, ``SLURM_STEP_GPUS`` all GPUs of
            the step on this node.
    """
    asked, step = variables.get("SLURM_GPUS_PER_TASK", ""), variables.get("SLURM_STEP_GPUS", "")
    shared_out = bool(step) and len(step.split(",")) == visible * local_world_size
    return visible > 1 and local_world_size > 1 and (asked.rpartition(":")[2] == str(visible) or shared_out)


def device_index(local_rank: int, local_world_size: int, visible: int, *, own: bool = False) -> int:
    """The CUDA device of a rank: the first of its own, or the one with the local rank's number.

    Args:
        local_rank, local_world_size: torch's terms.
        visible: ``torch.cuda.device_count()``, at least 1.
        own: no other rank sees these, by :func:`has_own`.

    Raises:
        ConfigError: fewer GPUs are visible than ranks share this node.
    """
    if visible == 1 or own:
        return 0
    if visible >= local_world_size:
        return local_rank
    found = f"{visible} GPUs are visible to local rank {local_rank}, and {local_world_size} ranks share this node"
    hint = f"start with --gpus-per-node={local_world_size} --gpu-bind=none, or with fewer tasks"
    raise ConfigError(found, expected="one GPU for each rank, or all of the node's for each", hint=hint)


def addresses(wanted: str | None) -> tuple[list[str], str]:
    """The PCI addresses of the GPUs that CUDA shows, in its order; and why there are none.

    NVML shows only those that a job's control group allows, and so does CUDA; sysfs would show all of the node's.
    """
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError:
        return [], "nvidia-ml-py is not installed"
    except nvml.NVMLError as error:
        return [], str(error)
    try:
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        known = [[_located(nvml, each, gpu) for each in instances(nvml, gpu) or [gpu]] for gpu in gpus]
        return [device["address"] for device in visible(wanted, known)[0]], "no GPU is visible"
    except nvml.NVMLError as error:
        return [], str(error)
    finally:
        nvml.nvmlShutdown()


class _LocatedDevice(VisibleDevice):
    address: str


def _located(nvml: Any, device: Any, gpu: Any) -> _LocatedDevice:
    uuid, parent = nvml.nvmlDeviceGetUUID(device), nvml.nvmlDeviceGetUUID(gpu)
    return _LocatedDevice(uuid=uuid, parent="" if uuid == parent else parent, address=pci_address(nvml, gpu))


def pci_address(nvml: Any, gpu: Any) -> str:
    """Of a GPU, as sysfs has it: ``0000:17:00.0``. NVML's has a longer domain."""
    address = nvml.nvmlDeviceGetPciInfo(gpu).busId
    return str(address.decode() if isinstance(address, bytes) else address).lower()[-12:]


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
