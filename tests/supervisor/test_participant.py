"""The failure monitor of the other ranks obeys rank 0, and speaks where rank 0 cannot any more."""

from __future__ import annotations

import socket
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srunddp.supervisor.failure import Failure, FailureKind
from tests.support.connections import Scene

BOOM = Failure(1, "node02", "ValueError: boom", 7)
KILLED = "srunddp: rank 0 on node01 failed: srunddp itself was killed (exit code 137)\n"


def test_rank_zero_is_obeyed_and_nothing_is_said_again(capfd: pytest.CaptureFixture[str]) -> None:
    it = Scene(1)
    it.say(0, verdict={"ranks": [2], "exit_code": 9})
    found = it.monitor.root_cause
    assert (found.ranks, found.exit_code, it.monitor.finished) == ((2,), 9, False)
    it.monitor.ended()
    it.close(0)
    assert it.monitor.finished
    assert it.connections[0].messages == [{"ended": True}]
    assert capfd.readouterr().err == ""


def test_rank_zero_is_told_all_and_may_close_after_the_end() -> None:
    it = Scene(1, stacks=lambda: "a stack", step=lambda: 5)
    it.monitor.tick(5.0)
    it.say(0, stacks=True)
    it.monitor.fail(BOOM, 6.0)
    it.monitor.done()
    assert it.monitor.released
    it.monitor.left()
    assert it.monitor.finished
    messages = [{"ping": 5}, {"stacks": "a stack"}, {"failure": asdict(BOOM)}, {"goodbye": True, "waits": False}]
    assert it.connections[0].messages == [*messages, {"left": True}]
    it = Scene(1)
    it.monitor.done()
    it.monitor.left()
    it.close(0)
    assert it.monitor.root_cause is None


def test_a_worker_with_mpi_stays_until_rank_zero_says_over() -> None:
    it = Scene(1)
    it.monitor.done(waits=True)
    assert it.connections[0].messages == [{"goodbye": True, "waits": True}]
    assert not it.monitor.released
    it.say(0, over=True)
    assert it.monitor.released


@pytest.mark.parametrize("deputy", [True, False])
def test_only_the_deputy_says_that_rank_zero_was_killed(deputy: bool, capfd: pytest.CaptureFixture[str]) -> None:
    it = Scene(1)
    if deputy:
        it.say(0, deputy={"here": True})
    it.close(0)
    assert (it.monitor.root_cause.ranks, it.monitor.root_cause.exit_code) == ((0,), 137)
    assert capfd.readouterr().err == (KILLED if deputy else "")


def test_a_launcher_that_ends_the_run_is_no_failure_of_rank_zero() -> None:
    """It ends one node after the other, and the worker here may have something to save."""
    it = Scene(1, asked=lambda _: 15)
    it.close(0)
    assert it.monitor.root_cause is None
    it.monitor.fail(BOOM, 1.0)
    assert it.monitor.root_cause.ranks == (1,)


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize(("weight", "culprit"), [(FailureKind.PRIMARY, 1), (FailureKind.SECONDARY, 0)])
def test_a_silent_rank_zero_outweighs_a_secondary_failure(weight: FailureKind, culprit: int, closes: bool) -> None:
    """But one that has closed does not: this rank's own failure is then what is known."""
    it = Scene(1)
    it.monitor.fail(Failure(1, "node02", "RuntimeError: Broken pipe", 7, weight), 1.0)
    if closes:
        it.close(0)
        culprit = 1
    it.monitor.tick(0.5)
    it.monitor.tick(91.0)
    assert it.monitor.root_cause.ranks == (culprit,)


@pytest.mark.parametrize(("link", "lost"), [(True, "rank 0 on node01"), (False, "rank 1 on node02")])
def test_a_lost_connection_is_their_node_or_ours(link: bool, lost: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Who is cut off itself does not say that rank 0 is lost."""
    it = Scene(1, link_is_up=lambda: link)
    it.say(0, deputy={"elsewhere": True, "witness": None})
    it.close(0, lost=True)
    found = it.monitor.root_cause
    assert (f"rank {found.ranks[0]} on {found.node}", found.how, found.exit_code) == (lost, "lost", 69)
    assert ("rank 0 on node01 lost: no answer for 60 s" in capfd.readouterr().err) == link


def test_a_witness_that_refuses_shows_that_the_network_is_up(capfd: pytest.CaptureFixture[str]) -> None:
    it = Scene(1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        it.say(0, deputy={"elsewhere": True, "witness": list(closed.getsockname())})
        it.monitor.tick(0.5)
        it.monitor.tick(91.0)
    assert "rank 0 on node01 lost" in capfd.readouterr().err


STRANGE: list[dict[str, Any]] = [
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
    {},
]


@settings(max_examples=100, deadline=None)
@given(messages=st.lists(st.sampled_from(STRANGE), max_size=5), ends=st.booleans())
def test_no_garbage_from_rank_zero_ends_another(messages: list[dict[str, Any]], ends: bool) -> None:
    it = Scene(1)
    for message in messages:
        it.say(0, **message)
    if ends:
        it.close(0)
    it.monitor.tick(0.5)
    it.monitor.tick(91.0)
    assert it.monitor.root_cause, "rank 0 has gone"
    assert 0 < it.monitor.root_cause.exit_code < 256
