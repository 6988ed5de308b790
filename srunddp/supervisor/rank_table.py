"""Where each rank of a run is, as rank 0 knows it: the states, the events and the table of
transitions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum


class RankState(Enum):
    """Where a rank is in its life; the value says it in words."""

    WORKING = "its script runs"
    DONE = "its script is over without an error, and its worker may still be there"
    LEFT = "its worker has ended with 0"
    FAILED = "it has failed"
    SPARE = "not a rank, but a task of a spare node that waits for one"
    DROPPED = "such a task that can take no rank any more"


class RankEvent(Enum):
    """What happens to a rank; the value says it in words."""

    SCRIPT_IS_OVER = "its script ends without an error"
    WORKER_HAS_ENDED = "its worker ends with 0"
    HAS_FAILED = "it fails, is silent, or its supervisor is killed"
    IS_DROPPED = "the same of a task of a spare node"


TRANSITIONS: Mapping[tuple[RankState, RankEvent], RankState] = {
    (RankState.WORKING, RankEvent.SCRIPT_IS_OVER): RankState.DONE,
    # A script that ends by os._exit(0) has said nothing before.
    (RankState.WORKING, RankEvent.WORKER_HAS_ENDED): RankState.LEFT,
    (RankState.DONE, RankEvent.WORKER_HAS_ENDED): RankState.LEFT,
    (RankState.WORKING, RankEvent.HAS_FAILED): RankState.FAILED,
    # In an exit handler, or its process does not end.
    (RankState.DONE, RankEvent.HAS_FAILED): RankState.FAILED,
    # Its supervisor is stopped, and rank 0 waits for its connection to end; or its launcher ends.
    (RankState.LEFT, RankEvent.HAS_FAILED): RankState.FAILED,
    # The script of such a task is over from the beginning; it leaves when those of all ranks are.
    (RankState.SPARE, RankEvent.WORKER_HAS_ENDED): RankState.LEFT,
    (RankState.SPARE, RankEvent.IS_DROPPED): RankState.DROPPED,
    (RankState.LEFT, RankEvent.IS_DROPPED): RankState.DROPPED,
}
"""What is not in the table changes nothing: FAILED and DROPPED are final, and a message that comes
twice, or too late, says nothing new.
"""


class RankTable:
    """The state of each rank and of each task of a spare node.

    Only :meth:`apply` changes it. What is asked of it after each message takes no time that grows
    with the number of ranks.

    Attributes:
        ranks: Those that have one, whatever their state.
    """

    def __init__(self, ranks: Iterable[int], spares: Iterable[int] = ()) -> None:
        """Begin with all of these ranks at work, and with these tasks of spare nodes."""
        working = dict.fromkeys(ranks, RankState.WORKING)
        self.ranks = frozenset(working)
        self._states = working | dict.fromkeys(spares, RankState.SPARE)
        # Invariant: how many of all are in each state.
        self._counts = Counter(self._states.values())
        # A rank that has failed stays FAILED when its worker ends, and counts here all the same.
        self._ended = set[int]()

    def __getitem__(self, rank: int) -> RankState:
        return self._states[rank]

    def apply(self, rank: int, event: RankEvent) -> None:
        """Something happens to a rank, or to a task of a spare node."""
        before = self._states[rank]
        after = TRANSITIONS.get((before, event), before)
        self._states[rank] = after
        self._counts[before] -= 1
        self._counts[after] += 1
        if event is RankEvent.WORKER_HAS_ENDED and rank in self.ranks:
            self._ended.add(rank)

    def ranks_in(self, *states: RankState) -> list[int]:
        """Return the ranks in one of these states, the lowest first, without those that have
        none.
        """
        return [rank for rank in sorted(self.ranks) if self._states[rank] in states]

    @property
    def scripts_are_over(self) -> bool:
        """Whether no rank's script runs: each has ended with 0, or has failed."""
        return not self._counts[RankState.WORKING]

    @property
    def someone_may_fail(self) -> bool:
        """Whether the worker of some rank is still there and has not failed."""
        return not self.scripts_are_over or self._counts[RankState.DONE] > 0

    @property
    def workers_have_ended(self) -> bool:
        """Whether the worker of each rank has ended with 0."""
        return len(self._ended) == len(self.ranks)
