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
from srunddp.errors import PeerError, ReassignedError, RendezvousError, UnavailableError
from srunddp.spare_nodes.server import SpareNodeServer
from srunddp.util.messages import send
from tests.bootstrap.rendezvous.test_client import LONG, RankZero, greeted, hello, rank_zero, soon
from tests.support.starting import until

TASKS = 8
SOON = 2.0  # after which who has not come is given up


@contextmanager
def spare_node_server(*expected: int, node: str = "n1", **changes: Any) -> Iterator[RankZero]:
    """Rank 0, which waits for these numbers; those from 4 on are of spare nodes, if nothing else is
    said.
    """
    known: dict[str, Any] = {
        "sizes": (2, 2),
        "within": LONG,
        "not_before": 0.0,
        "quorum": 2,
        "lost_after": 5.0,
    }
    known |= {"expected": {*expected}, **changes}
    server = partial(SpareNodeServer, spares=TASKS - sum(known["sizes"]), **known)
    with rank_zero(TASKS, node, kind=server) as it:
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
    with pytest.raises(PeerError, match=f"the ranks of {node} have gone to another node") as caught:
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
    """Of three nodes two are lost."""
    with spare_node_server(1, 2, 3, 4, 6, 7, sizes=(2, 2, 2), within=SOON) as server:
        refused(server, come(server, 1, 6, 7), "no spare node is left for ranks 4-5")
        assert server.said[0] == "ranks 2-3 go to n4"


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
    with spare_node_server(2, 3, 5, 6, 7, node="n3") as server:
        dismissed(come(server, 1)[0], "n1")
        come(server, 2, 3, 5, 6, 7)
        assert nodes(server) == "n3 n3 n2 n2"
    with spare_node_server(2, 3, 6, 7, node="n3") as server:
        refused(server, come(server, 2, 3, 6, 7), "no spare node is left for rank 1")
