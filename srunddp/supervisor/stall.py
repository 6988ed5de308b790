"""Steps that stop: since when no rank has made one, where each rank is then, and which the others wait for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from srunddp.supervisor.failure import Failure, FailureKind, time_of_day
from srunddp.supervisor.root_cause import STALLED, RootCause, folded
from srunddp.supervisor.stacks import find_blocking_rank, format_stack, groups, is_waiting, main_stack, top_frame

STALL_TIMEOUT = 300.0
_ANSWERS_WITHIN = 3.0


@dataclass
class StallDetector:
    """Rank 0's view of all ranks' steps. Only ranks that have marked one are expected to mark more.

    Attributes:
        timeout: seconds without a step of any rank; 0 for no limit.
    """

    timeout: float
    _steps: dict[int, int] = field(default_factory=dict)
    _advanced: float = 0.0
    _asked: Sequence[int] = ()
    _answers_until: float | None = None
    _stacks: dict[int, str] = field(default_factory=dict)

    @property
    def due(self) -> float | None:
        """When there is something to do if nothing else happens before."""
        if self._answers_until is not None:
            return self._answers_until
        return self._advanced + self.timeout if self.timeout and any(self._steps.values()) else None

    def note(self, rank: int, step: int, now: float) -> None:
        """How many steps a rank has made; 0 where none is expected of it."""
        if self._steps.get(rank) != step:
            self._steps[rank] = step
            self._advanced, self._answers_until = now, None

    def forget(self, rank: int) -> None:
        """A rank is through."""
        self._steps.pop(rank, None)

    def is_new(self, now: float) -> bool:
        """Whether the ranks have stalled, and have not been asked yet where they are."""
        return self._answers_until is None and (due := self.due) is not None and now >= due

    def gather(self, ranks: Sequence[int], now: float) -> None:
        """These ranks have been asked for their stacks."""
        self._asked, self._answers_until = ranks, now + _ANSWERS_WITHIN
        self._stacks.clear()

    def hear(self, rank: int, stacks: str) -> None:
        """Where a rank is."""
        self._stacks[rank] = stacks

    def is_told(self, now: float) -> bool:
        """Whether all have answered, or have had their time."""
        if self._answers_until is None:
            return False
        return now >= self._answers_until or all(rank in self._stacks for rank in self._asked)

    def verdict(self, nodes: Mapping[int, str], through: Mapping[int, str]) -> RootCause:
        """The rank that the others wait for, and where each of them is.

        Args:
            nodes: of all ranks; through: of those whose script is over.
        """
        texts = {rank: self._stacks.get(rank, "") for rank in self._asked}
        odd = find_blocking_rank(texts, self._steps)
        found = self._verdict(odd, texts, nodes, f"no step for {self.timeout:g} s, in")
        left = (f"{folded(list(through), through)} left with exit code 0 before",) if through else ()
        return replace(found, notes=(*found.notes, *left))

    def verdict_upon(self, failures: Sequence[Failure], nodes: Mapping[int, str]) -> RootCause | None:
        """The rank that hangs, where these failures are of the others' collective; None where that is not clear.

        It still works, and does not wait for others. That a rank does so proves nothing if another has aborted of its
        own accord: one failure has to speak of a time limit, or more ranks have aborted than such ranks are left.
        """
        failed = {each.rank for each in failures}
        texts = {rank: self._stacks.get(rank, "") for rank in self._asked if rank not in failed}
        busy = {rank: text for rank, text in texts.items() if not is_waiting(main_stack(text))}
        if not busy or not (any(map(_is_of_a_limit, failures)) or len(failed) > len(busy)):
            return None
        first = min(failures, key=lambda each: each.weight)
        found = self._verdict(find_blocking_rank(busy, {}), texts, nodes, "it hangs in")
        cause = f"{found.cause}; then rank {first.rank} on {first.node} failed: {first.cause}"
        return replace(found, cause=cause, victims=tuple(failures))

    def _verdict(self, odd: int, texts: Mapping[int, str], nodes: Mapping[int, str], why: str) -> RootCause:
        stack = main_stack(texts[odd])
        notes = [f"{folded(ranks, nodes)} in {where}" for where, ranks in groups(texts).items() if odd not in ranks]
        return RootCause(
            (odd,),
            nodes[odd],
            f"{why} {top_frame(stack)}",
            STALLED,
            traceback=format_stack(stack),
            time=time_of_day(),
            notes=tuple(notes),
        )


_LIMIT = re.compile(r"tim(e|ed|ing)[ -]?out|watchdog", re.IGNORECASE)


def _is_of_a_limit(failure: Failure) -> bool:
    return failure.weight is FailureKind.ECHO and bool(_LIMIT.search(failure.cause + failure.traceback))


def may_be_of_a_hang(failures: Sequence[Failure]) -> bool:
    """Whether all may come of one rank that hangs: collectives that ran into their limit, and what aborted for that."""
    echoes = all(each.weight in (FailureKind.ECHO, FailureKind.ABORTED) for each in failures)
    return echoes and (
        any(map(_is_of_a_limit, failures)) or all(each.weight is FailureKind.ABORTED for each in failures)
    )
