"""How one rank failed, and how much that says about the cause: what peers of a dead rank see are only its echoes."""

from __future__ import annotations

import json
import re
import signal
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from srunddp.supervisor import failure_files
from srunddp.supervisor.stacks import StackDump
from srunddp.util import memory

_LONGEST = 24000  # bytes of a text once it is JSON, so that a message fits whatever letters it is in
_LONGEST_CAUSE = 500


class FailureKind(IntEnum):
    """The lower, the likelier this failure is the cause."""

    PRIMARY = 0
    ABORTED = 1  # SIGABRT: a C++ library gave up, for a reason of its own or for a lost peer
    NETWORK = 2  # Python's ConnectionError: of the script's own doing, or of a lost peer
    ECHO = 3  # an error of a collective or of the store
    STOPPED = 4  # no failure: all ranks have agreed to end
    ASKED = 5  # after a signal from the launcher, which ends all ranks alike


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
    weight: FailureKind = FailureKind.PRIMARY
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
        weight = FailureKind(failure.weight)
        texts = (failure.node, failure.cause, failure.traceback, failure.time)
        if not all(isinstance(text, str) for text in texts) or type(failure.rank) is not int:
            raise TypeError(message)
        if type(failure.exit_code) is not int or not 0 < failure.exit_code < 256:
            raise ValueError(message)
        return cls(**{**message, "weight": weight})


def time_of_day() -> str:
    """This node's clock, in ISO 8601 and UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def of_exception(error: BaseException, trace: TracebackType | None) -> tuple[str, str, FailureKind]:
    """The cause, the traceback as Python prints it, and the weight of an exception that ended a script."""
    text = "".join(traceback.format_exception(type(error), error, trace))
    lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    # A message may have several lines, and notes below it; of a syntax error the message is the last.
    cause = lines[-1 if isinstance(error, SyntaxError) else 0]
    return cause[:_LONGEST_CAUSE], shortened(text), _weight(error)


def of_exit(end: SystemExit, code: int) -> tuple[str, str, FailureKind]:
    """The same for ``sys.exit``; one in the handler of a collective's error is that error's echo."""
    said = f": {end.code}"[:_LONGEST_CAUSE] if isinstance(end.code, str) else ""
    weight = _weight(end.__context__) if end.__context__ else FailureKind.PRIMARY
    return f"sys.exit({code if not said else 1}){said}", "", weight


def of_status(code: int, dump: str, hint: str = "") -> tuple[str, str, FailureKind]:
    """The same for a process that ended without a word.

    Args:
        code: an exit code, or minus the number of a signal, as of ``os.waitstatus_to_exitcode``.
        dump: the stacks that faulthandler left, or empty; hint: what else is known.
    """
    if code >= 0:
        return f"the process ended with {code}, by os._exit or a library", shortened(dump), FailureKind.PRIMARY
    name = signal_name(-code)
    weight = FailureKind.ABORTED if -code == signal.SIGABRT else FailureKind.PRIMARY
    return f"killed by {name}{f', {hint}' if hint else ''}", shortened(dump), weight


def by_launcher(number: int) -> str:
    """The cause where the launcher has sent a signal that ends a run."""
    return f"the launcher ended the run with {signal_name(number)}, as for scancel or the time limit"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shortened(text: str) -> str:
    """The beginning and the end of a long text."""
    half, whole = _LONGEST // 2, text
    while len(json.dumps(text)) > _LONGEST:
        text = f"{whole[:half]}\n[...]\n{whole[-half:]}"
        half = half * 3 // 4
    return text


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


def _weight(error: BaseException) -> FailureKind:
    return max(map(_own_weight, _chain(error)))


def _own_weight(error: BaseException) -> FailureKind:
    if isinstance(error, ConnectionError):
        return FailureKind.NETWORK
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return FailureKind.ECHO
    text = "".join(map(str, error.args)) if isinstance(error, RuntimeError) else ""
    return FailureKind.ECHO if _ECHO.search(text) else FailureKind.PRIMARY


_ASKED_COUNTS = 120.0  # what fails so long after the launcher's signal fails for a reason of its own


@dataclass
class FailureRecorder:
    """Makes this rank's :class:`Failure`.

    Attributes:
        rank, node: of this rank; dump: of its worker's stacks.
        log: the file that gets its traceback, or None.
    """

    rank: int
    node: str
    dump: StackDump
    log: Path | None
    _asked: tuple[int, float] | None = None
    _oom_kills: int = field(default_factory=memory.oom_kills)

    def asked(self, now: float) -> int:
        """The number of the signal with which the launcher has asked this run to end; 0 for none, or long ago."""
        return self._asked[0] if self._asked and now < self._asked[1] + _ASKED_COUNTS else 0

    def ask(self, number: int, now: float) -> None:
        """The launcher has sent a signal that ends a run."""
        self._asked = (number, now)

    def of_status(self, status: int, now: float, *, dumped_core: bool = False) -> Failure:
        """Of a worker that ended without a word, by its exit code or minus its signal."""
        killed = status == -signal.SIGKILL and memory.oom_kills() > self._oom_kills
        hint = "out of memory" if killed else "core dumped" if dumped_core else ""
        cause, trace, weight = of_status(status, self.dump.read(), hint)
        return self.of(cause, status if status >= 0 else 128 - status, now, weight, trace)

    def of_message(self, told: Mapping[str, Any], now: float) -> Failure:
        """Of a worker that has told of its exception."""
        weight, trace, shown = FailureKind(told["weight"]), told["traceback"], told["shown"]
        return self.of(told["cause"], told["exit_code"], now, weight, trace, shown=shown)

    def of(
        self,
        cause: str,
        code: int,
        now: float,
        weight: FailureKind = FailureKind.PRIMARY,
        trace: str = "",
        *,
        shown: bool = False,
    ) -> Failure:
        """Of anything."""
        asked = self.asked(now)
        if asked and weight is not FailureKind.STOPPED:
            own = f"; then {cause}" if trace and code != 128 + asked else ""
            cause = f"{by_launcher(asked)}{own}"
            weight, trace = FailureKind.ASKED, trace if own else ""
        return Failure(self.rank, self.node, cause, code, weight, trace, time_of_day(), shown)

    def write(self, failure: Failure) -> None:
        """Its traceback goes to the rank's log unless it has been shown; only when the others have been told."""
        if self.log and failure.traceback and not failure.shown:
            failure_files.write(self.log, failure.traceback.rstrip("\n") + "\n")
