"""One thing that a log says of an end, and which of several came first, by their clocks or their places."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from srunddp.triage.signatures import table
from srunddp.triage.tracebacks import PythonException

MARGIN = 5.0  # seconds by which clocks of nodes may differ
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


@dataclass
class Event:
    """One thing that was said of an end.

    Attributes:
        cause: an id of the table; kind: as there; sure: whether it can only mean that.
        file: its place among the logs; number: of the line; text: without label.
        time: of the line, and since: of the last line before it that told one.
        late: reported at the end, whenever it was; generic: an exception, without a sign of its own.
        weak: only warned of, quoted, handled or survived: it can explain another failure, but is none.
        progress: how many further steps the same stream told of afterwards.
    """

    cause: str
    kind: str
    sure: bool
    file: int
    number: int
    text: str
    rank: int | None = None
    node: str | None = None
    time: float | None = None
    since: float | None = None
    late: bool = False
    generic: bool = False
    raised: PythonException | None = None
    ours: bool = False
    weak: bool = False
    progress: int = 0


def earliest(events: Iterable[Event]) -> Event:
    """The first by their times where two have one, else by file and place."""
    return functools.reduce(lambda chosen, event: event if before(event, chosen) else chosen, events)


def before(one: Event, other: Event) -> bool:
    """As well as that can be told."""
    if one.file == other.file:
        if one.time is not None and other.time is not None and one.time != other.time:
            return one.time < other.time
        return one.number < other.number
    ours, theirs = (event.time if event.time is not None else event.since for event in (one, other))
    if ours is not None and theirs is not None and ours != theirs:
        return ours < theirs
    return (one.rank is None, one.rank or 0, one.file) < (other.rank is None, other.rank or 0, other.file)


def surely_before(one: Event, other: Event, margin: float = 0.0) -> bool:
    """By more than clocks of nodes differ, or in one file."""
    if one.time is not None and other.time is not None and (one.file != other.file or margin):
        return one.time + max(margin, MARGIN if one.file != other.file else 0.0) < other.time
    return one.file == other.file and one.number < other.number


def _guess(raised: PythonException) -> str:
    """What the line that raised was about."""
    line = raised.code.rpartition("\n")[2]
    if _VARIABLES.search(line + raised.message) and re.search(r"environ|getenv|SLURM_", line + raised.message):
        return "slurm-variables"
    return "checkpoint-mismatch" if raised.kind == "KeyError" and _CHECKPOINT.search(line) else ""


def _of_errno(raised: PythonException) -> str:
    """The cause behind the system's error, where an exception of the chain tells its number."""
    for text in (raised.text, *raised.later):
        if (match := _ERRNO.search(text)) and (cause := _OF_ERRNO.get(int(match[1] or match[2]), "")):
            return "file-missing" if cause == "network-unreachable" and _OF_FILE.search(text) else cause
    return ""


def of_exception(raised: PythonException, file: int) -> Event:
    signs = [table().read(text) for text in (raised.text, *raised.later)]
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
