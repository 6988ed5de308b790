"""How one rank failed, how likely that is the cause of the run's end, and the files about it.

The errors that a dead rank's peers see are secondary. Each file is written by a process of its own:
a file system that does not answer holds up that process alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from srunddp.supervisor import stacks
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.signals import signal_name
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.worker_process import wait_for_child
from srunddp.util.cgroup import oom_kills
from srunddp.util.console import write_stderr

# Bytes of a text once it is JSON, so that a message fits whatever letters it is in.
_LONGEST = 24000
_LONGEST_CAUSE = 500
# What a cause ends with, if the kernel has killed the process for that.
OUT_OF_MEMORY = ", out of memory"


class FailureKind(IntEnum):
    """The lower, the likelier this failure is the cause."""

    PRIMARY = 0
    ABORTED = 1  # SIGABRT: a C++ library gave up, for a reason of its own or for a lost peer
    NETWORK = 2  # Python's ConnectionError: of the script's own doing, or of a lost peer
    SECONDARY = 3  # an error of a collective or of the store, as a lost peer causes it
    STOPPED = 4  # no failure: all ranks have agreed to end
    SIGNALLED = 5  # after a signal from the launcher, which ends all ranks alike


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


def time_of_day() -> str:
    """This node's clock, in ISO 8601 and UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def of_exception(error: BaseException, trace: TracebackType | None) -> tuple[str, str, FailureKind]:
    """The cause, the traceback as Python prints it, and the weight of an exception that ended a
    script.
    """
    text = "".join(traceback.format_exception(type(error), error, trace))
    lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    # A message may have several lines, and notes below it; of a syntax error the message is the
    # last.
    cause = lines[-1 if isinstance(error, SyntaxError) else 0]
    return cause[:_LONGEST_CAUSE], shortened(text), _weight(error)


def of_exit(end: SystemExit, code: int) -> tuple[str, str, FailureKind]:
    """The same for ``sys.exit``; one in the handler of a collective's error is that error's
    echo.
    """
    if isinstance(end.code, str):
        said = f": {end.code}"[:_LONGEST_CAUSE]
    else:
        said = ""
    if end.__context__:
        weight = _weight(end.__context__)
    else:
        weight = FailureKind.PRIMARY
    return f"sys.exit({code if not said else 1}){said}", "", weight


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


@dataclass
class FailureRecorder:
    """Makes this rank's :class:`Failure`.

    Attributes:
        rank, node: of this rank; dump: of its worker's stacks.
        log: the file that gets its traceback, or None.
        limits: for how long a signal of the launcher's counts.
    """

    rank: int
    node: str
    dump: StackDump
    log: Path | None
    limits: Limits = DEFAULT_LIMITS
    _signal: int = 0  # the launcher's last one that ends a run
    _signalled_at: float = 0.0
    _oom_kills: int = field(default_factory=oom_kills)

    def ending_signal(self, now: float) -> int:
        """The number of the signal with which the launcher has asked this run to end; 0 for none,
        or long ago.
        """
        if now < self._signalled_at + self.limits.signal_counts_for:
            return self._signal
        return 0

    def note_ending_signal(self, number: int, now: float) -> None:
        """The launcher has sent a signal that ends a run."""
        self._signal = number
        self._signalled_at = now

    def print_stack(self, worker: int) -> None:
        """Print where this rank is, to standard error."""
        stack = stacks.main_stack(self.dump.request(worker))
        if stack:
            where = f"is in {stacks.top_frame(stack)}\n{stacks.format_stack(stack)}"
        else:
            where = "gives no stack now"
        write_stderr(f"srunddp: rank {self.rank} on {self.node} {where}\n")

    def of_status(self, status: int, now: float, *, dumped_core: bool = False) -> Failure:
        """Of a worker that ended without a word, by its exit code or minus its signal; with
        faulthandler's stacks.
        """
        trace = shortened(self.dump.read())
        if status >= 0:
            return self.of(
                f"the process ended with {status}, by os._exit or a library",
                status,
                now,
                trace=trace,
            )
        killed = status == -signal.SIGKILL and oom_kills() > self._oom_kills
        if killed:
            more = OUT_OF_MEMORY
        elif dumped_core:
            more = ", core dumped"
        else:
            more = ""
        if status == -signal.SIGABRT:
            weight = FailureKind.ABORTED
        else:
            weight = FailureKind.PRIMARY
        return self.of(
            f"killed by {signal_name(-status)}{more}", 128 - status, now, weight=weight, trace=trace
        )

    def of_message(self, message: Mapping[str, Any], now: float) -> Failure:
        """Of a worker that has told of its exception."""
        how = {
            "weight": FailureKind(message["weight"]),
            "trace": message["traceback"],
            "shown": message["shown"],
        }
        return self.of(message["cause"], message["exit_code"], now, **how)

    def of(
        self,
        cause: str,
        code: int,
        now: float,
        *,
        weight: FailureKind = FailureKind.PRIMARY,
        trace: str = "",
        shown: bool = False,
    ) -> Failure:
        """Of anything; after the launcher's signal that is the cause."""
        number = self.ending_signal(now)
        if number and weight is not FailureKind.STOPPED:
            if trace and code != 128 + number:
                own = f"; then {cause}"
            else:
                own = ""
            cause = f"{by_launcher(number)}{own}"
            weight = FailureKind.SIGNALLED
            if not own:
                trace = ""
        return Failure(self.rank, self.node, cause, code, weight, trace, time_of_day(), shown)

    def write(self, failure: Failure) -> None:
        """Its traceback goes to the rank's log unless it has been shown; only when the others have
        been told.
        """
        if self.log and failure.traceback and not failure.shown:
            start_writer(self.log, failure.traceback.rstrip("\n") + "\n")


FILE_EXISTS = 3  # the exit code of a writer where a new file was wanted
_writers: list[int] = []


def start_writer(path: Path, text: str, *, new: bool = False) -> int:
    """Start to append to a file, or to make a ``new`` one; returns the process that does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: what they may hold is not needed there
        pid = os.fork()
    if pid:
        _writers.append(pid)
        return pid
    code = 1
    try:
        # While it is held up, nobody is to wait for the end of a connection or of our output.
        os.closerange(0, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        opened = os.open(
            path, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_APPEND), 0o644
        )
        os.write(opened, text.encode(errors="backslashreplace"))
        code = 0
    except FileExistsError:
        code = FILE_EXISTS
    finally:
        os._exit(code)


def finish_writers(within: float) -> set[int]:
    """Wait for all that were started, for so many seconds at most.

    Returns:
        Those that have not ended, and need not be waited for.
    """
    end = time.monotonic() + within
    return {pid for pid in _writers if wait_for_child(pid, end - time.monotonic()) is None}


def rotate_previous(folder: Path) -> None:
    """Rank 0, before its run can fail: rename the ``failure.json`` of an earlier attempt in the
    same folder.
    """
    for number in itertools.count(1):
        earlier = folder / f"failure.{number}.json"
        if not earlier.exists():
            with contextlib.suppress(OSError):
                (folder / "failure.json").rename(earlier)
            return
