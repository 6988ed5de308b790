"""The failure of this rank, however its supervisor learns of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

from srunddp.supervisor import stacks
from srunddp.supervisor.failure import (
    Failure,
    FailureCategory,
    FailureKind,
    by_launcher,
    shortened,
    time_of_day,
)
from srunddp.supervisor.failure_files import start_writer
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.signals import signal_name
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.worker_messages import ScriptHasFailed
from srunddp.util.cgroup import oom_kills
from srunddp.util.console import write_stderr


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
                # An end with 0 is a failure where the script has not begun, and no run ends with 0
                # for a failure.
                status or 1,
                now,
                trace=trace,
            )
        killed = status == -signal.SIGKILL and oom_kills() > self._oom_kills
        category = FailureCategory.OTHER
        if killed:
            category = FailureCategory.OUT_OF_MEMORY
            more = ", out of memory"
        elif dumped_core:
            more = ", core dumped"
        else:
            more = ""
        if status == -signal.SIGABRT:
            weight = FailureKind.ABORTED
        else:
            weight = FailureKind.PRIMARY
        return self.of(
            f"killed by {signal_name(-status)}{more}",
            128 - status,
            now,
            weight=weight,
            trace=trace,
            category=category,
        )

    def of_message(self, message: ScriptHasFailed, now: float) -> Failure:
        """Of a worker that has told of its exception."""
        return self.of(
            message.cause,
            message.exit_code,
            now,
            weight=FailureKind(message.weight),
            trace=message.traceback,
            shown=message.shown,
            category=FailureCategory(message.category),
        )

    def of(
        self,
        cause: str,
        code: int,
        now: float,
        *,
        weight: FailureKind = FailureKind.PRIMARY,
        trace: str = "",
        shown: bool = False,
        category: FailureCategory = FailureCategory.OTHER,
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
        return Failure(
            rank=self.rank,
            node=self.node,
            cause=cause,
            exit_code=code,
            weight=weight,
            traceback=trace,
            time=time_of_day(),
            shown=shown,
            category=category,
        )

    def write(self, failure: Failure) -> None:
        """Its traceback goes to the rank's log unless it has been shown; only when the others have
        been told.
        """
        if self.log and failure.traceback and not failure.shown:
            start_writer(self.log, failure.traceback.rstrip("\n") + "\n")
