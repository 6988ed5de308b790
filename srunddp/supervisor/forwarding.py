"""Decides which of the signals that a supervisor gets are passed on to its worker: those that the
worker has not got itself. :mod:`srunddp.supervisor.sentinel` shows which signals the worker has
got.
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

# When one of these two signals comes, the kernel discards the other one if it is pending.
_OPPOSITE: dict[int, int] = {signal.SIGTSTP: signal.SIGCONT, signal.SIGCONT: signal.SIGTSTP}


@dataclass
class _Question:
    """The question whether a signal that the supervisor has got has reached the worker too.

    Attributes:
        number: The signal.
        first, last: When the supervisor got the first and the last of the signals that this
            question counts as one, by the system's monotonic clock. The sentinel's marks use that
            clock too.
        ask_at: When to ask the sentinel, by the supervisor's clock. By then a launcher that signals
            one process after the other has signalled all of them.
        is_passed_on: Whether the signal was sent to the worker without waiting for an answer. The
            sentinel is asked all the same, so that its mark of this signal is not taken for the
            mark of a later signal with the same number.
        of_rank: Whether the worker, or another process of a rank on this node, has sent it.
        is_asked: Whether the sentinel has been asked. A signal that comes later makes a new
            question.
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
        of_rank: Whether the worker, or another process of a rank on this node, has sent it. Such a
            signal went to the supervisor alone.
    """

    number: int
    of_rank: bool


@dataclass
class SignalForwarding:
    """Finds out which signals the worker has not got.

    Signals of one number that come within :attr:`Limits.signal_settles` count as one, just as the
    kernel keeps only one signal of a number for a process that has not handled it yet.

    Attributes:
        sentinel: The sentinel; None if it has ended. In that case each signal counts as missed: it
            is better for the worker to get a signal twice than not at all, because it may be the
            last chance for a checkpoint.
        limits: How long the answers may take.
        monotonic: The system's monotonic clock.
    """

    sentinel: Sentinel | None
    limits: Limits = DEFAULT_LIMITS
    monotonic: Callable[[], float] = time.monotonic
    _questions: list[_Question] = field(default_factory=list)
    # The signals that the sentinel has got and that belong to no question so far.
    _marks: list[Mark] = field(default_factory=list)
    _asked_at: float | None = None  # None if no answer is due

    def add(self, number: int, now: float, *, is_passed_on: bool, of_rank: bool) -> None:
        """Note a signal that the supervisor has got.

        Args:
            number: The signal.
            now: The time.
            is_passed_on: Whether the signal was sent to the worker already.
            of_rank: Whether the worker, or another process of a rank on this node, has sent it.
        """
        at = self.monotonic()
        opposite = _OPPOSITE.get(number)
        # Drop the opposite signal, as the kernel does: a worker that was continued must not be
        # stopped afterwards by an earlier signal.
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
        """Note that this process was stopped by SIGTSTP and goes on. Call this before its SIGCONT
        is read.

        From now on, the SIGTSTP that came before the SIGCONT must not stop the worker. The
        sentinel's time to answer begins again.
        """
        self._questions = [each for each in self._questions if each.number != signal.SIGTSTP]
        if self._asked_at is not None:
            self._asked_at = now

    def on_answer(self) -> list[MissedSignal]:
        """Read the sentinel's answer, and return the signals that the worker has not got."""
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
            # The supervisor itself may be late, because it was stopped or got no CPU time, and then
            # the answer is there although the time is over.
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
        """Stop using the sentinel, whose late answer would be taken for the answer to another
        question. Return the signals of all open questions that were not passed on.
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

        The sentinel and the supervisor each note a signal when they get CPU time, so either may be
        late. So marks up to a moment after the question's last signal belong to it. If there are
        none, the first later mark does; all other later marks belong to the next question.
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
    """Holds the signals that came before the script could set a handler and that would have ended
    the script: they came while the ranks met or torch was imported. Each is sent to the worker once
    the worker handles, ignores or blocks it.

    Attributes:
        process: The worker.
        limits: How often to look whether the worker can take the signals.
        worker_notes: Whether handlers of srunddp in the worker note these signals at the moment, in
            place of the script's handlers. The worker says so before it sets them, and again after
            it has removed them.
    """

    process: WorkerProcess
    limits: Limits = DEFAULT_LIMITS
    worker_notes: bool = True
    _numbers: list[int] = field(default_factory=list)
    _look_after: float = 0.0

    def add(self, numbers: Iterable[int]) -> None:
        """Hold the signals that the worker has noted. The worker has removed its own handlers."""
        self.worker_notes = False
        self._numbers += numbers
        self._look_after = self.limits.held_signal_looks

    def tick(self, read_pipe: Callable[[], None]) -> float | None:
        """Send the signals that the worker can take now, and return in how many seconds to call
        this again; None for not at all.

        Args:
            read_pipe: Reads the worker's messages, which may set :attr:`worker_notes`.
        """
        if not self._numbers or self.process.ended:
            return None
        able = [each for each in self._numbers if signals.is_safe_for(self.process.pid, each)]
        if able:
            # The handler may be srunddp's own, which would only note the signal. The worker has
            # said so before it set that handler, so read its messages first.
            read_pipe()
        if able and not self.worker_notes:
            for number in able:
                self._numbers.remove(number)
                self.process.send(number)
        wait = self._look_after
        self._look_after = min(2 * wait, self.limits.held_signal_looks_at_least)
        return wait if self._numbers else None
