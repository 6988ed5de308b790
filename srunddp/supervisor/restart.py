"""Decides on rank 0 whether a run restarts after a failure, from the failure and the earlier
starts.
"""

import time
from collections.abc import Callable

from srunddp.errors import SrunddpError
from srunddp.supervisor.clock import Clock
from srunddp.supervisor.failure import FailureCategory
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.root_cause import Ending, RootCause
from srunddp.util.quick_dataclass import dataclass

# Exit codes of scripts that were called wrongly (argparse's 2, sysexits' EX_CONFIG): another start
# would end in the same way.
_WRONG_USE = (2, 78)


@dataclass(frozen=True)
class Starts:
    """What is known of the starts before this one.

    Attributes:
        count: How many starts there were.
        steps: Whether a rank has made a step in one of them.
        out_of_memory: Whether one of them ended because a worker was killed for lack of memory.
        cause: The cause of the last start's failure; empty before the first failure.
        node: The node of the last start's failure; empty if no node is suspected.
        progressed: Whether the last start made progress: a step, or enough time if no rank has
            ever made a step.
        failed_import: The class and module of the last start's failure, if it was an import error;
            else empty.
        moved: Whether ranks have moved to another node after the last start.
        first_step_after: The longest time in seconds that a start took to its first step; 0 if none
            made one.
    """

    count: int = 0
    steps: bool = False
    out_of_memory: bool = False
    cause: str = ""
    node: str = ""
    progressed: bool = True
    failed_import: str = ""
    moved: bool = False
    first_step_after: float = 0.0

    @property
    def passed_imports(self) -> bool:
        """Whether the script's imports have succeeded in an earlier start, as far as rank 0 knows.

        A move of ranks shows this too: ranks move after a failure that is not an import error, or
        after an import error in a start that followed such a failure.
        """
        return self.steps or self.moved or (self.count > 0 and self.progressed)

    def import_fails_elsewhere(self, cause: RootCause) -> bool:
        """Return whether the last start failed by the same import error on another node.

        Args:
            cause: Why this start has ended.
        """
        is_same = bool(cause.failed_import) and cause.failed_import == self.failed_import
        return is_same and cause.node != self.node

    def is_of_node(self, cause: RootCause) -> bool:
        """Return whether the cause is an import error for which its node is likely at fault: the
        imports have succeeded in an earlier start, and the same import has not failed on another
        node in the last start.
        """
        if cause.category is not FailureCategory.IMPORT_FAILED or not self.passed_imports:
            return False
        return not self.import_fails_elsewhere(cause)


@dataclass(frozen=True)
class StartSteps:
    """The steps of a start, as far as rank 0 has seen them.

    Attributes:
        any: Whether any rank has made a step.
        first_after: How many seconds after the rendezvous rank 0 saw the first step; None if rank 0
            has not seen it happen, but only been told of it at the end.
    """

    any: bool = False
    first_after: float | None = None


NO_STEPS_SEEN = StartSteps()


def first_step_limit(history: Starts, stall_timeout: float, limits: Limits) -> float:
    """Return how many seconds a start may take to its first step; 0 for no limit.

    A hang before the first step cannot be told from data being staged or a model being compiled. So
    there is a limit only if an earlier start has made steps, and a generous one.

    Args:
        history: What is known of the earlier starts.
        stall_timeout: Seconds without a step that count as a stall; 0 for no limit.
        limits: The factors by which ``stall_timeout`` and the earlier time are multiplied.
    """
    if not stall_timeout or not history.steps:
        return 0.0
    return (
        limits.first_step_stall_timeouts * stall_timeout
        + limits.first_step_times * history.first_step_after
    )


class RestartPolicy:
    """Decides on rank 0 whether a restart follows a failure.

    Attributes:
        history: What is known of the starts so far. This start is included once it has failed and
            another follows.
    """

    def __init__(
        self,
        most: int,
        history: Starts,
        publish: Callable[[], str],
        has_steps: Callable[[], bool],
        clock: Clock = time.monotonic,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Keep what the decision needs. Create this object when a start begins, because the length
        of the start counts from then.

        Args:
            most: How many restarts a run may have.
            history: What is known of the starts before this one.
            publish: Begins to listen for the next rendezvous, and returns the text by which the
                ranks find it.
            has_steps: Returns whether this rank's worker has made a step in this start.
            clock: The clock that measures how long the start takes.
            limits: How long a start must take to count as progress if no rank has ever made a step.
        """
        self.history = history
        self._most = most
        self._publish = publish
        self._has_steps = has_steps
        self._clock = clock
        self._limits = limits
        self._began = clock()

    def decide(
        self,
        cause: RootCause,
        obstacle: str,
        *,
        moves: bool = False,
        steps_seen: StartSteps = NO_STEPS_SEEN,
    ) -> tuple[str | None, str]:
        """Decide whether the run restarts, and if so, begin to listen for the ranks.

        Args:
            cause: Why this start has ended.
            obstacle: Why no restart is possible, if rank 0 knows a reason; else empty.
            moves: Whether ranks move from a node to a spare one, so that a fault of that node may
                be gone.
            steps_seen: What is known of the steps of all ranks in this start.

        Returns:
            The text by which the ranks find the next rendezvous, None if the run ends; and a line
            for the user, empty for none.
        """
        # Do not restart if all ranks have agreed to stop, or the launcher has asked for the end.
        if cause.ending is Ending.STOPPED:
            return None, ""
        last = self.history
        has_steps = steps_seen.any or self._has_steps()
        steps = last.steps or has_steps
        duration = self._clock() - self._began
        progressed = has_steps or (not steps and duration >= self._limits.progress_after)
        memory = last.out_of_memory or cause.category is FailureCategory.OUT_OF_MEMORY
        if why := obstacle or self._refusal(cause, progressed=progressed, moves=moves):
            return None, f"not restarted: {why}"
        try:
            published = self._publish()
        except SrunddpError as error:  # no port is free
            return None, f"not restarted: {error}"
        first_step_after = last.first_step_after
        if has_steps:
            took = steps_seen.first_after
            if took is None:  # a rank has made its first step and failed between two pings
                took = duration
            first_step_after = max(first_step_after, took)
        self.history = Starts(
            count=last.count + 1,
            steps=steps,
            out_of_memory=memory,
            cause=cause.cause,
            node=cause.suspect,
            progressed=progressed,
            failed_import=cause.failed_import,
            moved=moves,
            first_step_after=first_step_after,
        )
        return published, f"restart {self.history.count} of {self._most}: all ranks start anew"

    def forbids(self, cause: RootCause) -> str:
        """Return why no other start may follow, regardless of the progress of this one and of the
        nodes to which ranks could move; empty if another start may follow.

        Args:
            cause: Why this start has ended.
        """
        if self.history.count >= self._most:
            return f"this was restart {self._most} of {self._most}"
        if cause.category is FailureCategory.FINAL:
            return "after this error the run must not go on"
        # Refuse even if this start has made progress: the ranks that made steps may have done so
        # without the rank whose import failed.
        if self.history.import_fails_elsewhere(cause):
            return f"the same import error on {self.history.node} and {cause.node}"
        return ""

    def _refusal(self, cause: RootCause, *, progressed: bool, moves: bool) -> str:
        """Return why another start is not worthwhile; empty if it is.

        Args:
            cause: Why this start has ended.
            progressed: Whether this start has made progress. If so, only :meth:`forbids` can rule
                out another start.
            moves: Whether ranks move to another node. If so, too, only :meth:`forbids` can rule out
                another start.
        """
        last = self.history
        if why := self.forbids(cause):
            return why
        if progressed or moves:
            return ""
        is_wrong = cause.category is FailureCategory.WRONG_SCRIPT
        if cause.category is FailureCategory.IMPORT_FAILED:
            is_wrong = not last.passed_imports
        if is_wrong or cause.exit_code in _WRONG_USE:
            return "the script would fail again"
        are_known = last.node and cause.suspect
        if are_known and last.cause == cause.cause and last.node != cause.suspect:
            return f"the same cause on {last.node} and {cause.suspect}, without a step in between"
        if last.progressed:
            return ""
        return "two starts in a row without a step"
