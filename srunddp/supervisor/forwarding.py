"""Which of the signals that a supervisor gets are passed on to its worker: those that the worker
has not got itself. :mod:`srunddp.supervisor.sentinel` shows which it has got.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import field

from srunddp.supervisor import signals
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.sentinel import Mark, Sentinel
from srunddp.supervisor.worker_process import WorkerProcess
from srunddp.util.quick_dataclass import dataclass

# Of each of these signals the kernel discards what is pending when the other one comes.
_OPPOSITE: dict[int, int] = {signal.SIGTSTP: signal.SIGCONT, signal.SIGCONT: signal.SIGTSTP}


@dataclass
class _Question:
    """Whether a signal that the supervisor has got has reached the worker too.

    Attributes:
        number: The signal.
        first, last: When the supervisor has got the first and the last one that count as this one,
            by the system's monotonic clock, as the sentinel's marks.
        ask_at: When to ask the sentinel, by the supervisor's clock. A launcher that signals one
            process after the other is through by then.
        is_passed_on: Whether the worker has been given the signal without an answer. The question
            is asked all the same, so that what the sentinel has got is not taken for the next
            signal of this number.
        of_rank: Whether a process of a worker has sent it.
        is_asked: Whether the sentinel has been asked. A signal that comes later is another one.
    """

    number: int
    first: float
    last: float
    ask_at: float
    is_passed_on: bool
    of_rank: bool
    is_asked: bool = False


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
        monotonic: The system's monotonic clock.
    """

    sentinel: Sentinel | None
    limits: Limits = DEFAULT_LIMITS
    monotonic: Callable[[], float] = time.monotonic
    _questions: list[_Question] = field(default_factory=list)
    # What the sentinel has got, and no question has been about so far.
    _marks: list[Mark] = field(default_factory=list)
    _asked_at: float | None = None  # None if no answer is due

    def add(self, number: int, now: float, *, is_passed_on: bool, of_rank: bool) -> None:
        """Note a signal that the supervisor has got.

        Args:
            number: The signal.
            now: The time.
            is_passed_on: Whether the worker has been given it already.
            of_rank: Whether a process of a worker has sent it.
        """
        at = self.monotonic()
        opposite = _OPPOSITE.get(number)
        # As the kernel does. A worker that was continued must not be stopped afterwards by an
        # earlier signal.
        self._questions = [each for each in self._questions if each.number != opposite]
        for question in self._questions:
            if question.number == number and not question.is_asked:
                question.last = at
                question.is_passed_on = question.is_passed_on or is_passed_on
                question.of_rank = question.of_rank and of_rank
                return
        ask_at = now + self.limits.signal_settles
        self._questions.append(_Question(number, at, at, ask_at, is_passed_on, of_rank))

    def go_on(self, now: float) -> None:
        """Note that this process was stopped by SIGTSTP and goes on, before its SIGCONT is read.

        The worker must not be stopped any more by the signal that came before the SIGCONT.
        """
        self._questions = [each for each in self._questions if each.number != signal.SIGTSTP]
        if self._asked_at is not None:
            self._asked_at = now

    def on_answer(self) -> list[MissedSignal]:
        """Read what the sentinel says, and return the signals that the worker has not got."""
        if self.sentinel is None:
            return []
        answer = self.sentinel.answer()
        if answer is None or self._asked_at is None:
            return self._without_sentinel()
        self._asked_at = None
        self._marks += answer
        return self._settle([each for each in self._questions if each.is_asked])

    def tick(self, now: float) -> list[MissedSignal]:
        """Ask the sentinel if that is due, and return the signals that the worker has not got."""
        if self._asked_at is not None:
            if now < self._asked_at + self.limits.sentinel_answers_within:
                return []
            # This process may be late itself: it was stopped, or got no processor time.
            if self.sentinel is not None and self.sentinel.has_answered():
                return self.on_answer()
            return self._without_sentinel()
        due = [each for each in self._questions if each.ask_at <= now]
        if not due:
            return []
        if self.sentinel is None or not self.sentinel.ask():
            return self._without_sentinel()
        self._asked_at = now
        for each in due:
            each.is_asked = True
        return []

    def next_tick(self, now: float) -> float | None:
        """Return in how many seconds to call :meth:`tick`; None for not at all."""
        if self._asked_at is not None:
            return max(0.0, self._asked_at + self.limits.sentinel_answers_within - now)
        if not self._questions:
            return None
        return max(0.0, min(each.ask_at for each in self._questions) - now)

    def _without_sentinel(self) -> list[MissedSignal]:
        """Do without the sentinel from now on. A late answer would be taken for that to another
        question.
        """
        self.sentinel = None
        self._asked_at = None
        self._marks.clear()
        return self._settle(self._questions)

    def _settle(self, questions: Iterable[_Question]) -> list[MissedSignal]:
        missed = []
        for question in tuple(questions):
            self._questions.remove(question)
            has_reached = self._take_marks(question)
            if not question.is_passed_on and not has_reached:
                missed.append(MissedSignal(question.number, question.of_rank))
        return missed

    def _take_marks(self, question: _Question) -> bool:
        """Take the marks that belong to a question, and return whether there are any.

        The sentinel and the supervisor note a signal when they get processor time, so either may be
        late. Later marks belong to the next question, unless there are no others.
        """
        self._marks = [
            each for each in self._marks if each.at > question.first - self.limits.marks_count_for
        ]
        marks = [each for each in self._marks if each.number == question.number]
        latest = question.last + self.limits.signal_settles / 2
        taken = [each for each in marks if each.at <= latest] or marks[:1]
        for each in taken:
            self._marks.remove(each)
        return bool(taken)


@dataclass
class HeldSignals:
    """Signals that came before the script could set a handler, and would have ended it: while the
    ranks met or torch was imported. The worker gets each once it handles, ignores or blocks the
    signal.

    Attributes:
        process: The worker.
        limits: How often to look.
        worker_notes: Whether the worker itself has handlers at the moment, which note the signals;
            they are not the script's. The worker says so before it sets them, and after it has
            removed them.
    """

    process: WorkerProcess
    limits: Limits = DEFAULT_LIMITS
    worker_notes: bool = True
    _numbers: list[int] = field(default_factory=list)
    _look_after: float = 0.0

    def add(self, numbers: Iterable[int]) -> None:
        """Hold these signals. The worker has removed its handlers."""
        self.worker_notes = False
        self._numbers += numbers
        self._look_after = self.limits.held_signal_looks

    def tick(self, read_pipe: Callable[[], None]) -> float | None:
        """Send what the worker can take now, and return in how many seconds to call this again;
        None for not at all.

        Args:
            read_pipe: Reads what the worker has said.
        """
        if not self._numbers or self.process.ended:
            return None
        able = [each for each in self._numbers if signals.is_safe_for(self.process.pid, each)]
        if able:
            # If the handler is the worker's own, the worker has said so before it set it.
            read_pipe()
        if able and not self.worker_notes:
            for number in able:
                self._numbers.remove(number)
                self.process.send(number)
        wait = self._look_after
        self._look_after = min(2 * wait, self.limits.held_signal_looks_at_least)
        return wait if self._numbers else None
