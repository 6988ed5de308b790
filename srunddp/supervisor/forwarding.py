"""Which of the signals that a supervisor gets are passed on to its worker: those that the worker
has not got itself. :mod:`srunddp.supervisor.sentinel` shows which it has got.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from srunddp.supervisor import signals
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.sentinel import Sentinel
from srunddp.supervisor.worker_process import WorkerProcess


@dataclass
class _Question:
    """Whether a signal that the supervisor has got has reached the worker too.

    Attributes:
        ask_at: When to ask the sentinel. A launcher that signals one process after the other is
            through by then.
        is_passed_on: Whether the worker has been given the signal without an answer. The question
            is asked all the same, so that what the sentinel has got is not taken for the next
            signal of this number.
        of_rank: Whether a process of a worker has sent it.
    """

    ask_at: float
    is_passed_on: bool
    of_rank: bool


@dataclass(frozen=True)
class MissedSignal:
    """A signal that the supervisor has got and the worker has not.

    Attributes:
        number: The signal.
        of_rank: Whether a process of a worker has sent it, to the supervisor alone.
    """

    number: int
    of_rank: bool


@dataclass
class SignalForwarding:
    """Finds out which signals the worker has not got.

    Signals of one number that come within :attr:`Limits.signal_settles` count as one, as the kernel
    also keeps one of a number for a process that has not handled it yet.

    Attributes:
        sentinel: The sentinel; None if it has ended. Then each signal counts as missed: it is
            better for the worker to get one twice than not at all, as that may be the last chance
            of a checkpoint.
        limits: How long the answers may take.
    """

    sentinel: Sentinel | None
    limits: Limits = DEFAULT_LIMITS
    _questions: dict[int, _Question] = field(default_factory=dict)
    # What the sentinel has got, and no question has been about so far.
    _reached: set[int] = field(default_factory=set)
    _asked_at: float | None = None  # None if no answer is due

    def add(self, number: int, now: float, *, is_passed_on: bool, of_rank: bool) -> None:
        """Note a signal that the supervisor has got.

        Args:
            number: The signal.
            now: The time.
            is_passed_on: Whether the worker has been given it already.
            of_rank: Whether a process of a worker has sent it.
        """
        question = self._questions.get(number)
        if question is None:
            ask_at = now + self.limits.signal_settles
            self._questions[number] = _Question(ask_at, is_passed_on, of_rank)
            return
        question.is_passed_on = question.is_passed_on or is_passed_on
        question.of_rank = question.of_rank and of_rank

    def on_answer(self) -> list[MissedSignal]:
        """Read what the sentinel says, and return the signals that the worker has not got."""
        if self.sentinel is None:
            return []
        answer = self.sentinel.answer()
        if answer is None or self._asked_at is None:
            return self._without_sentinel()
        self._reached.update(answer)
        settled = self._due(self._asked_at)
        self._asked_at = None
        return self._settle(settled)

    def tick(self, now: float) -> list[MissedSignal]:
        """Ask the sentinel if that is due, and return the signals that the worker has not got."""
        if not self._due(now):
            return []
        if self.sentinel is None:
            return self._without_sentinel()
        if self._asked_at is None:
            self._asked_at = now
            if not self.sentinel.ask():
                return self._without_sentinel()
        elif now >= self._asked_at + self.limits.sentinel_answers_within:
            return self._without_sentinel()
        return []

    def next_tick(self, now: float) -> float | None:
        """Return in how many seconds to call :meth:`tick`; None for not at all."""
        if self._asked_at is not None:
            return max(0.0, self._asked_at + self.limits.sentinel_answers_within - now)
        if not self._questions:
            return None
        return max(0.0, min(each.ask_at for each in self._questions.values()) - now)

    def _due(self, now: float) -> list[int]:
        return [number for number, each in self._questions.items() if each.ask_at <= now]

    def _without_sentinel(self) -> list[MissedSignal]:
        """Do without the sentinel from now on. A late answer would be taken for that to another
        question.
        """
        self.sentinel = None
        self._asked_at = None
        self._reached.clear()
        return self._settle(list(self._questions))

    def _settle(self, numbers: Iterable[int]) -> list[MissedSignal]:
        missed = []
        for number in numbers:
            question = self._questions.pop(number)
            has_reached = number in self._reached
            self._reached.discard(number)
            if not question.is_passed_on and not has_reached:
                missed.append(MissedSignal(number, question.of_rank))
        return missed


@dataclass
class HeldSignals:
    """Signals that came while torch was imported or the ranks met, before the script could set a
    handler. The worker gets each once it handles or ignores the signal, which would end the script
    otherwise.

    A worker that blocks a signal has to wait: it may be importing torch, and may unblock the signal
    before it arrives.

    Attributes:
        process: The worker.
        limits: How often to look.
    """

    process: WorkerProcess
    limits: Limits = DEFAULT_LIMITS
    _numbers: list[int] = field(default_factory=list)

    def add(self, numbers: Iterable[int]) -> None:
        """Hold these signals."""
        self._numbers += numbers

    def tick(self) -> float | None:
        """Send what the worker can take now, and return in how many seconds to call this again;
        None for not at all.
        """
        for number in tuple(self._numbers):
            if signals.handles_or_ignores(self.process.pid, number):
                self._numbers.remove(number)
                self.process.send(number)
        return self.limits.held_signal_looks if self._numbers and not self.process.ended else None
