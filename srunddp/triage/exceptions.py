"""What an exception that ended a script was about."""

from __future__ import annotations

import re

from srunddp.triage.event import Event
from srunddp.triage.signatures import table
from srunddp.triage.tracebacks import Raised

# Exceptions of launchers: what they are about is told elsewhere.
_WRAPPERS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException", "SystemExit")
_VARIABLES = re.compile(r"SLURM_|\b(?:LOCAL_|NODE_)?RANK\b|WORLD_SIZE|MASTER_(?:ADDR|PORT)|PMI_|OMPI_COMM")

# What an exception tells that names no more than the system's error.
_ERRNO = re.compile(r"\[Errno (\d{1,3})\]|\berrno[:= ]{1,3}(\d{1,3})\b")
_OF_ERRNO = {
    5: "file-missing", 11: "open-files", 12: "host-out-of-memory", 19: "no-such-interface", 23: "open-files",
    24: "open-files", 26: "file-missing", 28: "disk-full", 36: "file-missing", 37: "file-missing", 40: "file-missing",
    98: "address-in-use", 99: "network-unreachable", 100: "network-unreachable", 101: "network-unreachable",
    107: "file-missing", 110: "network-unreachable", 111: "network-unreachable", 112: "network-unreachable",
    113: "network-unreachable", 116: "file-missing", 121: "file-missing", 122: "disk-full", 131: "file-missing",
}  # fmt: skip
_OF_FILE = re.compile(r": '/[^']+'$")
_CHECKPOINT = re.compile(r"state_dict|checkpoint|ckpt|torch\.load", re.IGNORECASE)
_GUESSED = ("TypeError", "ValueError", "KeyError", "AttributeError", "AssertionError", "IndexError")
VAGUE = (
    "RuntimeError", "Exception", "OSError", "ImportError", "SystemError", "ConnectionError", "TimeoutError",
    "BackendCompilerFailed", "InductorError", "TorchRuntimeError", "RayTaskError", "InstantiationException",
)  # fmt: skip
DOUBT = re.compile(
    r"rank|world|SLURM|MASTER|NCCL|gloo|CUDA|GPU|device|\bport\b|socket|host|address|checkpoint|numpy|version|memory|"
    r"timed? ?out|connect|librar|driver|file|path|director|environ|node",
    re.IGNORECASE,
)


def _guess(raised: Raised) -> str:
    """What the line that raised was about."""
    line = raised.code.rpartition("\n")[2]
    if _VARIABLES.search(line + raised.message) and re.search(r"environ|getenv|SLURM_", line + raised.message):
        return "slurm-variables"
    return "checkpoint-mismatch" if raised.kind == "KeyError" and _CHECKPOINT.search(line) else ""


def _of_errno(raised: Raised) -> str:
    """The cause behind the system's error, where an exception of the chain tells its number."""
    for text in (raised.text, *raised.later):
        if (match := _ERRNO.search(text)) and (cause := _OF_ERRNO.get(int(match[1] or match[2]), "")):
            return "file-missing" if cause == "network-unreachable" and _OF_FILE.search(text) else cause
    return ""


def of_exception(raised: Raised, file: int) -> Event:
    known = table()
    texts = [raised.text, *raised.later]
    signs = [known.read(text) for text in texts]
    sign = signs[0]
    if sign is None or sign.id == "script-error":
        sign = next((each for each in signs[1:] if each and each.kind == "primary" and each.id != "script-error"), sign)
    event = Event("script-error", "primary", True, file, raised.number, raised.text, generic=True, raised=raised)
    name = raised.kind.rpartition(".")[2]
    if (name in _WRAPPERS and not (sign and sign.id == "rank-killed")) or raised.ignored:
        event.kind, event.sure, event.cause = "secondary", False, "unknown"
    elif sign and sign.id != "script-error" and sign.kind != "noise":
        event.cause, event.kind, event.sure, event.generic, event.late = sign.id, sign.kind, sign.sure, False, sign.late
        event.sure &= sign is signs[0]
    elif (cause := _of_errno(raised)) or (name in _GUESSED and (cause := _guess(raised))):
        event.cause, event.sure, event.generic = cause, False, False
    else:
        event.sure = raised.inner and name not in VAGUE and not DOUBT.search(raised.message)
    event.weak = raised.ignored or raised.aside or event.kind == "hint"
    return event
