"""The messages that the process that asks NVML sends to its supervisor."""

from __future__ import annotations

from srunddp.supervisor.failure import GpuFault
from srunddp.util.messages import Message
from srunddp.util.quick_dataclass import dataclass


class GpuMessage(Message):
    """A message of the process that asks NVML to its supervisor."""


@dataclass(frozen=True)
class GpuFigures:
    """What NVML has told of a GPU when the run began.

    Attributes:
        index: NVML's index of the GPU.
        uuid: Its UUID, or that of the MIG instance that CUDA shows; empty if it is not known.
        errors: How many uncorrected memory errors there were since the driver was loaded; None if
            the GPU does not count them.
        is_remap_pending: Whether rows or pages of memory were to be retired at the next reset.
    """

    index: int
    uuid: str
    errors: int | None
    is_remap_pending: bool


@dataclass(frozen=True)
class GpusAtStart(GpuMessage, kind="gpus_at_start"):
    """The figures of this node's GPUs, with which a failure's are compared.

    Attributes:
        gpus: The figures of each GPU.
    """

    gpus: tuple[GpuFigures, ...]


@dataclass(frozen=True)
class GpusSay(GpuMessage, kind="gpus_say"):
    """The faults of this node's GPUs.

    Attributes:
        faults: The faults; empty if there are none.
        is_answer: Whether these are all present faults, sent because the supervisor has asked. If
            False, they are new faults of hardware.
    """

    faults: tuple[GpuFault, ...]
    is_answer: bool
