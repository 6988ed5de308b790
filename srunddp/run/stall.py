"""Steps that stop: since when no rank has made one, where each rank is then, and which the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from srunddp.run.failure import time_of_day
from srunddp.run.stacks import groups, main_stack, odd_one, place, shown
from srunddp.run.verdict import STALLED, Verdict, folded

_ANSWERS_WITHIN = 3.0


@dataclass
class Stall:
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

    def verdict(self, nodes: Mapping[int, str], through: Mapping[int, str]) -> Verdict:
        """The rank that the others wait for, and where each of them is.

        Args:
            nodes: of all ranks; through: of those whose script is over.
        """
        texts = {rank: self._stacks.get(rank, "") for rank in self._asked}
        odd = odd_one(texts, self._steps)
        stack = main_stack(texts[odd])
        notes = [f"{folded(ranks, nodes)} in {where}" for where, ranks in groups(texts).items() if odd not in ranks]
        notes += [f"{folded(list(through), through)} left with exit code 0 before"] if through else []
        return Verdict(
            (odd,),
            nodes[odd],
            f"no step for {self.timeout:g} s, in {place(stack)}",
            STALLED,
            traceback=shown(stack),
            time=time_of_day(),
            notes=tuple(notes),
        )
