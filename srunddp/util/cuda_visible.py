"""Which GPUs CUDA shows to a process, according to ``CUDA_VISIBLE_DEVICES``."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import TypedDict, TypeVar

NO_GPU = ("", "-1", "NoDevFiles")  # values that hide all GPUs; Slurm sets NoDevFiles
D = TypeVar("D", bound="VisibleDevice")


class VisibleDevice(TypedDict):
    """A GPU or a MIG instance.

    Attributes:
        uuid: The UUID of the GPU or the instance.
        parent: For a MIG instance, the UUID of its GPU; empty for a GPU.
    """

    uuid: str
    parent: str


def may_have_gpus(environ: Mapping[str, str]) -> bool:
    """Tell, without asking NVML, whether CUDA may show this process a GPU.

    Args:
        environ: The environment variables of this process.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return os.path.exists("/dev/nvidiactl")
    return wanted not in NO_GPU


def visible(wanted: str | None, gpus: Sequence[Sequence[D]]) -> tuple[list[D], str]:
    """Tell which devices CUDA shows for a value of ``CUDA_VISIBLE_DEVICES``.

    CUDA ignores the first entry that it does not understand, and all entries after it. If a GPU is
    named twice, CUDA shows no device. If MIG instances are among the devices, CUDA shows only the
    first MIG instance.

    Args:
        wanted: Indices and UUIDs (or beginnings of UUIDs); None if the variable is not set.
        gpus: The node's GPUs; each entry lists a GPU's MIG instances, or the GPU itself.

    Returns:
        The devices that CUDA shows, and the entry that CUDA does not understand or that names a
        device again. This entry is empty if there is none, or if it is one of :data:`NO_GPU`.
    """
    if wanted is None:
        return _first_instance([device for gpu in gpus for device in gpu]), ""
    chosen: list[D] = []
    # The order of the entries is the order of CUDA's indices: with "1,0" GPU 1 is cuda:0.
    for entry in map(str.strip, wanted.split(",")):
        device = _named(entry, gpus)
        if device is None:
            return _first_instance(chosen), "" if entry in NO_GPU else entry
        if device in chosen:
            return [], entry
        chosen.append(device)
    return _first_instance(chosen), ""


def _named(entry: str, gpus: Sequence[Sequence[D]]) -> D | None:
    """Return the device with this index or UUID; None if there is none. The beginning of a UUID is
    enough if only one device has it.
    """
    # CUDA reads the leading digits of an entry and ignores the rest: 1gpu2 is GPU 1.
    if number := re.match(r"\d+", entry):
        index = int(number[0])
        return gpus[index][0] if index < len(gpus) else None
    # For a GPU with MIG, both its UUID and its index stand for its first instance.
    found = [gpu[0] for gpu in gpus if (gpu[0]["parent"] or gpu[0]["uuid"]).startswith(entry)]
    for gpu in gpus:
        found += [each for each in gpu if each["parent"] and each["uuid"].startswith(entry)]
    return found[0] if entry and len(found) == 1 else None


def _first_instance(devices: list[D]) -> list[D]:
    """Return only the first MIG instance, because CUDA shows no other device beside it; all devices
    if none of them is a MIG instance.
    """
    return [device for device in devices if device["parent"]][:1] or devices
