"""The messages that the process that asks NVML sends to its supervisor."""

from __future__ import annotations

from srunddp.supervisor.failure import GpuFault
from srunddp.util.messages import Message
from srunddp.util.quick_dataclass import dataclass


class GpuMessage(Message):
    """A message of the process that asks NVML to its supervisor."""


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
