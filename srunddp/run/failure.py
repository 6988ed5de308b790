"""How one rank failed, and how much that says about the cause: what peers of a dead rank see are only its echoes."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from types import TracebackType

_LONGEST = 16000  # of a traceback; with what JSON makes of it, a message still fits


class Weight(IntEnum):
    """The lower, the likelier this failure is the cause."""

    PRIMARY = 0
    ABORTED = 1  # SIGABRT: a C++ library gave up, for a reason of its own or for a lost peer
    ECHO = 2  # an error of a collective or of a connection
    ASKED = 3  # after a signal from the launcher, which ends all ranks alike


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
    """

    rank: int
    node: str
    cause: str
    exit_code: int
    weight: Weight = Weight.PRIMARY
    traceback: str = ""
    time: str = ""
    shown: bool = False

    @classmethod
    def parse(cls, message: object) -> Failure:
        """From what :func:`dataclasses.asdict` made of it.

        Raises:
            TypeError, ValueError: it is none.
        """
        if not isinstance(message, dict):
            raise TypeError(message)
        failure = cls(**message)
        weight = Weight(failure.weight)
        texts = (failure.node, failure.cause, failure.traceback, failure.time)
        if not all(isinstance(text, str) for text in texts) or not isinstance(failure.exit_code, int):
            raise TypeError(message)
        return cls(**{**message, "weight": weight})


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def of_exception(error: BaseException, trace: TracebackType | None) -> tuple[str, str, Weight]:
    """The cause, the traceback as Python prints it, and the weight of an exception that ended a script."""
    text = "".join(traceback.format_exception(type(error), error, trace))
    cause = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1][:500]
    weight = Weight.ECHO if any(_is_echo(each) for each in _chain(error)) else Weight.PRIMARY
    return cause, shortened(text), weight


def of_exit(end: SystemExit, code: int) -> tuple[str, str, Weight]:
    """The same for ``sys.exit``; one in the handler of a collective's error is that error's echo."""
    said = f": {end.code}"[:500] if isinstance(end.code, str) else ""
    context = end.__context__
    weight = Weight.ECHO if context and any(_is_echo(each) for each in _chain(context)) else Weight.PRIMARY
    return f"sys.exit({code if not said else 1}){said}", "", weight


def of_status(code: int, dump: str, hint: str = "") -> tuple[str, str, Weight]:
    """The same for a process that ended without a word.

    Args:
        code: an exit code, or minus the number of a signal, as of ``os.waitstatus_to_exitcode``.
        dump: the stacks that faulthandler left, or empty; hint: what else is known.
    """
    if code >= 0:
        return f"the process ended with {code}, by os._exit or a library", shortened(dump), Weight.PRIMARY
    name = signal_name(-code)
    weight = Weight.ABORTED if -code == signal.SIGABRT else Weight.PRIMARY
    return f"killed by {name}{f', {hint}' if hint else ''}", shortened(dump), weight


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shortened(text: str) -> str:
    """The beginning and the end of a long text."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}\n[...]\n{text[-half:]}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


# What Gloo, NCCL and the store say when a peer has gone or does not come; they raise RuntimeErrors.
_ECHO = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|socket closed|"
    r"timed out (waiting|after)|wait timeout|watchdog|failed to recv",
    re.IGNORECASE,
)


def _is_echo(error: BaseException) -> bool:
    if isinstance(error, ConnectionError) or any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and bool(_ECHO.search(str(error)))
