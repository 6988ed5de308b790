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
from dataclasses import dataclass

import pytest

from srunddp.bootstrap.rendezvous.auth import Authenticator, HmacAuthenticator
from srunddp.bootstrap.rendezvous.client import join
from srunddp.bootstrap.rendezvous.messages import Hello
from srunddp.bootstrap.rendezvous.protocol import Address, listen
from srunddp.check.messages import CannotAnswer, CheckMessage
from srunddp.check.session import (
    CheckSession,
    Handler,
    RankZeroLostError,
    gather,
    serve,
)
from srunddp.errors import RendezvousError
from srunddp.util.messages import receive
from tests.support.starting import LONG

WORLD = 3


def hello(rank: int, world_size: int = WORLD, pid: int = 1) -> Hello:
    return Hello("1207.0.0", rank, world_size, 0, f"node0{rank + 1}", "", pid)


def soon(seconds: float = LONG) -> float:
    return time.monotonic() + seconds


def listening() -> tuple[socket.socket, Address]:
    listener = listen("127.0.0.1", [0])
    return listener, Address(*listener.getsockname())


@dataclass(frozen=True)
class Ask(CheckMessage, kind="ask"):
    """A question of this test's own."""

    word: str = "?"


@dataclass(frozen=True)
class Say(CheckMessage, kind="say"):
    """Its answer."""

    rank: int
    word: str = "?"


def answering(rank: int, more: str = "") -> Handler:
    def handle(question: CheckMessage) -> Say:
        assert isinstance(question, Ask)
        return Say(rank, question.word + more)

    return handle


def hanging(until: threading.Event) -> Handler:
    def handle(question: CheckMessage) -> Say:
        until.wait(LONG)
        return Say(0)

    return handle


@contextmanager
def gathered(
    *ranks: int, acts: Mapping[int, Handler] = {}, world: int = WORLD, within: float = LONG
) -> Iterator[tuple[CheckSession, list[Future[int]]]]:
    """A session and its clients, each rank in a thread."""
    listener, where = listening()

    def client(rank: int) -> int:
        return serve(
            join([where], hello(rank, world), soon(within))[0], acts.get(rank, answering(rank))
        )

    with ThreadPoolExecutor(world) as pool:
        clients = [pool.submit(client, rank) for rank in ranks]
        session = gather(hello(0, world), [listener], Authenticator(), answering(0), soon(within))
        try:
            yield session, clients
        finally:
            session.shutdown(0)


def test_a_rank_that_does_not_answer_in_time_is_asked_no_more() -> None:
    go = threading.Event()
    with gathered(1, 2, acts={1: hanging(go)}) as (session, clients):
        assert session.broadcast(Ask(), 1.5, Say) == {0: Say(0), 2: Say(2)}
        assert session.errors == {1: "no answer within 1.5 s"}
        go.set()
        assert session.broadcast(Ask("next"), LONG, Say) == {
            0: Say(0, "next"),
            2: Say(2, "next"),
        }
        assert session.node_leaders == {"node01": 0, "node03": 2}
        with pytest.raises(RankZeroLostError, match="rank 0 was lost: its process ended"):
            clients[0].result(LONG)
        go.clear()
        session.handle = hanging(go)
        assert session.broadcast(Ask(), 1.5, Say) == {2: Say(2)}  # nor rank 0 itself
        assert session.errors[0] == "no answer within 1.5 s"
        go.set()


def test_a_rank_that_ends_is_named_and_not_waited_for() -> None:
    def ends(_: CheckMessage) -> CheckMessage:
        raise SystemExit(1)

    with gathered(1, 2, acts={1: ends}) as (session, _):
        began = time.monotonic()
        assert session.broadcast(Ask(), LONG, Say) == {0: Say(0), 2: Say(2)}
        assert time.monotonic() - began < LONG / 3
        assert session.errors == {1: "its process ended"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_is_named_and_answers_what_comes_next(rank: int) -> None:
    def fails(question: CheckMessage) -> CheckMessage:
        if question == Ask("first"):
            raise OSError("no more forks")
        return Say(rank, "again")

    with gathered(1, 2, acts={1: fails}) as (session, _):
        session.handle = fails if rank == 0 else session.handle
        assert rank not in session.ask({rank: Ask("first")}, LONG, Say)
        assert session.errors == {rank: "OSError: no more forks"}
        assert session.ask({rank: Ask("second")}, LONG, Say) == {rank: Say(rank, "again")}


@pytest.mark.parametrize(
    "said", [b"garbage\n", b"{}\n", Ask().encode(), b'{"kind": "say"}\n', b"x\n" + bytes(9)]
)
def test_garbage_instead_of_an_answer_is_named(said: bytes) -> None:
    with gathered(1, 2) as (session, _):
        ours, theirs = socket.socketpair()
        session.connections[1].close()
        session.connections[1] = ours
        theirs.sendall(said)
        assert session.ask({1: Ask()}, LONG, Say) == {}
        assert session.errors == {1: "it sent something that is no answer"}
        theirs.close()


def test_a_question_of_another_version_is_answered_all_the_same() -> None:
    """With why not; the rank may be asked something else."""
    with gathered(1, 2) as (session, _):
        newer = b'{"kind": "weigh_the_node", "in": "kg"}\n'
        session.connections[1].sendall(newer)
        answer = receive(session.connections[1], CheckMessage)
        assert isinstance(answer, CannotAnswer)
        session.connections[1].sendall(b'{"kind": "ask", "word": "a", "in": "English"}\n')
        assert receive(session.connections[1], CheckMessage) == Say(1, "a")


def test_two_processes_of_a_rank_or_another_world_are_said() -> None:
    listener, where = listening()
    with ThreadPoolExecutor() as pool:
        wrong = [hello(1), hello(1, pid=2), hello(2, world_size=7)]
        found = [pool.submit(join, [where], each, soon(5.0)) for each in wrong]
        session = gather(hello(0), [listener], Authenticator(), answering(0), soon(3.0))
        for connection in session.connections.values():
            connection.close()
        for each in found:
            each.exception(LONG)
    assert sorted(session.objections) == [
        "rank 1 came twice, from node02 and from node02",
        "rank 2 on node03 counts 7 ranks, rank 0 counts 3",
    ]


def test_a_stranger_is_not_asked() -> None:
    """Who does not have the secret is kept out, as in a meeting."""
    listener, where = listening()
    with ThreadPoolExecutor() as pool:
        stranger = pool.submit(join, [where], hello(1, 2), soon(1.5), HmacAuthenticator(b"another"))
        session = gather(
            hello(0, 2), [listener], HmacAuthenticator(b"ours"), answering(0), soon(3.0)
        )
        assert isinstance(stranger.exception(LONG), RendezvousError)
    assert session.nodes == {0: "node01"}


def test_what_knocks_by_chance_is_no_objection() -> None:
    """As a site's port scanner does."""
    listener, where = listening()
    with (
        ThreadPoolExecutor() as pool,
        socket.create_connection((where.host, where.port)) as stranger,
    ):
        stranger.sendall(b"GET / HTTP/1.0\n\n")
        client = pool.submit(lambda: serve(join([where], hello(1, 2), soon())[0], answering(1)))
        session = gather(hello(0, 2), [listener], Authenticator(), answering(0), soon())
        session.shutdown(0)
        assert client.result(LONG) == 0
    assert session.objections == []


def test_two_hundred_ranks_come_and_answer_at_length() -> None:
    began = time.process_time()
    ranks = range(1, 201)
    text = "x" * 100_000
    acts = {rank: answering(rank, text) for rank in ranks}
    with gathered(*ranks, acts=acts, world=201) as (session, clients):
        assert len(session.here) == 201
        for word in "ab":
            answers = session.broadcast(Ask(word), LONG, Say, ranks)
            assert answers == {rank: Say(rank, word + text) for rank in ranks}
        assert session.ask({0: Ask("c"), 2: Ask("d")}, LONG, Say) == {
            0: Say(0, "c"),
            2: Say(2, "d" + text),
        }
        session.shutdown(3)
        assert {client.result(LONG) for client in clients} == {3}
    assert time.process_time() - began < 20.0
