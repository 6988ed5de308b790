"""How one rank failed, and how likely that is the cause of the run's end.

The errors that a dead rank's peers see are secondary.
"""

from __future__ import annotations

import json
import os
import re
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, IntEnum
from types import TracebackType

from srunddp.supervisor.signals import signal_name
from srunddp.util.cgroup import kills_whole_step

# Bytes of a text once it is JSON, so that a message fits whatever letters it is in.
_LONGEST = 24000
_LONGEST_CAUSE = 500


class FailureKind(IntEnum):
    """The lower, the likelier this failure is the cause."""

    PRIMARY = 0
    ABORTED = 1  # SIGABRT: a C++ library gave up, for a reason of its own or for a lost peer
    NETWORK = 2  # Python's ConnectionError: of the script's own doing, or of a lost peer
    SECONDARY = 3  # an error of a collective or of the store, as a lost peer causes it
    STOPPED = 4  # no failure: all ranks have agreed to end
    SIGNALLED = 5  # after a signal from the launcher, which ends all ranks alike


class FailureCategory(Enum):
    """What a failure means for another start of the run."""

    OTHER = "other"
    WRONG_SCRIPT = "wrong script"  # a syntax or an import error: the script would fail again
    OUT_OF_MEMORY = "out of memory"  # the kernel has killed the worker for that


@dataclass(frozen=True)
class ScriptError:
    """What a worker knows of the error that has ended its script.

    Attributes:
        cause: In a few words.
        traceback: As Python prints it, or empty.
        weight: How likely it is the cause of the other ranks' failures.
        category: What it means for another start.
    """

    cause: str
    traceback: str
    weight: FailureKind
    category: FailureCategory = FailureCategory.OTHER


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    Attributes:
        rank, node: whose.
        cause: in a few words; traceback: text, or empty.
        exit_code: what the run is to end with.
        weight: how likely it is the cause.
        time: of the rank's own clock, in ISO 8601; for people, never to order by.
        shown: the user has already seen it.
        category: what it means for another start.
    """

    rank: int
    node: str
    cause: str
    exit_code: int
    weight: FailureKind = FailureKind.PRIMARY
    traceback: str = ""
    time: str = ""
    shown: bool = False
    category: FailureCategory = FailureCategory.OTHER


def time_of_day() -> str:
    """This node's clock, in ISO 8601 and UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def of_exception(error: BaseException, trace: TracebackType | None) -> ScriptError:
    """Describe an exception that has ended the script."""
    text = "".join(traceback.format_exception(type(error), error, trace))
    lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    # A message may have several lines, and notes below it; of a syntax error the message is the
    # last.
    cause = lines[-1 if isinstance(error, SyntaxError) else 0]
    if isinstance(error, SyntaxError | ImportError):
        category = FailureCategory.WRONG_SCRIPT
    else:
        category = FailureCategory.OTHER
    return ScriptError(cause[:_LONGEST_CAUSE], shortened(text), _weight(error), category)


def of_exit(end: SystemExit, code: int) -> ScriptError:
    """Describe a ``sys.exit`` that has ended the script.

    In the handler of a collective's error it counts as secondary, as that error would.
    """
    if isinstance(end.code, str):
        said = f": {end.code}"[:_LONGEST_CAUSE]
    else:
        said = ""
    if end.__context__:
        weight = _weight(end.__context__)
    else:
        weight = FailureKind.PRIMARY
    return ScriptError(f"sys.exit({1 if said else code}){said}", "", weight)


def of_killed_supervisor(rank: int, node: str) -> Failure:
    """Describe what another rank sees of one whose supervisor has ended without a word.

    Its worker ends with it, and nobody is left there who could read why. Where the kernel kills
    supervisor and worker together when memory runs out, that is the likeliest cause.
    """
    if kills_whole_step(os.environ):
        likely = ", probably out of memory, as OOMKillStep is on"
    else:
        likely = ""
    return Failure(rank, node, f"srunddp itself was killed{likely}", 137)


def by_launcher(number: int) -> str:
    """The cause where the launcher has sent a signal that ends a run."""
    return (
        f"the launcher ended the run with {signal_name(number)}, as for scancel or the time limit"
    )


def shortened(text: str) -> str:
    """The beginning and the end of a long text."""
    half = _LONGEST // 2
    whole = text
    while len(json.dumps(text)) > _LONGEST:
        text = f"{whole[:half]}\n[...]\n{whole[-half:]}"
        half = half * 3 // 4
    return text


# What Gloo, NCCL and the store say when a peer has gone or does not come; they raise RuntimeErrors.
_SECONDARY = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|socket closed|"
    r"timed out (waiting|after)|wait timeout|watchdog|failed to recv",
    re.IGNORECASE,
)


def _weight(error: BaseException) -> FailureKind:
    """Of an exception and those that it was raised from, or while they were handled, the least
    likely.
    """
    weights: dict[int, FailureKind] = {}
    following: BaseException | None = error
    while following is not None and id(following) not in weights:
        weights[id(following)] = _own_weight(following)
        following = following.__cause__ or following.__context__
    return max(weights.values())


def _own_weight(error: BaseException) -> FailureKind:
    if isinstance(error, ConnectionError):
        return FailureKind.NETWORK
    of_torch = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    if isinstance(error, RuntimeError):
        text = "".join(map(str, error.args))
    else:
        text = ""
    if of_torch or _SECONDARY.search(text):
        return FailureKind.SECONDARY
    return FailureKind.PRIMARY
