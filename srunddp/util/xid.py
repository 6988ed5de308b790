"""NVIDIA's Xid numbers, by which the driver reports errors of GPUs, and whose fault each one is.

The numbers and what NVIDIA asks to be done after each are in its Xid catalogue
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html). The Xids of kind ``PROGRAM``
are those that NVIDIA's device plugin for Kubernetes skips as errors of applications
(https://github.com/NVIDIA/k8s-device-plugin, internal/rm/health.go), except two: Xid 45 follows any
abrupt end of a program and other Xids of its GPU, and for Xid 109 the catalogue asks for a reset,
so these two do not tell whose fault they are. The texts are ours, not NVIDIA's.

``srunddp run``, ``srunddp check`` and ``srunddp triage`` all use this list.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

from srunddp.util.quick_dataclass import dataclass


class XidKind(Enum):
    """What has most likely caused an Xid.

    Attributes:
        PROGRAM: The program. The same program would cause the Xid on any GPU.
        HARDWARE: The GPU. The catalogue asks for a reset of the GPU or a restart of the machine;
            until then the GPU cannot be used.
        LINK: An NVLink. The fault may also be that of the GPU at the other end of the link.
        OTHER: Unknown: the Xid alone does not tell the cause.
    """

    PROGRAM = "program"
    HARDWARE = "hardware"
    LINK = "link"
    OTHER = "other"


@dataclass(frozen=True)
class Xid:
    """An Xid and its meaning.

    Attributes:
        number: NVIDIA's number.
        kind: What has most likely caused the Xid.
        text: What has happened, in a few words; empty for a number that is not in the list.
    """

    number: int
    kind: XidKind
    text: str = ""

    def __str__(self) -> str:
        """Return the number and what it means, such as ``Xid 79, fallen off the bus``."""
        return f"Xid {self.number}, {self.text}" if self.text else f"Xid {self.number}"


_TEXTS: Mapping[XidKind, Mapping[int, str]] = {
    XidKind.PROGRAM: {
        13: "exception in the graphics engine, as after an access out of bounds",
        31: "access to memory that is not mapped",
        43: "the program's work on the GPU was ended",
        68: "exception in the video decoder",
    },
    XidKind.HARDWARE: {
        46: "the GPU has stopped processing",
        48: "uncorrectable memory error (ECC)",
        62: "the controller of the GPU's power has halted",
        64: "a row of memory could not be retired",
        79: "fallen off the bus",
        95: "uncontained memory error (ECC)",
        110: "security fault",
        119: "no answer from the GPU's system processor",
        120: "error of the GPU's system processor",
        136: "no NVLink could be trained",
        140: "unrecovered memory error (ECC)",
        143: "the GPU could not be initialised",
        156: "a part of the GPU was retired",
        158: "fatal time limit",
    },
    XidKind.LINK: {
        74: "NVLink error",
        **dict.fromkeys(range(144, 151), "NVLink error"),
        155: "NVLink error",
    },
    XidKind.OTHER: {
        45: "the program's work on the GPU was removed, as after its end or another Xid",
        54: "not enough power from the auxiliary connector",
        63: "a row of memory was retired, which a reset of the GPU completes",
        92: "many corrected memory errors (ECC)",
        94: "contained memory error (ECC), which ends only the program that met it",
        109: "time limit for a context switch",
        154: "the driver asks for another way of recovery",
    },
}

XIDS: Mapping[int, Xid] = {
    number: Xid(number, kind, text)
    for kind, texts in _TEXTS.items()
    for number, text in texts.items()
}


def xid(number: int) -> Xid:
    """Return the entry of :data:`XIDS` for a number; for a number that is not listed, an entry of
    kind ``OTHER`` without a text.
    """
    return XIDS.get(number, Xid(number, XidKind.OTHER))


def pattern(kinds: Iterable[XidKind]) -> str:
    """Return a regular expression, as a non-capturing group, that matches the numbers of the Xids
    of some kinds.

    Args:
        kinds: The kinds whose numbers are to match.
    """
    wanted = set(kinds)
    return f"(?:{'|'.join(str(each.number) for each in XIDS.values() if each.kind in wanted)})"
