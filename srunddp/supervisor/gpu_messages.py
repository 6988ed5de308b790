"""What the process that asks NVML tells its supervisor."""

from __future__ import annotations

from srunddp.supervisor.failure import GpuFault
from srunddp.util.messages import Message
from srunddp.util.quick_dataclass import dataclass


class GpuMessage(Message):
    """A message of the process to its supervisor."""


@dataclass(frozen=True)
class GpusSay(GpuMessage, kind="gpus_say"):
    """What is wrong with this node's GPUs.

    Attributes:
        faults: The faults.
        is_answer: Whether this is all that is wrong, because the supervisor has asked. Else it is
            a new fault.
    """

    faults: tuple[GpuFault, ...]
    is_answer: bool
