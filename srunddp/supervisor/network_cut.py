"""Finds the nodes that do not reach each other, from what their supervisors report when rank 0 has
them try.

Rank 0's supervisor has a connection to every rank, but collectives use connections between all
nodes. If the network between two nodes is cut, all ranks wait or fail, and none of them is at
fault. The nodes try TCP on the interfaces that srunddp has selected. This says nothing about
InfiniBand or RoCE, so the texts for the user say TCP.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from srunddp.supervisor.messages import ProbeResult, ProbeWanted
from srunddp.util.hostlist import fold

ALL_PAIRS_UP_TO = 256
"""With up to this number of nodes, each node tries to reach all others; with more nodes, only some
of them, see :func:`peers_of`.
"""

FEWEST = 3
"""The smallest number of nodes for which a :class:`NetworkProbe` is useful. If there are only two
nodes, the connection between their supervisors tells as much.
"""

_MOST_NAMED = 4


Pair = tuple[str, str]


class Way(Enum):
    """In which direction two nodes do not reach each other."""

    BOTH = auto()
    FROM_NODE = auto()  # the node cannot reach the other node, which can reach it
    TO_NODE = auto()  # the node can reach the other node, which cannot reach it


@dataclass(frozen=True)
class Cut:
    """A node that does not reach others, or that others do not reach. If nodes can be given up,
    this node is given up and not the others.

    Attributes:
        node: The node.
        others: The nodes that it does not reach, or that do not reach it.
        way: In which direction; BOTH if there are several others.
    """

    node: str
    others: tuple[str, ...]
    way: Way = Way.BOTH

    def __str__(self) -> str:
        others = fold(self.others)
        match self.way:
            case Way.FROM_NODE:
                return f"{self.node} cannot reach {others} by TCP"
            case Way.TO_NODE:
                return f"{others} cannot reach {self.node} by TCP"
        if len(self.others) > 1:
            return f"{self.node} cannot reach {len(self.others)} nodes by TCP: {others}"
        return " and ".join(sorted((self.node, others))) + " cannot reach each other by TCP"


@dataclass(frozen=True)
class Findings:
    """The result of the nodes' attempts to reach each other.

    Attributes:
        cuts: The fewest nodes that explain which nodes do not reach each other, each with the nodes
            that it does not reach or that do not reach it; empty if no node can be named.
        silent: The nodes that have not answered some other node.
        answers: How many nodes have reported what they found, and how many were asked.
    """

    cuts: tuple[Cut, ...] = ()
    silent: tuple[str, ...] = ()
    answers: tuple[int, int] = (0, 0)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of all cuts, with the nodes from which they are cut."""
        return tuple(dict.fromkeys(name for cut in self.cuts for name in (cut.node, *cut.others)))

    @property
    def text(self) -> str:
        """The cuts in words; empty if no node is named."""
        named = [str(cut) for cut in self.cuts[:_MOST_NAMED]]
        if (more := len(self.cuts) - _MOST_NAMED) > 0:
            named.append(f"and {more} more node" + ("s" if more > 1 else ""))
        return ", ".join(named)

    @property
    def note(self) -> str:
        """A line that says what the attempts have shown, for the report if there are no cuts."""
        said, asked = self.answers
        tried = "TCP was tried between the nodes"
        if self.silent:
            return f"{tried}: no answer from {fold(self.silent)}, which may be a firewall's doing"
        if said < asked:
            return f"{tried}: {said} of {asked} nodes have said in time what they reach"
        return f"{tried}: all {said} nodes reach each other"


def peers_of(index: int, count: int) -> list[int]:
    """Return the numbers of the nodes that a node tries to reach.

    These are all other nodes. If there are many nodes, they are only those at the distances 1, 2,
    4, 8 and so on in the order of ranks, in both directions: rings, trees and halving all-reduces
    use such pairs.

    Args:
        index: The node's number, in the order of ranks.
        count: How many nodes there are.
    """
    if count <= ALL_PAIRS_UP_TO:
        return [other for other in range(count) if other != index]
    distances = [1 << bit for bit in range((count // 2).bit_length())]
    peers = {(index + sign * distance) % count for distance in distances for sign in (1, -1)}
    return sorted(peers - {index})


class NetworkProbe:
    """One round in which all nodes try to reach each other, as rank 0 conducts it.

    Attributes:
        requests: The message to the lowest rank of each node, including rank 0.
        number: The number of this round.
    """

    def __init__(
        self,
        probers: Mapping[int, str],
        addresses: Mapping[int, str],
        port: int,
        number: int = 1,
    ) -> None:
        """Make the requests of a round.

        Args:
            probers: The lowest rank on each node, with the node, in the order of ranks.
            addresses: The address of each of these ranks.
            port: The port to try, which a firewall lets through.
            number: How many rounds there have been in this start, including this one.
        """
        self.number = number
        self._nodes = dict(probers)
        self._answers = dict[int, ProbeResult]()
        ranks = list(probers)
        self.requests = {
            rank: ProbeWanted(
                addresses[rank],
                tuple((ranks[i], addresses[ranks[i]], port) for i in peers_of(index, len(ranks))),
                number,
            )
            for index, rank in enumerate(ranks)
        }

    def add(self, rank: int, result: ProbeResult) -> None:
        """Note what a rank's node has found. A result is ignored if the rank was not asked, or if
        it belongs to an earlier round.
        """
        if rank in self.requests and result.number == self.number:
            self._answers[rank] = result

    @property
    def is_complete(self) -> bool:
        """Whether all nodes have answered."""
        return len(self._answers) == len(self.requests)

    def findings(
        self, with_ranks: Collection[str], rank_zero: str, failed_before: str = ""
    ) -> Findings:
        """Return which nodes do not reach each other by the answers so far, see :func:`find_cuts`.

        Args:
            with_ranks: The nodes that have ranks.
            rank_zero: Rank 0's node.
            failed_before: The node of the failure before this one; empty if there is none.
        """
        answers = self._answers.items()
        missed = self._pairs((rank, other) for rank, said in answers for other in said.missed)
        found = find_cuts(
            self._pairs((rank, other) for rank, said in answers for other in said.reached),
            missed,
            with_ranks=[node for node in self._nodes.values() if node in with_ranks],
            rank_zero=rank_zero,
            failed_before=failed_before,
        )
        silent = tuple(sorted({there for _, there in missed}))
        return Findings(found, silent, (len(self._answers), len(self.requests)))

    def _pairs(self, ranks: Iterable[tuple[int, int]]) -> set[Pair]:
        nodes = self._nodes
        # A message may name any rank: one that was not asked about is left out.
        return {(nodes[here], nodes[there]) for here, there in ranks if there in nodes}


def find_cuts(
    reached: Collection[Pair],
    missed: Collection[Pair],
    *,
    with_ranks: Sequence[str],
    rank_zero: str,
    failed_before: str = "",
) -> tuple[Cut, ...]:
    """Return the fewest nodes that explain which nodes do not reach each other.

    A node that no other node has reached proves nothing: it still talks to rank 0, as every node
    that is asked does, so a firewall there may only drop new connections. A node that has reached
    no other node proves nothing either, for the same reason. Nor does a pair that was not tried, or
    not reported in time.

    Args:
        reached: Pairs of nodes of which the first has reached the second.
        missed: Pairs of nodes of which the first has not reached the second.
        with_ranks: The nodes that have ranks, in the order of ranks. A pair with a spare node
            explains no failure, and only helps to choose between the two nodes of another pair.
        rank_zero: Rank 0's node, which is given up last.
        failed_before: The node of the failure before this one, which is given up first; empty if
            there is none.

    Returns:
        First the node that is cut from the most other nodes, with those nodes; then the same for
        the pairs that remain. If two nodes are cut from equally many, the first is the one that is
        cut from more nodes with the spare nodes included; if that does not decide, the one that is
        not rank 0's, then the one that has failed before, then the later one in the order of ranks.
    """
    can_reach = {here for here, _ in reached}
    can_be_reached = {there for _, there in reached}
    proven = [pair for pair in missed if pair[0] in can_reach and pair[1] in can_be_reached]
    order = {node: number for number, node in enumerate(with_ranks)}
    apart = _neighbours(proven)
    left = _neighbours([pair for pair in proven if {*pair} <= order.keys()])

    def blame(node: str) -> tuple[int, int, bool, bool, int]:
        is_first = node == rank_zero
        return (len(left[node]), len(apart[node]), not is_first, node == failed_before, order[node])

    cuts = []
    while left:
        node = max(left, key=blame)
        others = tuple(sorted(left.pop(node), key=order.__getitem__))
        cuts.append(Cut(node, others, _way(node, others, reached)))
        for other in others:
            left[other].remove(node)
        left = {each: theirs for each, theirs in left.items() if theirs}
    return tuple(cuts)


def _neighbours(pairs: Collection[Pair]) -> dict[str, set[str]]:
    """Return, for each node of some pair, the nodes with which it makes a pair, in either order."""
    found = dict[str, set[str]]()
    for one, other in pairs:
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set()).add(one)
    return found


def _way(node: str, others: Sequence[str], reached: Collection[Pair]) -> Way:
    if len(others) == 1 and (node, others[0]) in reached:
        return Way.TO_NODE
    if len(others) == 1 and (others[0], node) in reached:
        return Way.FROM_NODE
    return Way.BOTH
