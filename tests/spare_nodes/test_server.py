"""How the ranks meet again when nodes are lost: of four nodes with two tasks each, the last ones
are spare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from srunddp.bootstrap.rendezvous.client import join
from srunddp.bootstrap.rendezvous.messages import Here, RendezvousInfo
from srunddp.bootstrap.rendezvous.protocol import decode_advertisement
from srunddp.errors import CutOffError, ReassignedError, RendezvousError, UnavailableError
from srunddp.spare_nodes.server import SpareNodeServer
from srunddp.util.messages import send
from tests.bootstrap.rendezvous.test_client import LONG, RankZero, greeted, hello, rank_zero, soon
from tests.support.starting import until

TASKS = 8
SOON = 2.0  # after which who has not come is given up


@contextmanager
def spare_node_server(*expected: int, node: str = "n1", **changes: Any) -> Iterator[RankZero]:
    """Rank 0, which waits for these numbers; those from 4 on are of spare nodes, if nothing else is
    said. It may be given its sockets.
    """
    known: dict[str, Any] = {
        "sizes": (2, 2),
        "within": LONG,
        "not_before": 0.0,
        "quorum": 2,
        "lost_after": 5.0,
    }
    known |= {"expected": {*expected}, **changes}
    held = known.pop("held", None)
    server = partial(SpareNodeServer, spares=TASKS - sum(known["sizes"]), **known)
    with rank_zero(TASKS, node, held=held, kind=server) as it:
        yield it


def come(server: RankZero, *numbers: int) -> list[Future[RendezvousInfo]]:
    """They come, and those that are told a rank come again as that one."""
    pool = ThreadPoolExecutor(TASKS)
    found = [pool.submit(_come, server, number) for number in numbers]
    pool.shutdown(wait=False)
    return found


def _come(server: RankZero, number: int) -> RendezvousInfo:
    one = replace(hello(number, TASKS, f"n{number // 2 + 1}"), deputy_port=7000 + number)
    try:
        connection, meeting = join([server.address], one, soon())
    except ReassignedError as error:
        connection, meeting = join([server.address], replace(one, rank=error.rank), soon())
    connection.close()
    return meeting


def here(server: RankZero, *numbers: int) -> bool:
    return {*numbers} <= server.rendezvous.connections.keys()


def nodes(server: RankZero) -> str:
    """Those of the four ranks."""
    return " ".join(server.result().nodes[rank] for rank in range(4))


def dismissed(one: Future[RendezvousInfo], node: str = "n2") -> None:
    with pytest.raises(
        CutOffError, match=f"the ranks of {node} have gone to another node"
    ) as caught:
        one.result(LONG)
    assert caught.value.exit_code == 69


def refused(server: RankZero, ends: list[Future[RendezvousInfo]], said: str) -> None:
    assert server.refusal().startswith(said)
    for end in ends:
        with pytest.raises(RendezvousError, match=f"^{said}"):
            end.result(LONG)


def test_all_that_are_expected_come_and_meet() -> None:
    """The tasks of spare nodes are no ranks; a deputy is on each node, and those of spare nodes are
    the first.
    """
    with spare_node_server(1, 2, 3, 4, 5, 6) as server:
        meetings = [each.result(LONG) for each in come(server, 1, 2, 3, 4, 5, 6)]
        assert [(each.node_rank, each.nnodes) for each in meetings[:3]] == [(0, 2), (1, 2), (1, 2)]
        assert [rank for rank, _, _ in meetings[-1].deputies] == [4, 6, 1, 2]
        assert [each.port for each in decode_advertisement(meetings[-1].takeover).addresses] == [
            7004,
            7006,
            7001,
            7002,
        ]
        assert (nodes(server), meetings[-1].vacant, server.said) == ("n1 n1 n2 n2", (7,), [])


@pytest.mark.parametrize("mates", [[3], []])
def test_the_ranks_of_a_node_from_which_one_is_missing_move(mates: list[int]) -> None:
    """All of them: those of that node that have come are dismissed; and to a spare node that is
    whole.
    """
    began = time.monotonic()
    with spare_node_server(1, 2, 3, 5, 6, 7, within=SOON) as server:
        others = come(server, 1, 5, 6, 7)
        ends = come(server, *mates)
        assert [each.result(LONG).node_rank for each in others] == [0, 0, 1, 1]
        assert (nodes(server), others[0].result().vacant) == ("n1 n1 n4 n4", (4, 6, 7))
        assert server.said == ["ranks 2-3 go to n4"]
        for end in ends:
            dismissed(end)
    assert time.monotonic() - began > SOON


def test_where_no_spare_node_is_left_all_end() -> None:
    """Of three nodes two are lost, and no rank moves first."""
    with spare_node_server(1, 2, 3, 4, 6, 7, sizes=(2, 2, 2), within=SOON) as server:
        refused(server, come(server, 1, 6, 7), "no spare node is left for ranks 4-5")
        assert not any("go to" in line for line in server.said)


@pytest.mark.parametrize("quorum", [4, 5])
def test_those_that_are_not_more_than_half_of_all_end(quorum: int) -> None:
    """Others may have a rank 0 of their own. Whether there are enough is asked once, though some
    come again later.
    """
    called: list[int] = []
    with spare_node_server(
        1, 2, 3, 4, 5, within=SOON, quorum=quorum, on_quorum=lambda: called.append(1)
    ) as server:
        ends = come(server, 1, 4, 5)
        if quorum == 5:
            refused(server, ends, "4 tasks have met after the loss of a node")
        else:
            assert nodes(server) == "n1 n1 n3 n3"
    assert called == [1] * (quorum == 4)


def test_what_is_wrong_with_enough_tasks_is_told_to_all() -> None:
    def refuse() -> None:
        raise UnavailableError("srun is gone")

    with spare_node_server(1, 2, 3, on_quorum=refuse) as server:
        ends: list[Callable[[], object]] = [
            partial(end.result, LONG) for end in come(server, 1, 2, 3)
        ]
        for one in (server.result, *ends):
            with pytest.raises((UnavailableError, RendezvousError), match="srun is gone"):
                one()


def test_the_workers_of_a_lost_node_are_waited_for() -> None:
    not_before = time.monotonic() + 1.0
    with spare_node_server(1, 2, 3, not_before=not_before) as server:
        ends = come(server, 1, 2, 3)
        until(lambda: here(server, 1, 2, 3))
        assert not any(each.done() for each in ends) or time.monotonic() > not_before
        assert server.result()
        assert time.monotonic() >= not_before


@pytest.mark.slow
def test_who_comes_back_from_a_node_that_was_left_is_dismissed() -> None:
    with spare_node_server(
        1, 2, 3, 4, 5, within=SOON, not_before=time.monotonic() + 3 * SOON
    ) as server:
        come(server, 1, 4, 5)
        until(lambda: here(server, 1, 2, 3))
        dismissed(come(server, 2)[0])
        assert nodes(server) == "n1 n1 n3 n3"


def test_who_is_lost_while_others_still_come_is_replaced() -> None:
    """At once: nobody waits for it."""
    with spare_node_server(1, 2, 3, 4, 5) as server:
        (mate, *_) = come(server, 3, 1, 4)
        with greeted(server, hello(2, TASKS, "n2")) as lost:
            send(lost, Here(""))
            until(lambda: here(server, 1, 2, 3, 4))
        until(lambda: not here(server, 2))
        come(server, 5)
        assert nodes(server) == "n1 n1 n3 n3"
        dismissed(mate)


def test_where_rank_0_is_new_the_others_on_its_node_go_with_it() -> None:
    with spare_node_server(2, 3, 5, 6, 7, node="n3", number=4) as server:
        dismissed(come(server, 1)[0], "n1")
        come(server, 2, 3, 5, 6, 7)
        assert nodes(server) == "n3 n3 n2 n2"
    with spare_node_server(2, 3, 6, 7, node="n3", number=4) as server:
        refused(server, come(server, 2, 3, 6, 7), "no spare node is left for rank 1")


def reassigned(one: Future[RendezvousInfo]) -> tuple[int, str]:
    error = one.exception(LONG)
    assert isinstance(error, ReassignedError), error
    return error.rank, error.ranks_per_node


def come_once(server: RankZero, *numbers: int) -> list[Future[RendezvousInfo]]:
    """They come, and do not come again as others."""
    pool = ThreadPoolExecutor(TASKS)
    found = [pool.submit(_come_once, server, number) for number in numbers]
    pool.shutdown(wait=False)
    return found


def _come_once(server: RankZero, number: int) -> RendezvousInfo:
    one = hello(number, TASKS, f"n{number // 2 + 1}")
    connection, meeting = join([server.address], one, soon())
    connection.close()
    return meeting


def test_without_a_spare_node_the_ranks_are_numbered_anew() -> None:
    """Rank 0 as well begins the start again, and expects the others by their new numbers."""
    with spare_node_server(1, 3, 4, 5, 6, 7, sizes=(2, 2, 2, 2), min_nodes=3) as it:
        mate, *ends = come_once(it, 3, 1, 4, 5, 6, 7)
        assert [reassigned(end) for end in ends] == [
            (number, "2(x3)") for number in (1, 2, 3, 4, 5)
        ]
        dismissed(mate)
        with pytest.raises(ReassignedError) as own:
            it.result()
        assert (own.value.rank, own.value.ranks_per_node) == (0, "2(x3)")
        assert own.value.expected == (1, 2, 3, 4, 5)
        assert it.said == [
            "no spare node is left for ranks 2-3: the run goes on with 6 ranks on 3 nodes"
        ]


def test_below_min_nodes_all_end() -> None:
    with spare_node_server(1, 4, 5, 6, 7, sizes=(2,) * 4, min_nodes=4) as it:
        refused(it, come_once(it, 1, 4, 5, 6, 7), "3 of 4 nodes are left; expected 4 or more")


def test_a_rank_that_takes_over_is_rank_0() -> None:
    """Its number of before is known, and those of rank 0's node are dismissed."""
    with spare_node_server(3, 4, 5, 6, 7, sizes=(2,) * 4, node="n2", number=2, min_nodes=3) as it:
        late = come_once(it, 1)[0]
        ends = come_once(it, 3, 4, 5, 6, 7)
        dismissed(late, "n1")
        assert [reassigned(end)[0] for end in ends] == [1, 2, 3, 4, 5]
        with pytest.raises(ReassignedError):
            it.result()


def test_no_lack_of_spare_nodes_is_named_where_only_the_order_changes() -> None:
    """The node of the new rank 0 has another size, and a spare one takes the place of the old."""
    with spare_node_server(2, 4, 5, sizes=(1, 2), node="n2", number=1, min_nodes=1) as it:
        ends = come_once(it, 2, 4, 5)
        assert [reassigned(end) for end in ends] == [(1, "2,1"), (2, "2,1"), (3, "2,1")]
        with pytest.raises(ReassignedError):
            it.result()
        assert it.said == [
            "rank 0 goes to n3",
            "the ranks are numbered anew: the run goes on with 3 ranks on 2 nodes",
        ]


def test_who_has_not_heard_of_the_new_numbers_is_dismissed() -> None:
    """Its number may be another task's now."""
    with spare_node_server(1, 2, 3, sizes=(2, 2)) as it:
        one = hello(2, TASKS, "n2")
        for stale in (replace(one, layout=1), replace(one, generation=1)):
            with pytest.raises(CutOffError, match="have gone to another node"):
                join([it.address], stale, soon())
        come(it, 1, 2, 3)
        assert nodes(it) == "n1 n1 n2 n2"


@pytest.mark.parametrize("may_shrink", [True, False])
def test_where_a_node_may_be_left_out_a_rank_can_take_over(may_shrink: bool) -> None:
    """But none on rank 0's node, which is left with it."""
    with spare_node_server(
        *range(1, 8), sizes=(2,) * 4, may_shrink=may_shrink, names_nodes=True
    ) as server:
        found = [each.result(LONG) for each in come(server, *range(1, 8))][-1]
        assert server.result()
        assert [rank for rank, _, _ in found.deputies] == (
            [2, 4, 6] if may_shrink else [1, 2, 4, 6]
        )
        assert bool(found.takeover) == may_shrink
        assert found.node_list == "n[1-4]"
