"""Whether a run starts anew after a failure: rank 0 decides, by what the starts before have come
to.
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

# Exit codes that end a script before its first step, and would again.
_WRONG_USE = (2, 78)
_ASKS = (*signals.ENDING, *signals.URGENT)  # whoever sends one wants an end


@dataclass(frozen=True)
class Starts:
    """What the starts before this one have come to.

    Attributes:
        count: how many there were; steps, out_of_memory: whether one of them counted steps, or was
            killed for memory.
        cause, node: of the last one's failure; progressed: whether it made a step.
    """

    count: int = 0
    steps: bool = False
    out_of_memory: bool = False
    cause: str = ""
    node: str = ""
    progressed: bool = True


class RestartPolicy:
    """Decides on rank 0 what a failure means.

    Attributes:
        history: with this start in it, once it has failed and another follows.
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
        """Begin to decide for this start.

        Args:
            most: Restarts that a run may have.
            history: Of the starts before this one.
            publish: Listens for the next rendezvous, and returns what the ranks need to find it.
            has_steps: Whether a worker has made a step in this start.
            clock: By which the start's length counts.
            limits: From how long on a start counts as progress where nothing counts steps.
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
        """Decide whether all ranks start anew, and listen for them if they do.

        Args:
            cause: Why this start has ended.
            obstacle: Why no start can follow, as rank 0 knows it; empty where one can.
            moves: The ranks of a node go to a spare one, so that what was wrong with their node may
                not be there.

        Returns:
            What rank 0 has published, None where the run ends; and a line for the user, empty for
            none.
        """
        if cause.ending is Ending.STOPPED:  # all have agreed to, or the launcher has asked for it
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
        self.history = Starts(last.count + 1, steps, memory, cause.cause, cause.node, progressed)
        return published, f"restart {self.history.count} of {self._most}: all ranks start anew"

    def _refusal(self, cause: RootCause, *, may_go_better: bool) -> str:
        """Return why another start would be of no use; empty where it may be.

        Args:
            cause: Why this start has ended.
            may_go_better: This start has made a step, or ranks move to another node. Then only what
                counts for any start refuses.
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
        if last.count and last.cause == cause.cause and last.node != cause.node:
            return f"the same cause on {last.node} and {cause.node}, without a step in between"
        if last.progressed:
            return ""
        return "two starts in a row without a step"
