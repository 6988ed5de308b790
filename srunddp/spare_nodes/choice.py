"""Chooses the nodes of the next start. Only this module chooses nodes.

A node that had ranks in the last start keeps its place if none of its ranks is missing. Otherwise a
spare node takes the place. If no spare node is left, the place is left out and the ranks are
renumbered, unless fewer places than ``--min-nodes`` would remain. Without this option the run needs
all places.

The tasks of a node that was given up may come back. The node is then a spare node, and the last
spare node to be used. In the start right after it was given up, it takes ranks only if the run
could not go on otherwise.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from srunddp.errors import RendezvousError, Scope
from srunddp.spare_nodes.layout import ranks_of_nodes
from srunddp.util.hostlist import fold_ranks


def fewest_nodes(places: int, min_nodes: int) -> int:
    """Return how many nodes the next start needs.

    Args:
        places: How many nodes had ranks in the last start.
        min_nodes: The number of ``--min-nodes``; 0 without the option.
    """
    return min_nodes or places


@dataclass(frozen=True)
class Place:
    """A node's part of the next start.

    Attributes:
        ranks: The place's ranks, by their numbers in the last start.
        node: The name of the node that has this place in the next start.
        tasks: The tasks on the node that get these ranks, by their numbers in the last start.
    """

    ranks: range
    node: str
    tasks: tuple[int, ...]


@dataclass(frozen=True)
class NodeChoice:
    """The nodes of the next start.

    Attributes:
        places: The places, in the order of their ranks in the next start.
        left_out: The ranks of the last start that the next start does without.
        numbers: The number of each task in the next start, by the task's number in the last start.
            A task that is missing here is given up.
    """

    places: tuple[Place, ...]
    left_out: tuple[int, ...]
    numbers: Mapping[int, int]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many ranks each place has, in the order of :attr:`places`."""
        return _sizes(self.places)


def choose_nodes(
    sizes: tuple[int, ...],
    nodes: Mapping[int, str],
    *,
    own: int,
    min_nodes: int,
    tasks: int,
    left: Collection[str] = (),
) -> NodeChoice:
    """Choose the nodes of the next start from the tasks that have connected.

    The places keep their order, except that the place of the new rank 0 is the first. The nodes
    that were just given up take ranks only if there are too few other nodes. That can happen: rank
    0 gives up a node that still works if it expects a spare node to replace it, but the tasks of
    the spare node may then fail to connect.

    Args:
        sizes: How many ranks each node had in the last start.
        nodes: The node of each task that has connected, by the task's number in the last start. A
            task that comes back has a number from ``tasks`` on.
        own: The number, in the last start, of the task that is rank 0 in the next start. It is not
            0 if the task takes over from rank 0.
        min_nodes: The number of ``--min-nodes``; 0 without the option.
        tasks: How many tasks a start has, ranks and waiting tasks together.
        left: The nodes that the last start has given up.

    Raises:
        RendezvousError: There are too few nodes, or too few tasks on the node of ``own``.
    """
    spare = _spare_nodes(sum(sizes), nodes)
    are_back = {each for each in left if spare.pop(each, None)}
    beside_own = [number for number in spare.pop(nodes[own], []) if number != own]
    first: Place | None = None
    others = list[Place]()
    left_out = list[int]()
    for ranks in ranks_of_nodes(sizes):
        place: Place | None = None
        if nodes.keys() >= {*ranks}:
            place = Place(ranks, nodes[ranks[0]], tuple(ranks))
        elif 0 in ranks and own >= sum(sizes):
            # A task of a spare node takes over, so its node takes the place of rank 0's node.
            place = _place(ranks, nodes[own], [own, *beside_own])
        elif own not in ranks:
            place = _take_spare_node(ranks, spare)
        if place is None:
            left_out += ranks
        elif own in place.tasks:
            first = place
        else:
            others.append(place)
    if first is None:
        raise _no_spare_node([rank for rank in left_out if rank not in (0, own)])
    places = (first, *others)
    if len(places) < fewest_nodes(len(sizes), min_nodes):
        if are_back:
            return choose_nodes(sizes, nodes, own=own, min_nodes=min_nodes, tasks=tasks)
        raise _too_few(places, left_out, len(sizes), min_nodes)
    return NodeChoice(places, tuple(left_out), _numbers(places, nodes, sizes, tasks))


def _sizes(places: Sequence[Place]) -> tuple[int, ...]:
    return tuple(len(place.tasks) for place in places)


def _spare_nodes(ranks: int, nodes: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the tasks without a rank, grouped by node. The nodes, and the tasks of each node, are
    in the order of the tasks' numbers.
    """
    found = dict[str, list[int]]()
    for number in sorted(nodes):
        if number >= ranks:
            found.setdefault(nodes[number], []).append(number)
    return found


def _take_spare_node(ranks: range, spare: dict[str, list[int]]) -> Place | None:
    """Return the place of these ranks on the first spare node that has enough tasks, and remove the
    node from ``spare``; None if no spare node has enough.
    """
    for node, tasks in spare.items():
        if place := _place(ranks, node, tasks):
            del spare[node]
            return place
    return None


def _place(ranks: range, node: str, tasks: Sequence[int]) -> Place | None:
    """Return the place of these ranks on a spare node; None if the node has too few tasks.

    A spare node may have more tasks than there are ranks. Then the other tasks go on waiting.
    """
    if len(tasks) < len(ranks):
        return None
    return Place(ranks, node, tuple(tasks[: len(ranks)]))


def _numbers(
    places: Sequence[Place], nodes: Mapping[int, str], sizes: tuple[int, ...], tasks: int
) -> dict[int, int]:
    """Return the new number of each task that is not given up, by the task's present number."""
    ranks = [task for place in places for task in place.tasks]
    waiting = sorted(nodes.keys() - {*ranks} - {*range(sum(sizes))})
    numbers = {task: rank for rank, task in enumerate(ranks)}
    if _sizes(places) == sizes and all(task < tasks for task in nodes):
        return numbers | {task: task for task in waiting}
    # The present numbers of the waiting tasks may be numbers of ranks in the next start, or leave a
    # gap behind the last rank. So number these tasks anew, behind the ranks. The tasks that come
    # back get the last numbers, because their nodes are to be used last.
    return numbers | {task: len(ranks) + index for index, task in enumerate(waiting)}


def _no_spare_node(ranks: Collection[int]) -> RendezvousError:
    return RendezvousError(
        f"no spare node is left for {fold_ranks(ranks, {})}",
        expected="one for each node that is lost",
        hint="give the job more with --spare-nodes",
        scope=Scope.JOB,
    )


def _too_few(
    places: Sequence[Place], left_out: Collection[int], before: int, min_nodes: int
) -> RendezvousError:
    if not min_nodes:
        return _no_spare_node(left_out)
    return RendezvousError(
        f"{len(places)} of {before} nodes are left",
        expected=f"{min_nodes} or more (--min-nodes)",
        hint="give the job more nodes, or spare ones with --spare-nodes",
        scope=Scope.JOB,
    )
