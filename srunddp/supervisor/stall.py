"""Detects stalls, in which no rank makes a step for some time, and finds where each rank is then
and which rank the others wait for.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from srunddp.supervisor.failure import Failure, FailureKind, time_of_day
from srunddp.supervisor.root_cause import STALLED, RootCause, folded
from srunddp.util.python_stack import (
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
    """Detects on rank 0, from the counts of steps of all ranks, whether they have stalled. A rank
    that has made a step is expected to make more. A first step is expected only if
    :attr:`first_within` is set.

    Attributes:
        timeout: Seconds without a step of any rank that count as a stall; 0 for no limit.
        first_within: Seconds that the ranks may take to the first step of any of them; 0 for no
            limit.
        steps: How many steps each rank has made. Ranks that have made none, or from which none is
            expected any more, are left out.
        begun: When the ranks began to work; None before the first :meth:`note`.
        first_at: When a rank made the first step; None if none has made one.
    """

    timeout: float
    first_within: float = 0.0
    steps: dict[int, int] = field(default_factory=dict)
    begun: float | None = None
    first_at: float | None = None
    _advanced: float = 0.0
    # The ranks whose script runs and that have made no step; and the ranks that have said that no
    # step is expected of them for now.
    _without_step: set[int] = field(default_factory=set)
    _paused: set[int] = field(default_factory=set)

    @property
    def due(self) -> float | None:
        """When the ranks count as stalled unless one makes a step before then; None if no step is
        expected, or there is no limit.
        """
        if self.timeout and self.steps:
            return self._advanced + self.timeout
        if self.is_before_first_step and self._without_step and not self._paused:
            return self._advanced + self.first_within
        return None

    @property
    def is_before_first_step(self) -> bool:
        """Whether a first step is expected, and no rank has made one."""
        return self.first_within > 0.0 and self.first_at is None

    def detected(self, now: float) -> bool:
        """Return whether the ranks have stalled."""
        due = self.due
        return due is not None and now >= due

    def has_no_effect(self, now: float) -> bool:
        """Return whether ranks have worked for longer than the limit while none has made a step, so
        that the limit does not count yet.
        """
        if not self.timeout or self.first_within or self.begun is None:
            return False
        # A rank that has said that it makes no step for now will make steps later.
        if self.first_at is not None or self._paused or not self._without_step:
            return False
        return now >= self.begun + self.timeout

    def note(self, rank: int, step: int, now: float, *, paused: bool = False) -> None:
        """Note how many steps a rank has made.

        Args:
            rank: The rank.
            step: Its steps so far; 0 if it has made none, or none is expected of it.
            now: The time.
            paused: Whether the rank has said that no step is expected of it for now.
        """
        if self.begun is None:
            self.begun = now
            self._advanced = now
        if step and self.first_at is None:
            self.first_at = now
        if self._paused and self.is_before_first_step:
            # The other ranks may wait for the paused one, so the time until the first step begins
            # again.
            self._advanced = now
        if self.steps.get(rank, 0) != step:
            self.steps[rank] = step
            self._advanced = now
        if not step:
            self.remove(rank)
            self._without_step.add(rank)
        if paused:
            self._paused.add(rank)
        else:
            self._paused.discard(rank)

    def remove(self, rank: int) -> None:
        """From now on, expect no step from this rank."""
        self.steps.pop(rank, None)
        self._without_step.discard(rank)
        self._paused.discard(rank)


class StackRequest:
    """The stacks that rank 0 has requested from ranks.

    Attributes:
        deadline: Until when rank 0 waits for answers.
        stacks: The dump of each rank that was asked; empty for one that has not answered.
    """

    def __init__(self, ranks: Sequence[int], deadline: float) -> None:
        self.deadline = deadline
        self.stacks = dict.fromkeys(ranks, "")
        self._missing = set(ranks)

    def add(self, rank: int, stacks: str) -> None:
        """Note a rank's answer; ignored if the rank was not asked."""
        if rank in self.stacks:
            self.stacks[rank] = stacks
            self._missing.discard(rank)

    def complete(self, now: float) -> bool:
        """Return whether all ranks have answered, or the deadline has passed."""
        return now >= self.deadline or not self._missing


def find_stalled_rank(
    stacks: Mapping[int, str],
    stall: StallDetector,
    nodes: Mapping[int, str],
    finished: Mapping[int, str],
) -> RootCause:
    """Return the root cause of a stall: the rank that the others most likely wait for, with notes
    on where the others are. If all wait in one place, no rank is named.

    Args:
        stacks: The dump of each rank whose script runs.
        stall: The steps of the ranks, and the limit.
        nodes: The node of each rank.
        finished: The node of each rank whose script is over without an error.
    """
    rank = find_blocking_rank(stacks, stall.steps)
    since = f"no step for {stall.timeout:g} s"
    if stall.is_before_first_step:
        since = (
            f"no step in the first {stall.first_within:.0f} s of this start, nor"
            " srunddp.heartbeat(last=True)"
        )
    found = _blocked_by(rank, stacks, nodes, f"{since}, in")
    if not is_someone_elsewhere(stacks):
        # If all ranks wait, the reason is not a rank but for example the network, so no node is
        # suspected.
        found = replace(found, follows=True)
        places = list(groups(stacks))
        if len(places) == 1 and len(stacks) > 1:
            cause = f"{since}: all ranks wait in {places[0]}"
            found = replace(found, ranks=(), node="", cause=cause)
        elif len(places) > 1:
            found = replace(found, cause=f"{found.cause}, and others wait elsewhere")
    if not finished:
        return found
    note = f"{folded(list(finished), finished)} left with exit code 0 before"
    return replace(found, notes=(*found.notes, note))


def is_someone_elsewhere(stacks: Mapping[int, str]) -> bool:
    """Return whether some rank does not wait for others, or has given no stack. If so, that rank
    may be the one for which the others wait.

    Args:
        stacks: The dump of each rank that was asked.
    """
    return any(not is_waiting(main_stack(text)) for text in stacks.values())


def find_hanging_rank(
    stacks: Mapping[int, str], failures: Sequence[Failure], nodes: Mapping[int, str]
) -> RootCause | None:
    """Return the root cause if one rank hangs and the collectives of the others have failed because
    of it; None if that is not clear.

    The hanging rank is one that has not failed and does not wait for others; here it is called
    busy. That a rank is busy proves nothing, because another may have aborted by its own fault. So
    in addition, a failure has to mention a time limit, or more ranks must have failed than are
    busy.

    Args:
        stacks: The dump of each rank that was asked.
        failures: The failures so far, at least one.
        nodes: The node of each rank.
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
    """Return whether one rank that hangs may have caused all these failures.

    They must all be errors of collectives or aborts. Either all are aborts, or an error mentions a
    time limit.
    """
    kinds = {each.weight for each in failures}
    if not kinds <= {FailureKind.SECONDARY, FailureKind.ABORTED}:
        return False
    return kinds == {FailureKind.ABORTED} or any(map(_is_of_a_limit, failures))


def _is_of_a_limit(failure: Failure) -> bool:
    """Return whether a failure is the error of a collective whose text mentions a time limit."""
    return failure.weight is FailureKind.SECONDARY and bool(
        _LIMIT.search(failure.cause + failure.traceback)
    )


def _blocked_by(
    rank: int, stacks: Mapping[int, str], nodes: Mapping[int, str], why: str
) -> RootCause:
    """Return the root cause for a rank at which others wait, with notes on where the others are.

    Args:
        rank: The rank for which the others wait.
        stacks: The dump of each rank; notes are made from all but this rank's.
        nodes: The node of each rank.
        why: The beginning of the cause, to which the place in the script is appended.
    """
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
