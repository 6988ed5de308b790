"""Rank 0's guard holds the lines of all ranks, whatever their number and whatever comes over them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from srunddp.supervisor.coordinator import Coordinator
from srunddp.supervisor.failure import Failure, FailureKind
from tests.support.coordinators import fail_in_a_crowd
from tests.support.socket_pairs import hear, pairs, post, tell, told
from tests.support.starting import until, write

BOOM = Failure(1, "node02", "ValueError: boom", 7)


@pytest.mark.alone
def test_four_thousand_ranks_know_of_a_failure_within_two_seconds() -> None:
    seen = fail_in_a_crowd(lines=4095, culprit=1234)
    assert (seen.told, seen.codes, seen.code) == (4095, [7], 7)
    assert seen.took < 2.0, seen
    assert "srunddp: rank 1234 on node0154 failed: ValueError: boom (exit code 7)" in seen.errors


@contextmanager
def guard(size: int = 3, **changes: Any) -> Iterator[tuple[Coordinator, dict[int, socket.socket]]]:
    """Rank 0's, and the other ends of its lines."""
    with pairs(range(1, size)) as (ours, theirs):
        yield Coordinator(post(0, size, **changes), ours), theirs


def test_the_verdict_goes_to_all_and_the_worker_waits_for_no_one() -> None:
    with guard() as (zero, lines):
        tell(lines[1], failure=asdict(BOOM))
        hear(zero, until=lambda: zero.verdict)
        for line in lines.values():
            assert {"verdict": {"ranks": [1], "exit_code": 7}} in told(line)
        assert not zero.finished, "the others close first"
        for line in lines.values():
            line.close()
        hear(zero, until=lambda: zero.finished)


@pytest.mark.parametrize("weight", [FailureKind.ECHO, FailureKind.ABORTED])
def test_what_may_be_an_echo_waits_for_its_cause_and_no_longer_than_a_second(weight: FailureKind) -> None:
    with guard(size=4) as (zero, lines):
        tell(lines[2], failure=asdict(Failure(2, "node03", "RuntimeError: Broken pipe", 1, weight)))
        hear(zero, now=10.0, until=lambda: zero._failures)
        assert zero.verdict is None
        assert zero.tick(10.0) <= 1.0
        zero.tick(11.0)
        assert bool(zero.verdict) == (weight is FailureKind.ECHO), "after an abort the others are asked where they are"
        zero.tick(14.0)
        assert zero.verdict
        assert zero.verdict.ranks == (2,)


def test_echoes_do_not_put_the_verdict_off_again_and_again() -> None:
    with guard(size=4) as (zero, _):
        for rank, now in ((1, 10.0), (2, 10.4), (3, 10.6)):
            zero.fail(Failure(rank, f"node0{rank + 1}", "RuntimeError: Broken pipe", 1, FailureKind.ECHO), now)
        zero.tick(10.8)
        assert zero.verdict
        assert zero.verdict.ranks == (1,)


def test_an_abort_outweighs_an_echo_that_came_before() -> None:
    with guard(size=4) as (zero, _):
        zero.fail(Failure(1, "node02", "RuntimeError: Broken pipe", 1, FailureKind.ECHO), 10.0)
        zero.fail(Failure(2, "node03", "killed by SIGABRT", 134, FailureKind.ABORTED), 10.1)
        zero.tick(10.8)
        assert zero.verdict
        assert (zero.verdict.ranks, zero.verdict.exit_code) == ((2,), 134)


def test_a_line_that_ends_without_a_word_is_a_supervisor_that_was_killed() -> None:
    with guard() as (zero, lines):
        lines[2].close()
        hear(zero, until=lambda: zero.verdict)
        assert zero.verdict
        assert (zero.verdict.ranks, zero.verdict.exit_code) == ((2,), 137)


def test_a_line_that_ends_after_its_rank_has_left_is_none() -> None:
    with guard() as (zero, lines):
        for line in lines.values():
            tell(line, goodbye=True)
            tell(line, left=True)
            line.close()
        hear(zero)
        assert zero.verdict is None
        assert not zero.finished, "rank 0 itself still works"
        zero.done()
        assert zero.released
        zero.left()
        assert zero.finished


def test_rank_0_s_worker_stays_until_every_other_has_said_goodbye() -> None:
    with guard() as (zero, lines):
        zero.done()
        tell(lines[1], goodbye=True)
        hear(zero)
        assert not zero.released
        tell(lines[2], goodbye=True)
        hear(zero, until=lambda: zero.released)


def test_a_rank_that_is_silent_though_its_kernel_answers_is_named() -> None:
    with guard(lost_after=9.0) as (zero, lines):
        for now in range(0, 52, 5):
            tell(lines[1], ping=0)
            hear(zero, now=float(now))
            zero.tick(float(now))
        assert zero.verdict
        assert zero.verdict.ranks == (2,)
        assert "silent for 39 s" in zero.verdict.cause


SINFO = """#!/bin/sh
echo "$@" >> {folder}/asked
echo "node02 {state}"
"""


@pytest.mark.parametrize(("state", "down"), [("down*", True), ("alloc", False), ("", False)])
def test_a_silent_node_that_slurm_takes_for_down_is_lost_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, down: bool
) -> None:
    write(tmp_path / "sinfo", SINFO.format(folder=tmp_path, state=state)).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with guard() as (zero, lines):
        for now in (6.0, 11.0, 16.0, 21.0):
            assert not (tmp_path / "asked").exists()
            tell(lines[2], ping=0)
            hear(zero, now=now)
            zero.tick(now)
        until((tmp_path / "asked").exists)
        zero._down._thread.join()
        zero.tick(26.0)
        assert "--nodes node02" in (tmp_path / "asked").read_text()
        assert bool(zero.verdict) == down
        if zero.verdict:
            assert (zero.verdict.ranks, zero.verdict.cause) == ((1,), "Slurm says that the node is down")


def deputies(line: socket.socket) -> list[Any]:
    return [message["deputy"] for message in told(line) if "deputy" in message]


def test_the_lowest_rank_left_is_appointed_to_speak_for_rank_0() -> None:
    with guard(size=4) as (zero, lines):
        zero.tick(0.0)
        first = deputies(lines[1])[-1]
        assert first["here"]
        assert first["elsewhere"]
        assert first["witness"], "an address on a third node"
        assert deputies(lines[2]) == []
        tell(lines[1], goodbye=True)
        hear(zero)
        zero.tick(0.1)
        second = deputies(lines[2])[-1]
        assert second["here"]
        assert second["elsewhere"]


def test_a_witness_is_on_a_third_node_however_the_ranks_before_it_leave() -> None:
    nodes = {0: "a", 1: "b", 2: "a", 3: "b", 4: "c", 5: "b", 6: "d"}
    with guard(size=7, nodes=nodes, node="a") as (zero, lines):
        for leaves, deputy, third in ((0, 1, 4), (4, 1, 6), (1, 3, 6), (3, 5, 6)):
            if leaves:
                tell(lines[leaves], goodbye=True)
                hear(zero)
            zero.tick(0.1)
            assert zero._deputies[deputy]["elsewhere"]
            assert zero._deputies[deputy]["witness"][0] == lines[third].getsockname()[0]
            assert zero._order[zero._third] == third


def test_the_goodbyes_of_four_thousand_ranks_cost_less_than_a_second() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with guard(size=4096, nodes={rank: f"node{rank // 8}" for rank in range(4096)}, node="node0") as (zero, lines):
        zero.tick(0.0)
        began = time.process_time()
        for word in ("goodbye", "left"):
            for number, line in zip(lines, zero.lines(), strict=True):
                tell(lines[number], **{word: True})
                zero.on_line(line, 1.0)
                zero.tick(1.0)
                assert not zero.finished
        assert time.process_time() - began < 1.0
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# Whatever comes over a line.

REAL = [
    json.dumps(message).encode() + b"\n"
    for message in (
        {"failure": asdict(BOOM)},
        {"failure": asdict(Failure(1, "node02", "RuntimeError: Broken pipe", 1, FailureKind.ECHO))},
        {"failure": {**asdict(BOOM), "rank": 2, "node": "node03"}},
        {"failure": {**asdict(BOOM), "rank": 0, "node": "["}},
        {"failure": {**asdict(BOOM), "rank": [1], "exit_code": 0}},
        {"failure": {**asdict(BOOM), "exit_code": 256}},
        {"failure": {**asdict(BOOM), "exit_code": True}},
        {"failure": {**asdict(BOOM), "weight": []}},
        {"failure": []},
        {"ping": 5},
        {"ping": 10**40},
        {"stacks": "Current thread 0x01 (most recent call first):\n"},
        {"stacks": 5},
        {"goodbye": True},
        {"left": True},
        {"verdict": {}},
    )
]


def changed(text: bytes, where: int, by: bytes, cut: int) -> bytes:
    """A real message in which one place has been replaced, and which may end early."""
    where %= len(text)
    return (text[:where] + by + text[where + len(by) :])[: cut or None]


real = st.sampled_from(REAL)
mutated = st.builds(changed, real, st.integers(0, 300), st.binary(max_size=9), st.integers(0, 200))
said = st.lists(st.one_of(real, mutated, st.binary(max_size=3000)), max_size=6)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=said)
def test_no_garbage_on_a_line_ends_the_guard_or_blames_another_rank(said: list[bytes]) -> None:
    with guard(stall_timeout=1.0) as (zero, lines):
        for piece in said:
            with contextlib.suppress(ConnectionError):
                lines[1].sendall(piece)
            hear(zero)
            zero.tick(0.5)
        lines[1].close()
        hear(zero)
        zero.tick(20.0)
        zero.tick(140.0)
        if zero.verdict:
            assert zero.verdict.ranks in ((1,), (2,))
            assert zero.verdict.ranks == (1,) or zero.verdict.exit_code != 7, "rank 2 has said nothing"
            assert 0 < zero.verdict.exit_code < 256
        assert zero.verdict or zero._ranks[1].state.value in ("done", "left")


@pytest.mark.parametrize("message", REAL)
def test_every_strange_message_is_either_heard_or_passed_over(message: bytes) -> None:
    with guard() as (zero, lines):
        lines[1].sendall(message)
        hear(zero, until=None)
        tell(lines[2], failure=asdict(Failure(2, "node03", "IndexError: late", 9)))
        hear(zero, until=lambda: zero.verdict)
        zero.tick(10.0)
        assert zero.verdict
        assert zero.verdict.exit_code in (1, 7, 9)


def test_half_a_message_waits_for_the_rest() -> None:
    with guard() as (zero, lines):
        text = json.dumps({"failure": asdict(BOOM)}).encode() + b"\n"
        lines[1].sendall(text[:40])
        hear(zero)
        assert zero.verdict is None
        lines[1].sendall(text[40:])
        hear(zero, until=lambda: zero.verdict)


def test_a_line_that_never_ends_is_cut_off() -> None:
    with guard() as (zero, lines):
        lines[1].setblocking(False)

        def more() -> bool:
            with contextlib.suppress(OSError):
                lines[1].send(b"x" * (1 << 16))
            return zero.verdict is not None

        hear(zero, until=more)
        assert zero.verdict
        assert zero.verdict.ranks == (1,)
