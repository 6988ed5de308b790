"""Rank 0 takes in every rank that comes, does without those that do not, and tells all how it
ended.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from srunddp.bootstrap.rendezvous.auth import Authenticator, HmacAuthenticator
from srunddp.bootstrap.rendezvous.client import join
from srunddp.bootstrap.rendezvous.protocol import Address, Hello, listen
from srunddp.check.coordinator import Coordinator, CoordinatorLostError, gather, serve
from srunddp.errors import RendezvousError
from tests.support.starting import LONG

WORLD = 3


def hello(rank: int, world_size: int = WORLD, pid: int = 1) -> Hello:
    return Hello("1207.0.0", rank, world_size, 0, f"node0{rank + 1}", "", pid)


def soon(seconds: float = LONG) -> float:
    return time.monotonic() + seconds


def listening() -> tuple[socket.socket, Address]:
    listener = listen("127.0.0.1", [0])
    return listener, Address(*listener.getsockname())


def answering(rank: int) -> Any:
    return lambda question: [rank, question["word"]]


@contextmanager
def gathered(
    *ranks: int, acts: Mapping[int, Any] = {}, world: int = WORLD, within: float = LONG
) -> Iterator[tuple[Coordinator, list[Future[int]]]]:
    """A coordinator and its clients, each rank in a thread."""
    listener, where = listening()

    def client(rank: int) -> int:
        return serve(
            join([where], hello(rank, world), soon(within))[0], acts.get(rank, answering(rank))
        )

    with ThreadPoolExecutor(world) as pool:
        clients = [pool.submit(client, rank) for rank in ranks]
        coordinator = gather(
            hello(0, world), [listener], Authenticator(), answering(0), soon(within)
        )
        try:
            yield coordinator, clients
        finally:
            coordinator.shutdown(0)


def test_a_rank_that_does_not_answer_in_time_is_asked_no_more() -> None:
    go = threading.Event()
    with gathered(1, 2, acts={1: lambda _: go.wait(LONG)}) as (coordinator, clients):
        assert coordinator.broadcast({"word": "slow"}, 1.5) == {0: [0, "slow"], 2: [2, "slow"]}
        assert coordinator.errors == {1: "no answer within 1.5 s"}
        go.set()
        assert coordinator.broadcast({"word": "next"}, LONG) == {0: [0, "next"], 2: [2, "next"]}
        assert coordinator.node_leaders == {"node01": 0, "node03": 2}
        with pytest.raises(CoordinatorLostError, match="rank 0 was lost: its process ended"):
            clients[0].result(LONG)
        go.clear()
        coordinator.handle = lambda _: go.wait(LONG)
        assert coordinator.broadcast({"word": "?"}, 1.5) == {2: [2, "?"]}  # nor rank 0 itself
        assert coordinator.errors[0] == "no answer within 1.5 s"
        go.set()


def test_a_rank_that_ends_is_named_and_not_waited_for() -> None:
    def ends(_: Mapping[str, Any]) -> None:
        raise SystemExit(1)

    with gathered(1, 2, acts={1: ends}) as (coordinator, _):
        began = time.monotonic()
        assert coordinator.broadcast({"word": "?"}, LONG) == {0: [0, "?"], 2: [2, "?"]}
        assert time.monotonic() - began < LONG / 3
        assert coordinator.errors == {1: "its process ended"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_is_named_and_answers_what_comes_next(rank: int) -> None:
    def fails(question: Mapping[str, Any]) -> str:
        if question["word"] == "first":
            raise OSError("no more forks")
        return "again"

    with gathered(1, 2, acts={1: fails}) as (coordinator, _):
        coordinator.handle = fails if rank == 0 else coordinator.handle
        assert rank not in coordinator.ask({rank: {"word": "first"}}, LONG)
        assert coordinator.errors == {rank: "OSError: no more forks"}
        assert coordinator.ask({rank: {"word": "second"}}, LONG) == {rank: "again"}


def test_garbage_instead_of_an_answer_is_named() -> None:
    with gathered(1, 2) as (coordinator, _):
        ours, theirs = socket.socketpair()
        coordinator.connections[1].close()
        coordinator.connections[1] = ours
        theirs.sendall(b"garbage\n")
        assert coordinator.ask({1: {"word": "?"}}, LONG) == {}
        assert coordinator.errors == {1: "it sent what is no answer"}
        theirs.close()


def test_two_processes_of_a_rank_or_another_world_are_said() -> None:
    listener, where = listening()
    with ThreadPoolExecutor() as pool:
        wrong = [hello(1), hello(1, pid=2), hello(2, world_size=7)]
        found = [pool.submit(join, [where], each, soon(5.0)) for each in wrong]
        coordinator = gather(hello(0), [listener], Authenticator(), answering(0), soon(3.0))
        for connection in coordinator.connections.values():
            connection.close()
        for each in found:
            each.exception(LONG)
    assert sorted(coordinator.objections) == [
        "rank 1 came twice, from node02 and from node02",
        "rank 2 on node03 counts 7 ranks, rank 0 counts 3",
    ]


def test_a_stranger_is_not_asked() -> None:
    """Who does not have the secret is kept out, as in a meeting."""
    listener, where = listening()
    with ThreadPoolExecutor() as pool:
        stranger = pool.submit(join, [where], hello(1, 2), soon(1.5), HmacAuthenticator(b"another"))
        coordinator = gather(
            hello(0, 2), [listener], HmacAuthenticator(b"ours"), answering(0), soon(3.0)
        )
        assert isinstance(stranger.exception(LONG), RendezvousError)
    assert coordinator.nodes == {0: "node01"}


def test_what_knocks_by_chance_is_no_objection() -> None:
    """As a site's port scanner does."""
    listener, where = listening()
    with (
        ThreadPoolExecutor() as pool,
        socket.create_connection((where.host, where.port)) as stranger,
    ):
        stranger.sendall(b"GET / HTTP/1.0\n\n")
        client = pool.submit(lambda: serve(join([where], hello(1, 2), soon())[0], answering(1)))
        coordinator = gather(hello(0, 2), [listener], Authenticator(), answering(0), soon())
        coordinator.shutdown(0)
        assert client.result(LONG) == 0
    assert coordinator.objections == []


def test_two_hundred_ranks_come_and_answer_at_length() -> None:
    began = time.process_time()
    ranks = range(1, 201)
    text = "x" * 100_000
    acts = {rank: lambda question, rank=rank: [rank, question["word"] + text] for rank in ranks}
    with gathered(*ranks, acts=acts, world=201) as (coordinator, clients):
        assert len(coordinator.here) == 201
        for word in "ab":
            answers = coordinator.broadcast({"word": word}, LONG, ranks)
            assert answers == {rank: [rank, word + text] for rank in ranks}
        assert coordinator.ask({0: {"word": "c"}, 2: {"word": "d"}}, LONG) == {
            0: [0, "c"],
            2: [2, "d" + text],
        }
        coordinator.shutdown(3)
        assert {client.result(LONG) for client in clients} == {3}
    assert time.process_time() - began < 20.0
