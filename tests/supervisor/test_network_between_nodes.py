"""Rank 0 lets the nodes try to reach each other, when nothing else tells why the run cannot go on:
what it asks, whom it names, and which node a spare one takes the place of.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from srunddp.supervisor.failure import Failure, FailureKind
from srunddp.supervisor.messages import (
    HasFailed,
    Ping,
    ProbeResult,
    ProbeWanted,
    ScriptIsOver,
    Stacks,
    StacksWanted,
    Verdict,
)
from srunddp.supervisor.restart import Starts
from tests.support.connections import Scene, listening, silent, spared
from tests.support.facts import tells
from tests.support.recorded_writes import ALL_REDUCE, BACKWARD, LOAD_BATCH

LOST = 69
LIMIT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv"
    " operation"
)
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"
PORT = 24000  # nothing listens there, so each node of this machine refuses


def network(size: int, *, answers_rank_zero: bool = True) -> dict[str, Any]:
    """For a scene: an address of each task, on a node of its own, and rank 0's port."""
    others = "127.0.0.{}" if answers_rank_zero else "198.51.100.{}"
    addresses = {rank: others.format(rank + 1) for rank in range(1, size)}
    return {"addresses": {0: "127.0.0.1", **addresses}, "port": PORT}


def follows(rank: int, kind: FailureKind = FailureKind.SECONDARY, cause: str = CLOSED) -> HasFailed:
    code = 134 if kind is FailureKind.ABORTED else 1
    return HasFailed.about(Failure(rank, "", cause, code, kind))


def asked(it: Scene, *ranks: int) -> bool:
    return all(it.messages_to(rank, ProbeWanted) for rank in ranks)


def answer(it: Scene, missed: dict[int, set[int]], now: float, *, silent: int = 0) -> None:
    """Each task that was asked says what it has found; without this, it misses nobody."""
    for rank, connection in it.connections.items():
        for request in it.messages_to(rank, ProbeWanted):
            others = {target[0] for target in request.targets}
            gone = missed.get(rank, set())
            if connection.open and rank != silent:
                it.say(
                    rank, ProbeResult(tuple(others - gone), tuple(gone), request.number), now=now
                )
    for _ in range(100):  # rank 0's own node has real sockets
        it.monitor.tick(now)
        if it.monitor.root_cause:
            return
        time.sleep(0.01)


CUT = {1: {2}, 2: {1}}  # between the nodes of ranks 1 and 2


def waits_for_the_network(it: Scene, now: float = 10.0) -> None:
    """A rank has failed as if it missed another, and nothing else comes."""
    it.say(1, follows(1), now=now)
    it.monitor.tick(now)
    assert not asked(it, 1), "the cause may still come"
    it.monitor.tick(now + 1.0)
    assert asked(it, 1, 2)
    assert it.monitor.root_cause is None


def stalled(it: Scene, *stacks: str) -> None:
    """No rank makes a step any more, and each says where it is, rank 0 too."""
    for rank, connection in it.connections.items():
        if rank <= len(stacks) and connection.open:
            it.say(rank, Ping(7), now=1.0)
    it.monitor.tick(1.0)
    it.monitor.tick(4.0)
    for rank, stack in enumerate(stacks, 1):
        assert it.messages_to(rank, StacksWanted)
        it.say(rank, Stacks(stack), now=4.1)
    it.monitor.tick(4.1)


STALLS: dict[str, Any] = {"stall_timeout": 3.0, "step": lambda: 7, "stacks": lambda: ALL_REDUCE}


def test_after_a_failure_that_follows_from_another_a_cut_is_named_and_not_a_rank() -> None:
    it = Scene(size=4, **network(4))
    waits_for_the_network(it)
    request = it.messages_to(2, ProbeWanted)[0]
    assert request.source == "127.0.0.3"
    assert [target[0] for target in request.targets] == [0, 1, 3]
    assert request.targets[1] == (1, "127.0.0.2", PORT)
    answer(it, CUT, 11.1)
    found = it.root_cause
    assert (found.ranks, found.exit_code) == ((), LOST)
    assert tells(found.cause, "node02 and node03", "cannot reach each other", "rank 1", CLOSED)
    assert it.messages_to(3, Verdict) == [Verdict((), LOST)]


def test_where_all_reach_each_other_the_failure_is_said_and_what_was_tried() -> None:
    """The network may have been mended meanwhile."""
    it = Scene(size=4, **network(4))
    waits_for_the_network(it)
    answer(it, {}, 11.1)
    found = it.root_cause
    assert (found.ranks, found.cause, found.exit_code) == ((1,), CLOSED, 1)
    assert any(tells(note, "TCP", "all 4 nodes reach each other") for note in found.notes)
    assert found.suspect == "", "nothing speaks against its node"


def test_a_firewall_that_lets_only_rank_0_be_reached_is_no_cut() -> None:
    it = Scene(size=4, **network(4, answers_rank_zero=False))
    waits_for_the_network(it)
    answer(it, {1: {2, 3}, 2: {1, 3}, 3: {1, 2}}, 17.0)
    found = it.root_cause
    assert (found.ranks, found.cause) == ((1,), CLOSED)
    assert any(tells(note, "TCP", "firewall") for note in found.notes)


@pytest.mark.parametrize(
    ("kind", "others", "is_at_fault"),
    [
        (FailureKind.SECONDARY, (), False),
        (FailureKind.ABORTED, (FailureKind.SECONDARY,), True),
        (FailureKind.ABORTED, (FailureKind.ABORTED,), False),
        (FailureKind.NETWORK, (FailureKind.SECONDARY,), True),
        (FailureKind.NETWORK, (FailureKind.NETWORK,), False),
    ],
)
def test_a_node_is_at_fault_if_its_rank_failed_in_another_way_than_the_rest(
    kind: FailureKind, others: tuple[FailureKind, ...], is_at_fault: bool
) -> None:
    it = Scene(size=4, stacks=lambda: ALL_REDUCE, **network(4))
    it.say(1, follows(1, kind), now=10.0)
    for rank, other in enumerate(others, 2):
        it.say(rank, follows(rank, other), now=10.1)
    it.monitor.tick(11.0)
    for rank in (1, 2, 3):
        if it.messages_to(rank, StacksWanted):
            it.say(rank, Stacks(ALL_REDUCE), now=11.1)
    it.monitor.tick(14.5)
    answer(it, {}, 14.6)
    assert it.root_cause.ranks == (1,)
    assert it.root_cause.suspect == ("node02" if is_at_fault else "")


def test_a_primary_failure_needs_no_network_and_ends_a_try() -> None:
    it = Scene(size=4, **network(4))
    it.say(1, HasFailed.about(Failure(1, "", "ValueError: boom", 7)), now=10.0)
    assert it.root_cause.ranks == (1,)
    assert not asked(it, 1)
    it = Scene(size=4, **network(4))
    waits_for_the_network(it)
    it.say(3, HasFailed.about(Failure(3, "", "ValueError: boom", 7)), now=11.1)
    assert (it.root_cause.ranks, it.root_cause.exit_code) == ((3,), 7)


def test_a_node_that_is_lost_meanwhile_is_named_and_one_that_just_does_not_answer_is_awaited() -> (
    None
):
    it = Scene(size=4, **network(4))
    waits_for_the_network(it)
    it.close(2, now=12.0, lost=True)
    assert tells(it.root_cause.cause, "no answer")
    assert it.root_cause.node == "node03"
    it = Scene(size=4, **network(4))
    waits_for_the_network(it)
    it.connections[2].answers = False
    answer(it, {}, 11.1, silent=2)
    it.monitor.tick(20.0)
    assert it.monitor.root_cause is None
    it.close(2, now=30.0, lost=True)
    assert it.root_cause.node == "node03"


def test_a_supervisor_that_is_starved_holds_up_nobody_and_proves_nothing() -> None:
    it = Scene(size=4, **network(4))
    waits_for_the_network(it)
    answer(it, {}, 11.1, silent=3)
    assert it.monitor.root_cause is None
    answer(it, {}, 18.0, silent=3)
    assert it.root_cause.ranks == (1,)
    assert any(tells(note, "3 of 4") for note in it.root_cause.notes)


@pytest.mark.parametrize(
    "case", ["two nodes", "no addresses", "a name for an address", "someone has left"]
)
def test_the_network_is_not_tried_if_that_would_tell_nothing(case: str) -> None:
    size = 2 if case == "two nodes" else 4
    known = network(size)
    if case == "no addresses":
        known = {}
    elif case == "a name for an address":
        known["addresses"] = {0: "127.0.0.1", 1: "localhost", 2: "", 3: "fe80::1%eth0"}
    it = Scene(size=size, **known)
    if case == "someone has left":
        it.say(2, ScriptIsOver(), now=9.0)
    it.say(1, follows(1), now=10.0)
    it.monitor.tick(11.0)
    assert it.monitor.root_cause is not None
    assert not asked(it, 1)


def test_if_all_wait_at_one_place_a_cut_is_named_and_else_nobody() -> None:
    it = Scene(size=3, **network(3), **STALLS)
    stalled(it, ALL_REDUCE, ALL_REDUCE)
    assert it.monitor.root_cause is None
    answer(it, CUT, 4.2)
    assert (it.root_cause.ranks, it.root_cause.exit_code) == ((), LOST)
    assert tells(it.root_cause.cause, "node02 and node03", "no step for 3 s", "all_reduce")
    it = Scene(size=3, **network(3), **STALLS)
    stalled(it, ALL_REDUCE, ALL_REDUCE)
    answer(it, {}, 4.2)
    found = it.root_cause
    assert (found.ranks, found.node, found.exit_code, found.suspect) == ((), "", 124, "")
    assert tells(found.cause, "no step for 3 s", "all ranks wait in all_reduce")
    assert "in all_reduce" in found.traceback
    assert any(tells(note, "TCP", "reach each other") for note in found.notes)


def test_if_all_wait_at_several_places_the_odd_one_is_said_but_not_its_node() -> None:
    it = Scene(size=4, **network(4), **STALLS)
    stalled(it, BACKWARD, ALL_REDUCE, ALL_REDUCE)
    answer(it, {}, 4.2)
    assert (it.root_cause.ranks, it.root_cause.exit_code) == ((1,), 124)
    assert it.root_cause.suspect == ""


@pytest.mark.parametrize("elsewhere", [LOAD_BATCH, ""])
def test_a_rank_that_is_elsewhere_or_says_nothing_is_named_without_a_try(elsewhere: str) -> None:
    it = Scene(size=3, **network(3), **STALLS)
    stalled(it, ALL_REDUCE, elsewhere)
    assert (it.root_cause.ranks, it.root_cause.exit_code) == ((2,), 124)
    assert not asked(it, 1)


def test_a_step_during_the_try_ends_the_stall_and_the_next_one_is_tried_anew() -> None:
    it = Scene(size=3, **network(3), **STALLS)
    stalled(it, ALL_REDUCE, ALL_REDUCE)
    it.say(1, Ping(8), now=4.2)
    it.monitor.tick(4.2)
    answer(it, CUT, 4.3)
    assert it.monitor.root_cause is None
    it.monitor.tick(7.5)
    for rank in (1, 2):
        it.say(rank, Stacks(ALL_REDUCE), now=7.6)
    it.monitor.tick(7.6)
    assert len(it.messages_to(1, ProbeWanted)) == 2
    answer(it, {}, 7.7)
    assert tells(it.root_cause.cause, "all ranks wait in all_reduce")


def test_what_is_said_of_an_earlier_try_is_not_taken_for_the_next_one() -> None:
    """It was on the way when the stall ended, and the network between the nodes was mended."""
    it = Scene(size=3, **network(3), **STALLS)
    stalled(it, ALL_REDUCE, ALL_REDUCE)
    it.say(1, Ping(8), now=4.2)
    it.monitor.tick(4.2)
    it.monitor.tick(7.5)
    for rank in (1, 2):
        it.say(rank, Stacks(ALL_REDUCE), now=7.6)
    it.monitor.tick(7.6)
    late = {rank: it.messages_to(rank, ProbeWanted)[0].number for rank in (1, 2)}
    it.say(1, ProbeResult((0,), (2,), late[1]), now=7.7)
    it.say(2, ProbeResult((0,), (1,), late[2]), now=7.7)
    for _ in range(20):  # rank 0's own node has its answers by then
        it.monitor.tick(7.7)
        time.sleep(0.01)
    assert it.monitor.root_cause is None
    answer(it, {}, 7.8)
    assert tells(it.root_cause.cause, "all ranks wait in all_reduce")


def test_a_failure_during_the_try_after_a_stall_waits_for_its_cause() -> None:
    it = Scene(size=3, **network(3), **STALLS)
    stalled(it, ALL_REDUCE, ALL_REDUCE)
    it.say(1, follows(1), now=4.2)
    it.say(2, HasFailed.about(Failure(2, "", "ValueError: boom", 7)), now=4.5)
    assert it.root_cause.ranks == (2,)


def test_a_limit_that_no_hanging_rank_explains_is_tried_too() -> None:
    it = Scene(size=3, **network(3), stacks=lambda: ALL_REDUCE)
    it.say(1, follows(1, cause=LIMIT), now=1.0)
    it.monitor.tick(2.0)
    it.say(2, Stacks(ALL_REDUCE), now=2.1)
    it.monitor.tick(2.1)
    assert asked(it, 1, 2)
    answer(it, CUT, 2.2)
    assert it.root_cause.exit_code == LOST


# With a spare node: of four tasks three are ranks.


def left_after(last: Starts, missed: dict[int, set[int]], size: int = 4) -> set[str]:
    """The nodes that are given up after a failure that follows from another."""
    it = spared(size=size, last=last, **network(size))
    waits_for_the_network(it)
    assert asked(it, 3), "the spare node's task, too"
    answer(it, missed, 11.1)
    moved = {
        f"node0{rank + 1}"
        for rank in it.connections
        if any(verdict.node_is_given_up for verdict in it.messages_to(rank, Verdict))
    }
    return moved | ({"node01"} if it.monitor.fenced else set())


FIRST = Starts()


@pytest.mark.parametrize(
    ("last", "missed", "left"),
    [
        (FIRST, CUT, {"node03"}),
        (Starts(1, cause="x", node="node02"), CUT, {"node02"}),
        (FIRST, {1: {2, 3}, 2: {1}, 3: {1}}, {"node02"}),
        (FIRST, {1: {0}}, {"node02"}),
        (FIRST, {1: {3}, 2: {3}}, set()),
        (FIRST, {}, set()),
        (Starts(1, cause=CLOSED, node="node02"), {}, set()),
        (Starts(1, cause=CLOSED, node=""), {}, set()),
    ],
    ids=[
        "the later one",
        "the one that failed before",
        "the one that the spare misses",
        "not rank 0's",
        "the spare's own trouble",
        "nobody",
        "nobody, though the first failure was there before",
        "nobody twice",
    ],
)
def test_a_spare_node_takes_the_place_of_one_of_the_pair_and_of_no_other(
    last: Starts, missed: dict[int, set[int]], left: set[str]
) -> None:
    assert left_after(last, missed) == left


def test_where_spare_nodes_are_too_few_for_all_cuts_none_is_used_and_the_run_restarts() -> None:
    size = 6
    it = spared(size=size, ranks=5, **network(size))
    it.say(1, follows(1), now=10.0)
    it.monitor.tick(11.0)
    answer(it, {1: {2}, 2: {1}, 3: {4}, 4: {3}}, 11.1)
    assert tells(it.root_cause.cause, "node04 and node05", "node02 and node03")
    verdicts = [it.messages_to(rank, Verdict)[0] for rank in range(1, size)]
    assert not any(verdict.node_is_given_up for verdict in verdicts)
    assert all(verdict.restart_at for verdict in verdicts)


# The other ranks.


def test_a_rank_says_what_its_node_reaches_and_goes_on_with_its_pings_meanwhile() -> None:
    with listening("127.0.0.2") as [accepts], silent("127.0.0.3") as full:
        it = Scene(rank=1)
        targets = ((0, *accepts.getsockname()), (2, *full.getsockname()), (3, "127.0.0.4", PORT))
        it.say(0, ProbeWanted("127.0.0.1", targets, 1), now=100.0)
        began = time.monotonic()
        assert it.monitor.tick(100.1) <= 0.1
        assert it.messages_to(0, ProbeResult) == []
        assert it.messages_to(0, Ping)
        it.monitor.tick(105.1)
        assert time.monotonic() - began < 1.0, "it never waits"
        assert it.messages_to(0, ProbeResult) == [ProbeResult((0, 3), (2,), 1)]
        it.monitor.tick(106.0)
        assert len(it.messages_to(0, ProbeResult)) == 1


def test_a_verdict_ends_what_a_rank_tries() -> None:
    with silent("127.0.0.3") as full:
        it = Scene(rank=1)
        before = len(os.listdir("/proc/self/fd"))
        it.say(0, ProbeWanted("127.0.0.1", ((2, *full.getsockname()),), 1), now=100.0)
        it.say(0, ProbeWanted("127.0.0.1", ((2, *full.getsockname()),), 2), now=100.1)
        assert len(os.listdir("/proc/self/fd")) == before + 1, "the second takes the first's place"
        it.say(0, Verdict((2,), 1), now=100.2)
        it.monitor.tick(100.3)
        it.monitor.tick(110.0)
        assert it.messages_to(0, ProbeResult) == []
        assert len(os.listdir("/proc/self/fd")) == before
