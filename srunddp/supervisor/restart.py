"""Whether a run restarts after a failure. Rank 0 decides, from the failure and the earlier
starts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from srunddp.errors import SrunddpError
from srunddp.supervisor import signals
from srunddp.supervisor.clock import Clock
from srunddp.supervisor.failure import FailureCategory
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.root_cause import Ending, RootCause

# Exit codes of scripts that were started wrongly (argparse's 2, sysexits' EX_CONFIG): another start
# would end in the same way.
_WRONG_USE = (2, 78)
_ASKS = (*signals.ENDING, *signals.URGENT)  # signals by which a user or launcher asks for an end


@dataclass(frozen=True)
class Starts:
    """What is known of the starts before this one.

    Attributes:
        count: How many starts there were.
        steps: Whether one of them counted steps.
        out_of_memory: Whether one of them was killed for lack of memory.
        cause: The cause of the last start's failure.
        node: The node of the last start's failure; empty if nothing speaks against a node.
        progressed: Whether the last start made progress: a step, or enough time if none are
            counted.
    """

    count: int = 0
    steps: bool = False
    out_of_memory: bool = False
    cause: str = ""
    node: str = ""
    progressed: bool = True


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
        """Take what the decision needs. Called when a start begins: its length counts from then.

        Args:
            most: How many restarts a run may have.
            history: What is known of the starts before this one.
            publish: Begins to listen for the next rendezvous, and returns the text by which the
                ranks find it.
            has_steps: Returns whether a worker has made a step in this start.
            clock: The clock that measures how long the start takes.
            limits: How long a start must take to count as progress if no steps are counted.
        """
        self.history = history
        self._most = most
        self._publish = publish
        self._has_steps = has_steps
        self._clock = clock
        self._limits = limits
        self._began = clock()

    def decide(
        self, cause: RootCause, obstacle: str, *, moves: bool = False
    ) -> tuple[str | None, str]:
        """Decide whether the run restarts, and if so, begin to listen for the ranks.

        Args:
            cause: Why this start has ended.
            obstacle: Why no restart is possible, if rank 0 knows a reason; else empty.
            moves: Whether ranks move from a node to a spare one, so that a fault of that node may
                be gone.

        Returns:
            The text by which the ranks find the next rendezvous, None if the run ends; and a line
            for the user, empty for none.
        """
        # All ranks have agreed to stop, or the launcher has asked for it.
        if cause.ending is Ending.STOPPED:
            return None, ""
        last = self.history
        steps = last.steps or self._has_steps()
        is_long = self._clock() - self._began >= self._limits.progress_after
        progressed = self._has_steps() or (not steps and is_long)
        memory = last.out_of_memory or cause.category is FailureCategory.OUT_OF_MEMORY
        if why := obstacle or self._refusal(cause, may_go_better=progressed or moves):
            return None, f"not restarted: {why}"
        try:
            published = self._publish()
        except SrunddpError as error:  # no port is free
            return None, f"not restarted: {error}"
        self.history = Starts(last.count + 1, steps, memory, cause.cause, cause.suspect, progressed)
        return published, f"restart {self.history.count} of {self._most}: all ranks start anew"

    def _refusal(self, cause: RootCause, *, may_go_better: bool) -> str:
        """Return why no other start is worth it; empty if one is.

        Args:
            cause: Why this start has ended.
            may_go_better: Whether this start has made progress, or ranks move to another node. Then
                only the number of restarts and a signal that asks for an end speak against another
                start.
        """
        last = self.history
        if last.count >= self._most:
            return f"this was restart {self._most} of {self._most}"
        if cause.exit_code - 128 in _ASKS:
            return f"{signals.signal_name(cause.exit_code - 128)} asks for an end"
        if may_go_better:
            return ""
        is_wrong = cause.category is FailureCategory.WRONG_SCRIPT
        if is_wrong or cause.exit_code in _WRONG_USE:
            return "the script would fail again"
        are_known = last.node and cause.suspect
        if are_known and last.cause == cause.cause and last.node != cause.suspect:
            return f"the same cause on {last.node} and {cause.suspect}, without a step in between"
        if last.progressed:
            return ""
        return "two starts in a row without a step"
