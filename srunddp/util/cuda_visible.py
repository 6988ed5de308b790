"""Which GPUs CUDA shows a process, by ``CUDA_VISIBLE_DEVICES``."""

import re
from collections.abc import Sequence
from typing import TypedDict, TypeVar

NO_GPU = ("", "-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES; the last is Slurm's
D = TypeVar("D", bound="VisibleDevice")


class VisibleDevice(TypedDict):
    """A GPU, or a MIG instance of one.

    Attributes:
        uuid: of the GPU or the instance.
        parent: the UUID of the GPU that it is an instance of; empty for a whole GPU.
    """

    uuid: str
    parent: str


def visible(wanted: str | None, gpus: Sequence[Sequence[D]]) -> tuple[list[D], str]:
    """Tell what CUDA makes of ``CUDA_VISIBLE_DEVICES``.

    It heeds nothing after an entry that it does not understand, shows no GPU where one is named
    twice, and of MIG instances shows the first.

    Args:
        wanted: indices, UUIDs or beginnings of them; None where it is not set.
        gpus: of the node, each as its MIG instances or as itself.

    Returns:
        The devices that it shows, and the entry that it does not understand; empty where it
        understands all.
    """
    if wanted is None:
        return _first_instance([device for gpu in gpus for device in gpu]), ""
    chosen: list[D] = []
    # In the order of the entries, which is the order of CUDA's indices: "1,0" makes GPU 1 cuda:0.
    for entry in map(str.strip, wanted.split(",")):
        device = _named(entry, gpus)
        if device is None:
            return _first_instance(chosen), "" if entry in NO_GPU else entry
        if device in chosen:
            return [], entry
        chosen.append(device)
    return _first_instance(chosen), ""


def _named(entry: str, gpus: Sequence[Sequence[D]]) -> D | None:
    """The device that an index names, or the beginning of a UUID which only one has."""
    # CUDA reads the digits that an entry begins with, and not what follows them: 1gpu2 is GPU 1.
    if number := re.match(r"\d+", entry):
        index = int(number[0])
        return gpus[index][0] if index < len(gpus) else None
    # The UUID of a GPU with MIG stands for its first instance, as its index does.
    found = [gpu[0] for gpu in gpus if (gpu[0]["parent"] or gpu[0]["uuid"]).startswith(entry)]
    for gpu in gpus:
        found += [each for each in gpu if each["parent"] and each["uuid"].startswith(entry)]
    return found[0] if entry and len(found) == 1 else None


def _first_instance(devices: list[D]) -> list[D]:
    """CUDA shows a process one MIG instance, and then no other device."""
    return [device for device in devices if device["parent"]][:1] or devices
