"""Rank 0 hears every rank that comes, does without those that do not, and tells all how it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from srunddp.bootstrap.line import Address, Hello, listen
from srunddp.bootstrap.rendezvous import find
from srunddp.bootstrap.trust import Secret, Unproven
from srunddp.errors import RendezvousError
from srunddp.site.hub import Hub, gather, serve

WORLD = 3


def hello(rank: int, world_size: int = WORLD, pid: int = 1) -> Hello:
    return Hello("1207.0.0", rank, world_size, 0, f"node0{rank + 1}", "", pid)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def answering(rank: int) -> Any:
    return lambda question: [rank, question["word"]]


@contextmanager
def gathered(*ranks: int, acts: Mapping[int, Any] = {}, within: float = 5.0) -> Iterator[tuple[Hub, list[Future[int]]]]:
    """A hub and its spokes, each rank in a thread."""
    listener = listen("127.0.0.1", [0])
    where = Address(*listener.getsockname())

    def spoke(rank: int) -> int:
        line, _ = find([where], hello(rank), soon())
        return serve(line, acts.get(rank, answering(rank)))

    with ThreadPoolExecutor() as pool:
        spokes = [pool.submit(spoke, rank) for rank in ranks]
        hub = gather(hello(0), [listener], Unproven(), answering(0), soon(within))
        try:
            yield hub, spokes
        finally:
            hub.dismiss(0)


def test_every_rank_is_asked_and_answers_and_ends_with_the_code_that_rank_0_says() -> None:
    with gathered(1, 2) as (hub, spokes):
        assert hub.ask_all({"word": "first"}, 5.0) == {rank: [rank, "first"] for rank in range(WORLD)}
        assert hub.ask({1: {"word": "a"}, 2: {"word": "b"}}, 5.0) == {1: [1, "a"], 2: [2, "b"]}
        hub.dismiss(69)
        assert [spoke.result(5.0) for spoke in spokes] == [69, 69]


def test_a_rank_that_does_not_come_is_done_without() -> None:
    with gathered(2, within=1.0) as (hub, _):
        assert hub.nodes == {0: "node01", 2: "node03"}
        assert hub.ask_all({"word": "?"}, 5.0) == {0: [0, "?"], 2: [2, "?"]}


def test_an_answer_that_comes_too_late_is_not_taken_for_that_to_the_next_question() -> None:
    go = threading.Event()

    def late(question: Mapping[str, Any]) -> str:
        if question["word"] == "slow":
            go.wait(5.0)
        return str(question["word"])

    with gathered(1, 2, acts={1: late}) as (hub, _):
        assert hub.ask_all({"word": "slow"}, 0.3) == {0: [0, "slow"], 2: [2, "slow"]}
        go.set()
        assert hub.ask({1: {"word": "next"}}, 5.0) == {1: "next"}


def test_a_rank_that_ends_is_not_waited_for() -> None:
    def ends(_: Mapping[str, Any]) -> None:
        raise SystemExit(1)

    with gathered(1, 2, acts={1: ends}) as (hub, _):
        began = time.monotonic()
        assert hub.ask_all({"word": "?"}, 30.0) == {0: [0, "?"], 2: [2, "?"]}
        assert time.monotonic() - began < 10.0


def test_a_large_answer_arrives_whole() -> None:
    text = "x" * 1_000_000
    with gathered(1, 2, acts={1: lambda _: text}) as (hub, _):
        assert hub.ask({1: {}}, 5.0) == {1: text}


def test_two_processes_of_one_rank_and_another_world_size_are_said() -> None:
    listener = listen("127.0.0.1", [0])
    where = Address(*listener.getsockname())
    with ThreadPoolExecutor() as pool:
        wrong = [hello(1), hello(1, pid=2), hello(2, world_size=7)]
        found = [pool.submit(find, [where], each, soon(2.0)) for each in wrong]
        hub = gather(hello(0), [listener], Unproven(), answering(0), soon(1.0))
        for line in hub.lines.values():
            line.close()
        for each in found:
            each.exception(70.0)
    assert sorted(hub.objections) == [
        "rank 1 came twice, from node02 and from node02",
        "rank 2 on node03 counts 7 ranks, rank 0 counts 3",
    ]


def test_a_stranger_is_not_asked() -> None:
    """Who does not have the secret is kept out, as in a meeting."""
    listener = listen("127.0.0.1", [0])
    where = Address(*listener.getsockname())
    with ThreadPoolExecutor() as pool:
        stranger = pool.submit(find, [where], hello(1, 2), soon(0.5), Secret(b"another"))
        hub = gather(hello(0, 2), [listener], Secret(b"ours"), answering(0), soon(1.0))
        assert isinstance(stranger.exception(5.0), RendezvousError)
    assert hub.nodes == {0: "node01"}


def test_a_rank_says_that_rank_0_was_lost() -> None:
    listener = listen("127.0.0.1", [0])
    where = Address(*listener.getsockname())
    with ThreadPoolExecutor() as pool:
        spoke = pool.submit(lambda: serve(find([where], hello(1, 2), soon())[0], answering(1)))
        hub = gather(hello(0, 2), [listener], Unproven(), answering(0), soon())
        hub.lines[1].close()
        with pytest.raises(RendezvousError, match="rank 0 was lost: its process ended"):
            spoke.result(5.0)
