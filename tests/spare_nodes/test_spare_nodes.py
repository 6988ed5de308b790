"""What one task hands from a start to the next with spare nodes: of three nodes with one task each
the last is spare.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import pytest

from srunddp.bootstrap.environment.detect import detect
from srunddp.bootstrap.network.ifaces_entry import DEFAULT
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.bootstrap.rendezvous.protocol import bind_store, listen
from srunddp.bootstrap.rendezvous.rank_setup import (
    RankSetup,
    Rejoin,
    RendezvousOptions,
    SpareNodeTerms,
)
from srunddp.errors import (
    ConfigError,
    CutOffError,
    PeerError,
    ReassignedError,
    RendezvousError,
    Scope,
    SrunddpError,
)
from srunddp.spare_nodes.layout import in_next_start, set_spare_nodes
from srunddp.spare_nodes.spare_nodes import SpareNodes
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.failure_monitor import FailureMonitor
from srunddp.supervisor.limits import Limits
from srunddp.supervisor.node_replacement import NextStart
from srunddp.supervisor.root_cause import Ending, RootCause
from srunddp.util.messages import Message
from tests.support.launchers import PID, step

TAKEOVER = "where the deputies listen"
RETURNS_AT = "where rank 0 listens all the time, and the deputies"
LOST = RootCause((0,), "n1", "no answer for 15 s", 255, Ending.LOST)
NODES = {0: "n1", 1: "n2", 2: "n3"}
AGAIN = Rejoin(generation=1, published="where rank 0 listens", channel="slurm", run="1207.0.0")


class Carrier(Message):
    """Messages of this test."""


@dataclass(frozen=True)
class Carried(Carrier, kind="carried"):
    """What a restart hands over, as one line of text."""

    rejoin: Rejoin


class Monitor(FailureMonitor):
    """What a failure monitor answers when its start is over."""

    def __init__(self, cause: RootCause | None = None, *, is_first_deputy: bool = False) -> None:
        super().__init__(None)
        self.root_cause = cause
        self.deputy = is_first_deputy

    def next_start(self) -> NextStart:
        return NextStart(expected=(1, 2), quorum=2, not_before=1234.5, left=("n9",))

    def is_first_deputy(self) -> bool:
        return self.deputy


def spare_nodes(
    task: int, restarts: int = 3, rejoin: Rejoin | None = None, *, fewest: int = 0
) -> SpareNodes:
    """One of three nodes is spare, or so many are enough."""
    variables = {
        "SLURM_STEP_NODELIST": "n[1-3]",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "1,1,1",
        "SLURM_GTIDS": "",
    }
    detected = detect(step(task, **variables), pid=PID)
    environment = set_spare_nodes(detected, 0 if fewest else 1, fewest)
    options = RendezvousOptions(max_restarts=restarts, rejoin=rejoin)
    place = SelectedInterface("lo", "127.0.0.1", {}, "")
    return SpareNodes(
        setup=RankSetup(options, environment, (DEFAULT,), place),
        lost_after=15.0,
        restart_grace=10.0,
        folder=None,
        say=lambda _: None,
        limits=Limits(lease_ends_within=3.0),
    )


def meeting(*vacant: int) -> RendezvousInfo:
    return RendezvousInfo(
        master_addr="127.0.0.1",
        master_port=1,
        run="1207.0.0",
        takeover=TAKEOVER,
        returns_at=RETURNS_AT,
        vacant=vacant,
        master_node="n1",
    )


@pytest.fixture
def deputy() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.mark.parametrize(("done", "moves"), [(0, True), (2, True), (3, False)])
def test_in_the_last_start_no_rank_moves(done: int, moves: bool) -> None:
    """Nobody would go on without a rank: it needs no lease."""
    rejoin = replace(AGAIN, generation=done) if done else None
    start = spare_nodes(1, restarts=3, rejoin=rejoin).of_start(NODES, meeting())
    assert start.numbers == {2}
    assert bool(start.lease()) == moves
    assert start.takeover == (TAKEOVER if moves else "")
    assert start.replacement({}).can_move == moves


class There:
    """The connection to a task that is there."""

    open = True
    lost = False


@pytest.mark.parametrize(("done", "returning"), [(0, {"n2"}), (1, {"n2"}), (2, set()), (3, set())])
def test_no_node_comes_back_to_the_last_start(done: int, returning: set[str]) -> None:
    """Nobody needs a spare node there; and who does not find a run that has ended, ends with 69."""
    rejoin = replace(AGAIN, generation=done) if done else None
    start = spare_nodes(0, restarts=3, rejoin=rejoin).of_start(NODES, meeting())
    connections = cast(dict[int, SupervisorConnection], {1: There(), 2: There()})
    assert start.replacement(connections).returning(LOST, {"n2"}) == returning


def test_a_task_that_misses_the_last_start_does_not_look_for_another() -> None:
    last = replace(AGAIN, generation=3)
    rejoin = spare_nodes(1, rejoin=last).rejoin(last, Monitor(), meeting())
    assert spare_nodes(1, rejoin=rejoin).rejoin_after(CUT_OFF[0]) is None


def test_a_restart_goes_by_what_the_start_before_has_come_to() -> None:
    rejoin = spare_nodes(1).rejoin(AGAIN, Monitor(), meeting())
    assert rejoin.published == AGAIN.published
    assert rejoin.spare_nodes == SpareNodeTerms(
        rank=1,
        ranks_per_node="1(x2)",
        lost_after=15.0,
        within=15.0 + 3.0 + 10.0,
        expected=(1, 2),
        not_before=1234.5,
        quorum=2,
        returns_at=RETURNS_AT,
        left=("n9",),
    )


def test_the_first_deputy_on_a_spare_node_takes_over(deputy: socket.socket) -> None:
    """It expects those that were there but for rank 0's node, and needs more than half of all."""
    gone = replace(AGAIN, published=TAKEOVER)
    number = deputy.fileno()
    it = spare_nodes(2)
    it = replace(it, setup=replace(it.setup, deputy=deputy))
    rejoin = it.rejoin(gone, Monitor(LOST, is_first_deputy=True), meeting())
    terms = rejoin.spare_nodes
    assert rejoin.descriptor == number
    assert terms
    assert (terms.rank, terms.takes_over, terms.lost) == (0, True, ("n1", "no answer for 15 s"))
    assert (terms.expected, terms.quorum, terms.left) == ((1,), 2, ("n1",))
    assert Carrier.decode(Carried(rejoin).encode()) == Carried(rejoin)
    socket.socket(fileno=number).close()


@pytest.mark.parametrize(
    ("task", "published", "is_first", "listens"),
    [
        (2, AGAIN.published, True, True),  # rank 0 is there
        (1, TAKEOVER, True, True),  # a rank has its own node's ranks
        (2, TAKEOVER, False, True),
        (2, TAKEOVER, True, False),
    ],
)
def test_nobody_else_takes_over(
    task: int, published: str, is_first: bool, listens: bool, deputy: socket.socket
) -> None:
    it = spare_nodes(task)
    it = replace(it, setup=replace(it.setup, deputy=deputy if listens else None))
    rejoin = it.rejoin(
        replace(AGAIN, published=published), Monitor(LOST, is_first_deputy=is_first), meeting()
    )
    assert rejoin.descriptor is None
    assert rejoin.spare_nodes
    assert (rejoin.spare_nodes.rank, rejoin.spare_nodes.takes_over) == (task, False)


def test_a_task_that_gets_a_rank_comes_again_as_that_one() -> None:
    """To the same rendezvous, and with all else that it knew."""
    rejoin = spare_nodes(2).rejoin(AGAIN, Monitor(), meeting())
    again = spare_nodes(2, rejoin=rejoin).rejoin_as(ReassignedError(1, "1(x2)", 0, 1))
    assert rejoin.spare_nodes
    assert again == replace(rejoin, spare_nodes=replace(rejoin.spare_nodes, rank=1))


@pytest.mark.parametrize(("fewest", "takes_over"), [(2, True), (3, False)])
def test_a_rank_takes_over_where_a_node_may_be_left_out(
    fewest: int, takes_over: bool, deputy: socket.socket
) -> None:
    """It tells the next start which number it had."""
    it = spare_nodes(1, fewest=fewest)
    it = replace(it, setup=replace(it.setup, deputy=deputy))
    gone = replace(AGAIN, published=TAKEOVER)
    rejoin = it.rejoin(gone, Monitor(LOST, is_first_deputy=True), meeting())
    terms = rejoin.spare_nodes
    descriptor = rejoin.descriptor
    assert terms
    assert terms.takes_over == takes_over
    if takes_over:
        assert (terms.rank, terms.number, terms.expected, terms.quorum) == (0, 1, (2,), 2)
        assert (terms.ranks_per_node, terms.layout) == ("1(x3)", 0)
        assert descriptor is not None
        socket.socket(fileno=descriptor).close()


def test_a_task_of_a_given_up_node_comes_back_behind_all_others() -> None:
    """To where rank 0 listens all the time, also when it takes no part in a takeover."""
    monitor = Monitor(is_first_deputy=True)
    monitor.returns = True
    for published in (AGAIN.published, TAKEOVER):
        rejoin = spare_nodes(1).rejoin(replace(AGAIN, published=published), monitor, meeting())
        assert rejoin.published == RETURNS_AT
        assert rejoin.spare_nodes
        assert (rejoin.spare_nodes.rank, rejoin.spare_nodes.is_awaited) == (3 + 1, True)
        environment = in_next_start(spare_nodes(1).setup.environment, rejoin.spare_nodes)
        assert environment.is_returning
        assert environment.is_spare


CUT_OFF = [
    RendezvousError("rank 1 did not reach rank 0"),
    CutOffError("the ranks of n2 have gone to another node", scope=Scope.JOB),
]
OVER = [
    RendezvousError("1 of 3 nodes are left", scope=Scope.JOB),
    PeerError("rank 2 failed", code=7),
    ConfigError("processes 12 of the start before cannot be killed"),
]


@pytest.mark.parametrize("error", [*CUT_OFF, *OVER], ids=str)
def test_who_has_not_met_the_others_comes_back_unless_the_run_is_over(error: SrunddpError) -> None:
    """One that tries already does not try again, and none does in the first start."""
    rejoin = spare_nodes(1).rejoin(replace(AGAIN, published=TAKEOVER), Monitor(LOST), meeting())
    again = spare_nodes(1, rejoin=rejoin).rejoin_after(error)
    if error in OVER:
        assert again is None
        return
    assert again
    assert again.published == RETURNS_AT
    assert again.spare_nodes
    assert (again.spare_nodes.rank, again.spare_nodes.is_awaited) == (4, False)
    returning = spare_nodes(1, rejoin=again)
    environment = in_next_start(returning.setup.environment, again.spare_nodes)
    returning = replace(returning, setup=replace(returning.setup, environment=environment))
    assert returning.rejoin_after(error) is None
    assert spare_nodes(1).rejoin_after(error) is None
    taken_back = returning.rejoin_as(ReassignedError(2, "1(x2)", 1, 3))
    assert (taken_back.generation, taken_back.published) == (3, RETURNS_AT)
    assert taken_back.spare_nodes
    assert (taken_back.spare_nodes.rank, taken_back.spare_nodes.layout) == (2, 1)


def test_a_task_that_is_numbered_anew_knows_the_new_world() -> None:
    rejoin = spare_nodes(2, fewest=2).rejoin(AGAIN, Monitor(), meeting())
    again = spare_nodes(2, rejoin=rejoin, fewest=2).rejoin_as(ReassignedError(1, "1(x2)", 1, 1))
    assert rejoin.spare_nodes
    assert again == replace(
        rejoin,
        spare_nodes=replace(rejoin.spare_nodes, rank=1, ranks_per_node="1(x2)", layout=1),
    )


def test_rank_0_goes_on_to_listen_where_the_others_come_again() -> None:
    """What it did when it took over is not done twice."""
    terms = replace(
        _terms(spare_nodes(1, fewest=2)),
        takes_over=True,
        number=1,
        lost=("n1", "no answer"),
        rank=0,
    )
    rejoin = replace(AGAIN, spare_nodes=terms)
    it = spare_nodes(1, rejoin=rejoin, fewest=2)
    held = bind_store("127.0.0.1", listen("127.0.0.1", [0]), [0])
    number = held.rendezvous.fileno()
    it = replace(it, setup=replace(it.setup, held=held))
    again = it.rejoin_as(ReassignedError(0, "1(x2)", 1, 1, (1,)))
    assert again.descriptor == number
    found = again.spare_nodes
    assert found
    assert (found.takes_over, found.number, found.lost) == (False, 0, None)
    assert (found.expected, found.layout, found.quorum) == ((1,), 1, terms.quorum)
    socket.socket(fileno=number).close()
    held.store.close()


def _terms(it: SpareNodes) -> SpareNodeTerms:
    found = it.rejoin(AGAIN, Monitor(), meeting()).spare_nodes
    assert found
    return found
