"""Steps that stop: since when no rank has made one, where each rank is then, and which one the
others wait for.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from srunddp.supervisor.failure import Failure, FailureKind, time_of_day
from srunddp.supervisor.root_cause import STALLED, RootCause, folded
from srunddp.supervisor.stacks import (
    find_blocking_rank,
    format_stack,
    groups,
    is_waiting,
    main_stack,
    top_frame,
)

_LIMIT = re.compile(r"tim(e|ed|ing)[ -]?out|watchdog", re.IGNORECASE)


@dataclass
class StallDetector:
    """Rank 0's view of all ranks' steps. Only ranks that have made one are expected to make more.

    Attributes:
        timeout: seconds without a step of any rank; 0 for no limit.
        steps: how many each rank has made that has made one.
    """

    timeout: float
    steps: dict[int, int] = field(default_factory=dict)
    _advanced: float = 0.0

    @property
    def due(self) -> float | None:
        """When the ranks have stalled, unless one makes a step before; None where no step is
        expected.
        """
        if self.timeout and self.steps:
            return self._advanced + self.timeout
        return None

    def detected(self, now: float) -> bool:
        """Whether the ranks have stalled."""
        due = self.due
        return due is not None and now >= due

    def note(self, rank: int, step: int, now: float) -> None:
        """How many steps a rank has made; 0 where none is expected of it."""
        if self.steps.get(rank, 0) != step:
            self.steps[rank] = step
            self._advanced = now
        if not step:
            self.remove(rank)

    def remove(self, rank: int) -> None:
        """A rank has finished."""
        self.steps.pop(rank, None)


class StackRequest:
    """The stacks that ranks are asked for, by rank; empty where one has not answered, nor is waited
    for any longer.
    """

    def __init__(self, ranks: Sequence[int], deadline: float) -> None:
        self.deadline = deadline
        self.stacks = dict.fromkeys(ranks, "")
        self._missing = set(ranks)

    def add(self, rank: int, stacks: str) -> None:
        """A rank has answered."""
        if rank in self.stacks:
            self.stacks[rank] = stacks
            self._missing.discard(rank)

    def complete(self, now: float) -> bool:
        """Whether all have answered, or have had their time."""
        return now >= self.deadline or not self._missing


def find_stalled_rank(
    stacks: Mapping[int, str],
    stall: StallDetector,
    nodes: Mapping[int, str],
    finished: Mapping[int, str],
) -> RootCause:
    """The rank that the others wait for, and where each of those that work is; ``finished``: whose
    script is over.
    """
    rank = find_blocking_rank(stacks, stall.steps)
    found = _blocked_by(rank, stacks, nodes, f"no step for {stall.timeout:g} s, in")
    if not finished:
        return found
    note = f"{folded(list(finished), finished)} left with exit code 0 before"
    return replace(found, notes=(*found.notes, note))


def find_hanging_rank(
    stacks: Mapping[int, str], failures: Sequence[Failure], nodes: Mapping[int, str]
) -> RootCause | None:
    """The rank that hangs, where these failures are of the others' collective; None where that is
    not clear.

    It still works, as all ranks that have stacks, and does not wait for others. That a rank does so
    proves nothing if another has aborted of its own accord: one failure has to speak of a time
    limit, or more ranks have aborted than such ranks are left.
    """
    failed = {each.rank for each in failures}
    texts = {rank: text for rank, text in stacks.items() if rank not in failed}
    busy = {rank: text for rank, text in texts.items() if not is_waiting(main_stack(text))}
    if not busy or not (any(map(_is_of_a_limit, failures)) or len(failed) > len(busy)):
        return None
    first = min(failures, key=lambda each: each.weight)
    found = _blocked_by(find_blocking_rank(busy, {}), texts, nodes, "it hangs in")
    cause = f"{found.cause}; then rank {first.rank} on {first.node} failed: {first.cause}"
    return replace(found, cause=cause, victims=tuple(failures))


def may_be_of_a_hang(failures: Sequence[Failure]) -> bool:
    """Whether all may come of one rank that hangs: collectives that ran into their limit, and what
    aborted for that.
    """
    kinds = {each.weight for each in failures}
    if not kinds <= {FailureKind.SECONDARY, FailureKind.ABORTED}:
        return False
    return kinds == {FailureKind.ABORTED} or any(map(_is_of_a_limit, failures))


def _is_of_a_limit(failure: Failure) -> bool:
    return failure.weight is FailureKind.SECONDARY and bool(
        _LIMIT.search(failure.cause + failure.traceback)
    )


def _blocked_by(
    rank: int, stacks: Mapping[int, str], nodes: Mapping[int, str], why: str
) -> RootCause:
    stack = main_stack(stacks[rank])
    notes = [
        f"{folded(ranks, nodes)} in {where}"
        for where, ranks in groups(stacks).items()
        if rank not in ranks
    ]
    return RootCause(
        ranks=(rank,),
        node=nodes[rank],
        cause=f"{why} {top_frame(stack)}",
        exit_code=STALLED,
        traceback=format_stack(stack),
        time=time_of_day(),
        notes=tuple(notes),
    )
