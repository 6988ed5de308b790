"""Makes the failure of this rank from what its supervisor learns: a message of the worker, the
worker's exit code, a signal, or a time limit that has passed.
"""

from __future__ import annotations

import signal
from dataclasses import field
from pathlib import Path

from srunddp.supervisor.failure import (
    Failure,
    FailureCategory,
    FailureKind,
    by_launcher,
    shortened,
    time_of_day,
)
from srunddp.supervisor.failure_files import has_ended, start_writer
from srunddp.supervisor.limits import DEFAULT_LIMITS, SIGNAL_GRACE, Limits
from srunddp.supervisor.signals import signal_name
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.worker_messages import ScriptHasFailed
from srunddp.util import python_stack
from srunddp.util.cgroup import oom_kills
from srunddp.util.console import write_amid_output
from srunddp.util.quick_dataclass import dataclass


@dataclass
class FailureRecorder:
    """Makes this rank's :class:`Failure`.

    Attributes:
        rank: This rank.
        node: This rank's node.
        dump: The memory into which the worker writes its stacks.
        log: The log that gets the traceback; None to write none.
        limits: How long, at least, a signal of the launcher counts as the cause of a failure.
        signal_grace: How long the signal counts if this time is longer than that of ``limits``,
            because a rank that saves may end that late.
    """

    rank: int
    node: str
    dump: StackDump
    log: Path | None
    limits: Limits = DEFAULT_LIMITS
    signal_grace: float = SIGNAL_GRACE
    _signal: int = 0  # the launcher's last signal that ends a run; 0 for none
    _signalled_at: float = 0.0
    _stack_writer: int | None = None  # the process that writes a stack to the log
    _oom_kills: int = field(default_factory=oom_kills)

    def ending_signal(self, now: float) -> int:
        """Return the number of the signal by which the launcher has asked this run to end; 0 if it
        has not, or if that was too long ago to be a cause.
        """
        counts_for = max(self.limits.signal_counts_for, self.signal_grace)
        if now < self._signalled_at + counts_for:
            return self._signal
        return 0

    def note_ending_signal(self, number: int, now: float) -> None:
        """Note that the launcher has sent a signal that ends a run."""
        self._signal = number
        self._signalled_at = now

    def print_stack(self, worker: int) -> None:
        """Print the stack of the worker's main thread to standard error, and write it to the
        rank's log.

        Args:
            worker: The worker's process id.
        """
        stack = python_stack.main_stack(self.dump.request(worker))
        if stack:
            where = f"is in {python_stack.top_frame(stack)}\n{python_stack.format_stack(stack)}"
        else:
            where = "gives no stack now"
        text = f"srunddp: rank {self.rank} on {self.node} {where}\n"
        write_amid_output(text)
        # Start no second writer while one runs: a user may ask for the stack each minute, and if
        # the file system does not answer, the writers would pile up.
        if self._stack_writer and not has_ended(self._stack_writer):
            return
        self._stack_writer = None
        if self.log:
            self._stack_writer = start_writer(self.log, f"\n{text}")

    def of_status(self, status: int, now: float, *, dumped_core: bool = False) -> Failure:
        """Return the failure of a worker that ended without a message.

        What faulthandler has written at the crash, if anything, becomes the traceback.

        Args:
            status: The worker's exit code, or minus the number of the signal that ended it.
            now: The time.
            dumped_core: Whether the kernel wrote a core file.
        """
        trace = shortened(self.dump.read())
        if status >= 0:
            return self.of(
                f"the process ended with {status}, by os._exit or a library",
                # An end with 0 counts as a failure if the script had not begun. Its exit code must
                # not be 0 all the same.
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
        """Return the failure that the worker itself has reported."""
        return self.of(
            message.cause,
            message.exit_code,
            now,
            weight=FailureKind(message.weight),
            trace=message.traceback,
            shown=message.shown,
            category=FailureCategory(message.category),
            failed_import=message.failed_import,
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
        failed_import: str = "",
    ) -> Failure:
        """Return the failure for a cause. If a signal of the launcher still counts, that signal
        becomes the cause, unless the ranks have agreed to stop. The given cause is then appended if
        it has a traceback and the exit code is not that of the signal.

        Args:
            cause: The reason in one line.
            code: The exit code.
            now: The time.
            weight: How likely the failure is the root cause.
            trace: The traceback, or empty.
            shown: Whether the user has already seen the error.
            category: What the failure means for another start.
            failed_import: For an import error, its class and the module, see :class:`ScriptError`;
                otherwise empty.
        """
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
            failed_import=failed_import,
        )

    def write(self, failure: Failure) -> None:
        """Start to write the traceback to the rank's log, unless the user has already seen it.

        Call this only after the failure monitor has been told, because writing requires a fork.
        """
        if self.log and failure.traceback and not failure.shown:
            start_writer(self.log, failure.traceback.rstrip("\n") + "\n")
