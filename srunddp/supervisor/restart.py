"""Whether a run starts anew after a failure: rank 0 decides, by what the generations before have come to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from srunddp.supervisor import signals
from srunddp.supervisor.root_cause import RootCause

_LONG = 60.0  # seconds; where nothing counts steps, a generation that took as long has made some
# What ends a script before its first step, and would again.
_WRONG_SCRIPT = ("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError")
_WRONG_USE = (2, 78)


@dataclass(frozen=True)
class Generation:
    """What one start of a run has come to.

    Attributes:
        cause, node: of the failure that ended it.
        steps: whether a step was counted; progressed: whether one was made.
    """

    cause: str
    node: str
    steps: bool
    progressed: bool


class RestartPolicy:
    """Decides on rank 0 what a failure means.

    Attributes:
        history: the generations before this one.
    """

    def __init__(
        self, most: int, history: Sequence[Generation], publish: Callable[[], str], has_steps: Callable[[], bool]
    ) -> None:
        """``most``: restarts of a run; ``publish`` listens for the next rendezvous, and returns where, for all."""
        self.history = list(history)
        self._most, self._publish, self._has_steps, self._began = most, publish, has_steps, monotonic()

    def decide(self, cause: RootCause, obstacle: str) -> tuple[str | None, str]:
        """Whether all ranks start anew, unless an ``obstacle`` is named.

        Returns:
            What rank 0 has published, None where the run ends; and a line for the user, empty for none.
        """
        if cause.how == "ended":  # all have agreed to, or the launcher has asked for it
            return None, ""
        steps = self._has_steps()
        counted = steps or any(each.steps for each in self.history)
        progressed = steps or (not counted and monotonic() - self._began >= _LONG)
        generation = Generation(cause.cause, cause.node, steps, progressed)
        if why := obstacle or self._refusal(generation, cause.exit_code):
            return None, f"not restarted: {why}"
        self.history.append(generation)
        return self._publish(), f"restart {len(self.history)} of {self._most}: all ranks start anew"

    def _refusal(self, generation: Generation, exit_code: int) -> str:
        if len(self.history) >= self._most:
            return f"this was restart {self._most} of {self._most}"
        if exit_code - 128 in signals.ENDING:  # whoever sends such a signal wants an end
            return f"{signals.signal_name(exit_code - 128)} asks for an end"
        if generation.progressed:
            return ""
        if generation.cause.startswith(_WRONG_SCRIPT) or exit_code in _WRONG_USE:
            return "the script would fail again"
        if not self.history:
            return ""
        last = self.history[-1]
        if last.cause == generation.cause and last.node != generation.node:
            return f"the same cause on {last.node} and {generation.node}, without a step in between"
        return "" if last.progressed else "two starts in a row without a step"
