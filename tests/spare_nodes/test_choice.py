"""Which nodes the next start has, and which number each task has then."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.errors import RendezvousError
from srunddp.spare_nodes.choice import choose_nodes


def there(*sizes: int, without: str = "") -> dict[int, str]:
    """The tasks of nodes a, b, c and so on, of so many tasks each, but for some nodes."""
    nodes = [chr(ord("a") + index) for index, size in enumerate(sizes) for _ in range(size)]
    return {number: node for number, node in enumerate(nodes) if node not in without}


def chosen(
    sizes: tuple[int, ...], nodes: dict[int, str], own: int = 0, min_nodes: int = 0
) -> tuple[str, dict[int, int]]:
    """The nodes in their order, and the numbers that differ from those before."""
    choice = choose_nodes(sizes, nodes, own=own, min_nodes=min_nodes, tasks=100)
    assert sorted(choice.numbers.values())[: sum(choice.sizes)] == list(range(sum(choice.sizes)))
    changed = {task: new for task, new in choice.numbers.items() if task != new}
    return "".join(place.node for place in choice.places), changed


@pytest.mark.parametrize(
    ("sizes", "nodes", "expected"),
    [
        ((2, 2), there(2, 2), ("ab", {})),
        ((2, 2), there(2, 2, 2), ("ab", {})),
        ((2, 2), there(2, 2, 2, without="b"), ("ac", {4: 2, 5: 3})),
        ((1, 1, 1), there(1, 1, 1, 1, 1, without="bc"), ("ade", {3: 1, 4: 2})),
        # the first spare node lacks a task
        ((2, 2), {0: "a", 1: "a", 5: "c", 6: "d", 7: "d"}, ("ad", {6: 2, 7: 3})),
        # a spare node may have more tasks
        ((2, 1), there(2, 1, 2, without="b"), ("ac", {3: 2})),
        # a spare node is used before any place is left out
        ((1, 1, 1, 1), there(1, 1, 1, 1, 1, without="bc"), ("aed", {4: 1, 3: 2})),
        ((1, 1, 1), there(1, 1, 1, without="b"), ("ac", {2: 1})),
        ((2, 2, 2), there(2, 2, 2, without="b"), ("ac", {4: 2, 5: 3})),
        ((3, 1, 2), there(3, 1, 2, without="b"), ("ac", {4: 3, 5: 4})),
        # one task of b is lost, and the other one is given up
        ((2, 2, 2), {0: "a", 1: "a", 3: "b", 4: "c", 5: "c"}, ("ac", {4: 2, 5: 3})),
        # a waiting task keeps waiting, after the last rank
        ((2, 2, 2), {0: "a", 1: "a", 4: "c", 5: "c", 7: "d"}, ("ac", {4: 2, 5: 3, 7: 4})),
    ],
)
def test_nodes_that_are_whole_stay_in_their_order(
    sizes: tuple[int, ...], nodes: dict[int, str], expected: tuple[str, dict[int, int]]
) -> None:
    assert chosen(sizes, nodes, min_nodes=2) == expected


@pytest.mark.parametrize(
    ("sizes", "nodes", "own", "expected"),
    [
        # a spare node's task takes over from rank 0
        ((2, 2), there(2, 2, 2, without="a"), 4, ("cb", {4: 0, 5: 1})),
        ((1, 1), there(1, 1, 1, 1, without="ab"), 2, ("cd", {2: 0, 3: 1})),
        # a rank does
        ((1, 1, 1), there(1, 1, 1, without="a"), 1, ("bc", {1: 0, 2: 1})),
        ((2, 2, 2), there(2, 2, 2, without="a"), 2, ("bc", {2: 0, 3: 1, 4: 2, 5: 3})),
        # b is lost, too
        ((1,) * 4, there(1, 1, 1, 1, without="ab"), 2, ("cd", {2: 0, 3: 1})),
        # rank 0 is where the one that takes over is, whoever comes before
        ((1, 1, 1), there(1, 1, 1, without="a"), 2, ("cb", {2: 0})),
        # a spare node has come after all
        ((1, 1, 1), there(1, 1, 1, 1, without="a"), 1, ("bdc", {1: 0, 3: 1})),
    ],
)
def test_who_takes_over_is_rank_0(
    sizes: tuple[int, ...],
    nodes: dict[int, str],
    own: int,
    expected: tuple[str, dict[int, int]],
) -> None:
    assert chosen(sizes, nodes, own, min_nodes=2) == expected


@pytest.mark.parametrize(
    ("sizes", "nodes", "own", "min_nodes", "said"),
    [
        ((2, 2), there(2, 2, without="b"), 0, 0, "no spare node is left for ranks 2-3; expected"),
        ((1,) * 3, there(1, 1, 1, without="bc"), 0, 2, "1 of 3 nodes are left; expected 2 or more"),
        ((2, 2), {0: "a", 2: "b", 3: "b"}, 0, 1, "no spare node is left for rank 1;"),
        ((2, 2), {2: "b", 3: "b", 4: "c"}, 4, 0, "no spare node is left for rank 1;"),
        ((2, 2, 2), {2: "b", 4: "c", 5: "c"}, 2, 1, "no spare node is left for ranks 1,3;"),
    ],
)
def test_too_few_nodes_are_refused(
    sizes: tuple[int, ...], nodes: dict[int, str], own: int, min_nodes: int, said: str
) -> None:
    with pytest.raises(RendezvousError, match=f"^{said}"):
        choose_nodes(sizes, nodes, own=own, min_nodes=min_nodes, tasks=100)


@pytest.mark.parametrize(
    ("sizes", "nodes", "left", "expected"),
    [
        # it has a number after those that have waited, and no rank yet
        ((1, 1), {0: "a", 1: "b", 3: "d", 5: "c"}, (), ("ab", {3: 2, 5: 3})),
        ((2, 2), {0: "a", 1: "a", 2: "b", 3: "b", 8: "c", 9: "c"}, (), ("ab", {8: 4, 9: 5})),
        # other spare nodes are used before
        ((1, 1), {0: "a", 3: "d", 5: "c"}, (), ("ad", {3: 1, 5: 2})),
        ((1, 1), {0: "a", 5: "c"}, (), ("ac", {5: 1})),
        # it takes no rank in the start that follows its failure
        ((1, 1, 1), {0: "a", 1: "b", 7: "c"}, ("c",), ("ab", {7: 2})),
        ((1, 1), {0: "a", 3: "d", 6: "b"}, ("b",), ("ad", {3: 1, 6: 2})),
        # unless the one that was to take its place has not come
        ((1, 1), {0: "a", 6: "b"}, ("b",), ("ab", {6: 1})),
        ((1, 1, 1), {0: "a", 6: "b"}, ("b",), ("ab", {6: 1})),
    ],
)
def test_a_node_that_comes_back_is_the_last_spare_one(
    sizes: tuple[int, ...],
    nodes: dict[int, str],
    left: tuple[str, ...],
    expected: tuple[str, dict[int, int]],
) -> None:
    """Of the five numbers, or eight with two tasks a node, it has none before."""
    tasks = 5 if max(sizes) == 1 else 8
    choice = choose_nodes(sizes, nodes, own=0, min_nodes=2, tasks=tasks, left=left)
    changed = {task: new for task, new in choice.numbers.items() if task != new}
    assert ("".join(place.node for place in choice.places), changed) == expected
    assert max(choice.numbers.values()) < tasks


@given(
    sizes=st.lists(st.integers(1, 3), min_size=2, max_size=6),
    spare=st.integers(0, 2),
    lost=st.sets(st.integers(1, 20)),
    min_nodes=st.integers(0, 3),
)
def test_no_rank_is_given_twice(
    sizes: list[int], spare: int, lost: set[int], min_nodes: int
) -> None:
    """And each place is on one node, which is whole."""
    everything = there(*sizes, *([3] * spare))
    nodes = {number: node for number, node in everything.items() if number not in lost}
    try:
        choice = choose_nodes(tuple(sizes), nodes, own=0, min_nodes=min_nodes, tasks=100)
    except RendezvousError:
        return
    assert max(Counter(choice.numbers.values()).values()) == 1
    assert choice.numbers.keys() <= nodes.keys()
    assert len({place.node for place in choice.places}) == len(choice.places)
    assert len(choice.places) >= (min_nodes or len(sizes))
    for place in choice.places:
        assert {nodes[task] for task in place.tasks} == {place.node}
        assert len(place.tasks) == len(place.ranks)
