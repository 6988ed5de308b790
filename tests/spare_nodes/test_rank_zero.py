"""Which nodes are left, and who has to come to the next start: of five nodes with two tasks each
two are spare.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from srunddp.spare_nodes.lease import Lease
from srunddp.spare_nodes.rank_zero import RankZeroSpareNodes
from srunddp.supervisor.failure import FailureCategory, GpuFault, GpuFaultKind
from srunddp.supervisor.messages import Pong
from srunddp.supervisor.root_cause import Ending, RootCause
from tests.support.connections import Clock, FakeConnection

RANKS = 6
TASKS = 10
A, B, C, D, E = (f"node0{number}" for number in range(1, 6))


class Nodes(RankZeroSpareNodes):
    """With connections, that a test ends, and its clock."""

    def __init__(
        self, tasks: int = TASKS, ranks: int = RANKS, min_nodes: int = 0, **more: Any
    ) -> None:
        self.ends: dict[int, Any] = {rank: FakeConnection() for rank in range(1, tasks)}
        self.clock = Clock()
        nodes = {number: f"node0{number // 2 + 1}" for number in range(tasks)}
        leases = {number: Lease(9.0, self.clock) for number in self.ends}
        numbers = frozenset(range(ranks, tasks))
        super().__init__(
            nodes,
            numbers,
            self.ends,
            leases,
            self.clock,
            can_move=True,
            min_nodes=min_nodes,
            **more,
        )

    def end(self, *ranks: int, lost: bool = False) -> None:
        for rank in ranks:
            self.ends[rank].open = False
            self.ends[rank].lost = lost

    def ends_at(self) -> float:
        return self.majority_ends(sum(each.open for each in self.ends.values()))


def cause(node: str, ending: Ending = Ending.FAILED) -> RootCause:
    return RootCause((0,), node, "boom", 1, ending)


@pytest.mark.parametrize(
    ("ended", "found", "last", "left"),
    [
        ((), cause(B), "", set()),
        ((), cause(B), A, set()),
        ((), cause(B), B, {B}),  # twice in a row
        ((), cause(A), A, {A}),
        ((), cause(B, Ending.LOST), "", {B}),
        ((), cause(A, Ending.LOST), "", {A}),
        ((3,), cause(B), "", {B}),  # srunddp itself was killed there
        ((3, 4), cause(B), "", {B, C}),
        ((6, 7), cause(B), "", set()),  # a spare one
        ((6, 8), cause(B), B, set()),  # no spare one is whole
    ],
)
def test_the_nodes_whose_ranks_move(
    ended: tuple[int, ...], found: RootCause, last: str, left: set[str]
) -> None:
    nodes = Nodes()
    nodes.end(*ended)
    assert nodes.left(found, last) == left


def cut(*without_way: str) -> RootCause:
    return RootCause((), "", "cannot reach each other", 69, without_way=without_way)


FOLLOWS = RootCause((2,), B, "closed by peer", 1, follows=True)
NOBODY = RootCause((), "", "all ranks wait", 124)


@pytest.mark.parametrize(
    ("ended", "found", "last", "left"),
    [
        ((), cut(B), "", {B}),
        ((), cut(A), "", {A}),
        ((), cut(B, C), "", {B, C}),
        ((), cut(A, B, C), "", set()),  # there are two spare ones
        ((6,), cut(B), "", {B}),
        ((6,), cut(B, C), "", set()),
        ((6,), cut(B, C), B, set()),
        ((6,), cut(B, C), C, set()),
        ((3, 4, 6), cut(B, C), "", {B, C}),  # srunddp itself was killed on both
        ((), FOLLOWS, B, set()),
        ((), FOLLOWS, "", set()),
        ((), NOBODY, "", set()),
        ((), NOBODY, B, set()),
    ],
)
def test_the_nodes_without_a_way_move_if_there_is_one_for_each_and_no_other_does(
    ended: tuple[int, ...], found: RootCause, last: str, left: set[str]
) -> None:
    nodes = Nodes()
    nodes.end(*ended)
    assert nodes.left(found, last) == left


def of_gpus(node: str, *faults: tuple[str, GpuFaultKind]) -> RootCause:
    found = [GpuFault(0, "GPU-a", "made up", kind.value, node=where) for where, kind in faults]
    return cause(node).with_gpu_faults(found)


HARDWARE = GpuFaultKind.HARDWARE
PROGRAM = GpuFaultKind.PROGRAM


@pytest.mark.parametrize(
    ("ended", "found", "last", "left"),
    [
        ((), of_gpus(B, (B, HARDWARE)), "", {B}),  # at once
        ((), of_gpus(A, (A, HARDWARE)), "", {A}),
        ((), of_gpus(B, (B, PROGRAM)), B, set()),  # however often
        ((), of_gpus(B, (B, PROGRAM), (B, HARDWARE)), "", {B}),
        ((), of_gpus(B, (B, GpuFaultKind.OTHER)), "", set()),
        ((), of_gpus(B, (B, GpuFaultKind.OTHER)), B, {B}),  # twice, as without it
        ((), of_gpus(B, (B, HARDWARE), (C, HARDWARE)), "", {B, C}),
        ((6,), of_gpus(B, (B, HARDWARE), (C, HARDWARE)), "", {B}),  # one spare one is whole
        ((6, 8), of_gpus(B, (B, HARDWARE)), "", set()),
    ],
)
def test_a_node_whose_gpu_has_failed_is_left_at_the_first_failure(
    ended: tuple[int, ...], found: RootCause, last: str, left: set[str]
) -> None:
    nodes = Nodes()
    nodes.end(*ended)
    assert nodes.left(found, last) == left


def test_where_no_other_node_has_ranks_none_moves() -> None:
    assert Nodes(tasks=4, ranks=2).left(cause(A), A) == set()


@pytest.mark.parametrize(
    ("found", "last", "min_nodes", "left"),
    [
        (cause(B), B, 2, {B}),  # twice in a row, and no spare one
        (cause(B), "", 2, set()),
        (cause(B), B, 3, set()),
        (cut(B), "", 2, {B}),
        (cut(B, C), "", 2, set()),
        (cut(B, C), "", 1, {B, C}),
        (cause(B, Ending.LOST), "", 3, {B}),
    ],
)
def test_with_fewer_nodes_allowed_one_is_left_without_a_spare_one(
    found: RootCause, last: str, min_nodes: int, left: set[str]
) -> None:
    assert Nodes(tasks=6, min_nodes=min_nodes).left(found, last) == left


@pytest.mark.parametrize(
    ("tasks", "min_nodes", "left", "said"),
    [
        (6, 0, {B}, "no spare node is left"),
        (8, 0, {B}, ""),
        (8, 0, {B, C}, "no spare node is left"),
        (6, 2, {B}, ""),
        (6, 3, {B}, "2 nodes are left, and --min-nodes is 3"),
        (6, 2, {B, C}, "1 node is left, and --min-nodes is 2"),
        (8, 2, {B, C}, ""),
        (6, 3, set(), ""),
    ],
)
def test_what_is_lacking_is_said(tasks: int, min_nodes: int, left: set[str], said: str) -> None:
    assert Nodes(tasks=tasks, min_nodes=min_nodes).shortage(left) == said


@pytest.mark.parametrize(
    ("waiting", "said"), [(1, "2 nodes are left, and --min-nodes is 3"), (2, ""), (3, "")]
)
def test_a_node_that_is_back_and_waits_takes_the_place_of_one(waiting: int, said: str) -> None:
    nodes = Nodes(tasks=6, min_nodes=3, waiting=lambda: waiting)
    assert nodes.shortage({B}) == said
    assert nodes.shortage({B, C}) != ""


BACK = {A: (20, 21), B: (22, 23), C: (24, 25)}


@pytest.mark.parametrize(
    ("ended", "found", "back"),
    [
        ((), cause(B), {B}),
        ((3,), cause(B), set()),  # it has lost a task
        ((), of_gpus(B, (B, HARDWARE)), set()),
        ((), of_gpus(B, (B, PROGRAM)), {B}),
        ((), replace(cause(B), category=FailureCategory.IMPORT_FAILED), set()),
    ],
)
def test_a_node_comes_back_unless_it_would_fail_again(
    ended: tuple[int, ...], found: RootCause, back: set[str]
) -> None:
    """And those that come back are expected, as they are known to be there."""
    nodes = Nodes(returning_numbers=BACK)
    nodes.end(*ended)
    assert nodes.returning(found, {B}) == back
    assert Nodes().returning(found, {B}) == set()
    nodes.note_end({B}, back, [1, 2, 4, 5])
    known = nodes.next_start()
    assert known.expected == ((1, 4, 5, 22, 23) if back else (1, 4, 5))
    assert known.left == (B,)


def test_a_spare_node_is_free_while_all_of_its_tasks_are_there() -> None:
    nodes = Nodes()
    assert [nodes.free(without) for without in ((), (B,), (D,), (D, E))] == [2, 2, 1, 0]
    nodes.end(6)
    assert nodes.free(()) == 1
    nodes.end(9, lost=True)
    assert nodes.free(()) == 0


def test_of_those_that_are_lost_some_may_be_on_another_side() -> None:
    """And of those that have ended none."""
    nodes = Nodes()
    clock = nodes.clock
    assert (nodes.quorum, nodes.ends_at()) == (6, 1009.0)
    clock.now += 3.0
    for rank in (1, 2, 3, 4):
        asked_by = "SIGTERM" if rank == 4 else ""
        nodes.answer(rank, clock.ping(), asked_by)
        assert nodes.ends[rank].messages == [Pong(asked_by, 1003.0, 1003.0)]
    assert nodes.ends_at() == 1009.0, "four of nine others are no majority with rank 0"
    nodes.end(8, 9, lost=True)
    assert (nodes.quorum, nodes.ends_at()) == (6, 1009.0)
    nodes.end(6, 7)
    assert (nodes.quorum, nodes.ends_at()) == (5, 1012.0)
    nodes.end(*range(1, TASKS))
    assert (nodes.quorum, nodes.ends_at()) == (1, float("inf"))


@pytest.mark.parametrize(("left", "until"), [({B}, 1015.0), (set(), 0.0)])
def test_the_worker_of_a_lost_node_may_run_for_its_lease(left: set[str], until: float) -> None:
    """But not that of one whose connection was closed."""
    nodes = Nodes()
    clock = nodes.clock
    clock.now += 3.0
    nodes.answer(3, clock.ping(), "")
    nodes.end(2, 4)
    assert nodes.ended_by(left) == until
    clock.now += 2.0
    nodes.answer(5, clock.ping(), "")
    nodes.end(5, lost=True)
    assert nodes.ended_by(left) == 1017.0
