"""The guard of the other ranks obeys rank 0's verdict, and speaks where rank 0 cannot any more."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srunddp.supervisor.failure import Failure, FailureKind
from srunddp.supervisor.participant import Participant
from tests.support.socket_pairs import hear, pair, post, tell, told

BOOM = Failure(1, "node02", "ValueError: boom", 7)


@contextmanager
def member(rank: int = 1, **changes: Any) -> Iterator[tuple[Participant, socket.socket]]:
    """Its guard, and rank 0's end of the line."""
    with pair() as (ours, theirs):
        yield Participant(post(rank, **changes), ours), theirs


def test_the_verdict_is_obeyed_and_not_said_again(capfd: pytest.CaptureFixture[str]) -> None:
    with member() as (guard, zero):
        tell(zero, verdict={"ranks": [2], "exit_code": 9})
        hear(guard, until=lambda: guard.verdict)
        assert guard.verdict
        assert (guard.verdict.ranks, guard.verdict.exit_code, guard.finished) == ((2,), 9, False)
        guard.ended()
        zero.shutdown(socket.SHUT_WR)
        hear(guard, until=lambda: guard.finished)
        assert told(zero) == [{"ended": True}]
    assert capfd.readouterr().err == ""


def test_rank_0_is_told_of_a_failure_a_goodbye_and_where_the_worker_is() -> None:
    with member(stacks=lambda: "a stack", step=lambda: 5) as (guard, zero):
        guard.tick(5.0)
        tell(zero, stacks=True)
        hear(guard)
        guard.fail(BOOM, 6.0)
        guard.done()
        assert guard.released
        guard.left()
        assert guard.finished
        assert told(zero) == [
            {"ping": 5},
            {"stacks": "a stack"},
            {"failure": asdict(BOOM)},
            {"goodbye": True},
            {"left": True},
        ]


@pytest.mark.parametrize("deputy", [True, False])
def test_only_the_deputy_says_that_rank_0_s_supervisor_was_killed(
    deputy: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with member() as (guard, zero):
        if deputy:
            tell(zero, deputy={"here": True})
        zero.close()
        hear(guard, until=lambda: guard.verdict)
        assert guard.verdict
        assert (guard.verdict.ranks, guard.verdict.exit_code) == ((0,), 137)
    said = "srunddp: rank 0 on node01 failed: srunddp itself was killed (exit code 137)\n"
    assert capfd.readouterr().err == (said if deputy else "")


def test_a_rank_that_failed_before_rank_0_went_keeps_its_own_verdict() -> None:
    with member() as (guard, zero):
        guard.fail(BOOM, 1.0)
        zero.close()
        hear(guard, until=lambda: guard.verdict)
        assert guard.verdict
        assert (guard.verdict.ranks, guard.verdict.exit_code) == ((1,), 7)


def test_the_end_of_the_line_after_the_goodbye_and_the_end_is_no_failure() -> None:
    with member() as (guard, zero):
        guard.done()
        guard.left()
        zero.close()
        hear(guard)
        assert guard.verdict is None


@pytest.mark.parametrize(("weight", "culprit"), [(FailureKind.PRIMARY, 1), (FailureKind.ECHO, 0)])
def test_where_rank_0_is_silent_an_echo_gives_way_to_it(weight: FailureKind, culprit: int) -> None:
    with member() as (guard, _):
        guard.fail(Failure(1, "node02", "RuntimeError: Broken pipe", 1, weight), 1.0)
        guard.tick(0.5)
        guard.tick(91.0)
        assert guard.verdict
        assert guard.verdict.ranks == (culprit,)


@pytest.mark.parametrize(("link", "said"), [(True, True), (False, False)])
def test_who_is_cut_off_itself_does_not_say_that_rank_0_is_lost(
    link: bool, said: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with member(link_is_up=lambda: link) as (guard, zero):
        tell(zero, deputy={"elsewhere": True, "witness": None})
        hear(guard, now=0.0)
        guard.tick(0.5)
        guard.tick(91.0)
        assert guard.verdict
    assert ("rank 0 on node01 lost" in capfd.readouterr().err) == said


def test_a_witness_that_refuses_shows_that_the_network_is_there(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed, member() as (guard, zero):
        closed.bind(("127.0.0.1", 0))
        tell(zero, deputy={"elsewhere": True, "witness": closed.getsockname()})
        hear(guard, now=0.0)
        guard.tick(0.5)
        guard.tick(91.0)
    assert "rank 0 on node01 lost" in capfd.readouterr().err


STRANGE = [
    {"verdict": {}},
    {"verdict": {"ranks": 5, "exit_code": 1}},
    {"verdict": {"ranks": [1], "exit_code": "many"}},
    {"verdict": {"ranks": [1], "exit_code": 0}},
    {"verdict": {"ranks": [1], "exit_code": 1e999}},
    {"verdict": {"ranks": [1], "exit_code": 9}},
    {"deputy": {"here": 1, "elsewhere": "yes", "witness": "x"}},
    {"deputy": {"elsewhere": True, "witness": 5}},
    {"deputy": {"elsewhere": True, "witness": ["127.0.0.1", "nine"]}},
    {"deputy": {"elsewhere": True, "witness": ["127.0.0.1", 10**9]}},
    {"stacks": []},
]


@settings(max_examples=100, deadline=None)
@given(
    said=st.lists(
        st.one_of(
            st.sampled_from([json.dumps(message).encode() + b"\n" for message in STRANGE]), st.binary(max_size=99)
        ),
        max_size=5,
    ),
    loses=st.booleans(),
)
def test_no_garbage_from_rank_0_ends_the_guard_of_another(said: list[bytes], loses: bool) -> None:
    with member() as (guard, zero):
        for piece in said:
            with contextlib.suppress(ConnectionError):
                zero.sendall(piece)
            hear(guard)
        if not loses:
            zero.close()
            hear(guard)
        guard.tick(0.5)
        guard.tick(91.0)
        assert guard.verdict, "rank 0 has gone"
        assert 0 < guard.verdict.exit_code < 256
