"""The state of each rank of a run, as rank 0 knows it: the states, the events and the table of
transitions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum


class RankState(Enum):
    """How far a rank has come; the value describes the state in words."""

    WORKING = "its script runs"
    DONE = "its script is over without an error, and its worker may still be there"
    LEFT = "its worker has ended with 0"
    FAILED = "it has failed"
    SPARE = "it is not a rank, but a task of a spare node that waits for a rank"
    DROPPED = "it is a task of a spare node that can take no rank any more"


class RankEvent(Enum):
    """An event that happens to a rank; the value describes the event in words."""

    SCRIPT_IS_OVER = "its script ends without an error"
    WORKER_HAS_ENDED = "its worker ends with 0"
    HAS_FAILED = "it fails, is silent, or its supervisor is killed"
    IS_DROPPED = "a task of a spare node fails, does not answer, or its supervisor is killed"


TRANSITIONS: Mapping[tuple[RankState, RankEvent], RankState] = {
    (RankState.WORKING, RankEvent.SCRIPT_IS_OVER): RankState.DONE,
    # A script that ends by os._exit(0) sends no message first.
    (RankState.WORKING, RankEvent.WORKER_HAS_ENDED): RankState.LEFT,
    (RankState.DONE, RankEvent.WORKER_HAS_ENDED): RankState.LEFT,
    (RankState.WORKING, RankEvent.HAS_FAILED): RankState.FAILED,
    # A worker can fail after its script is over: in an exit handler, or because it does not end.
    (RankState.DONE, RankEvent.HAS_FAILED): RankState.FAILED,
    # The launcher of a rank may end while the rank's supervisor stays for the other ranks.
    (RankState.LEFT, RankEvent.HAS_FAILED): RankState.FAILED,
    # A task of a spare node runs no script, and leaves when the scripts of all ranks are over.
    (RankState.SPARE, RankEvent.WORKER_HAS_ENDED): RankState.LEFT,
    (RankState.SPARE, RankEvent.IS_DROPPED): RankState.DROPPED,
    (RankState.LEFT, RankEvent.IS_DROPPED): RankState.DROPPED,
}
"""An event that is not in the table changes nothing: FAILED and DROPPED are final, and a message
that comes twice or too late has no effect.
"""


class RankTable:
    """The state of each rank and of each task of a spare node.

    Only :meth:`apply` changes a state. The properties, which rank 0 reads after each message, take
    the same time however many ranks there are.

    Attributes:
        ranks: The numbers of the tasks that are ranks, whatever their state.
    """

    def __init__(self, ranks: Iterable[int], spares: Iterable[int] = ()) -> None:
        """Begin with all ranks in WORKING and all tasks of spare nodes in SPARE.

        Args:
            ranks: The numbers of the ranks.
            spares: The numbers of the tasks of spare nodes.
        """
        working = dict.fromkeys(ranks, RankState.WORKING)
        self.ranks = frozenset(working)
        self._states = working | dict.fromkeys(spares, RankState.SPARE)
        # Always equal to Counter(self._states.values()). The counts are kept because counting again
        # at each message would take too long with thousands of ranks.
        self._counts = Counter(self._states.values())
        # The ranks whose worker has ended with 0. A rank that is FAILED may be among them.
        self._ended = set[int]()

    def __getitem__(self, rank: int) -> RankState:
        return self._states[rank]

    def apply(self, rank: int, event: RankEvent) -> None:
        """Change the state of a rank, or of a task of a spare node, as :data:`TRANSITIONS` says."""
        before = self._states[rank]
        after = TRANSITIONS.get((before, event), before)
        self._states[rank] = after
        self._counts[before] -= 1
        self._counts[after] += 1
        if event is RankEvent.WORKER_HAS_ENDED and rank in self.ranks:
            self._ended.add(rank)

    def ranks_in(self, *states: RankState) -> list[int]:
        """Return the ranks in one of these states, lowest first, without tasks of spare nodes."""
        return [rank for rank in sorted(self.ranks) if self._states[rank] in states]

    @property
    def scripts_are_over(self) -> bool:
        """Whether no script runs any more: the script of each rank has ended with 0, or the rank
        has failed.
        """
        return not self._counts[RankState.WORKING]

    @property
    def someone_may_fail(self) -> bool:
        """Whether the worker of some rank is still there and has not failed."""
        return not self.scripts_are_over or self._counts[RankState.DONE] > 0

    @property
    def workers_have_ended(self) -> bool:
        """Whether the workers of all ranks have ended with 0."""
        return len(self._ended) == len(self.ranks)

    @property
    def spares_wait(self) -> bool:
        """Whether some task of a spare node still waits for a rank."""
        return self._counts[RankState.SPARE] > 0
