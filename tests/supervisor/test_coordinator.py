"""Rank 0's failure monitor: what it decides, whatever the number of ranks and whatever they say."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.supervisor.failure import Failure, FailureCategory, FailureKind
from srunddp.supervisor.limits import DEFAULT_LIMITS
from srunddp.supervisor.messages import (
    AllScriptsAreOver,
    EndedAfterVerdict,
    HasFailed,
    LeaseHasEnded,
    Ping,
    Pong,
    RankMessage,
    RunIsOver,
    SavesAfterVerdict,
    ScriptIsOver,
    Stacks,
    StacksWanted,
    Verdict,
    WorkerHasEnded,
)
from srunddp.supervisor.node_replacement import NextStart
from srunddp.supervisor.restart import RestartPolicy, Starts
from srunddp.supervisor.root_cause import Ending
from tests.support.connections import TAKEOVER, Scene, fold, spared
from tests.support.facts import tells
from tests.support.fake_ranks import FakeJob
from tests.support.recorded_writes import ALL_REDUCE, LOAD_BATCH
from tests.support.starting import until, write

BOOM = Failure(1, "node02", "ValueError: boom", 7)
HAS_STEPPED = Starts(1, True, False, "killed by SIGKILL", "node03", True, first_step_after=5.0)
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"
LIMIT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv"
    " operation"
)


def failed(
    rank: int, cause: str = CLOSED, weight: FailureKind = FailureKind.SECONDARY, code: int = 1
) -> Failure:
    return Failure(rank, f"node0{rank + 1}", cause, code, weight)


@pytest.mark.alone
def test_four_thousand_ranks_know_of_a_failure_in_two_seconds() -> None:
    with FakeJob(4096) as job:
        job.meet()
        verdict, codes, _ = job.fail(1234)
        code, errors = job.finish()
    assert (codes, code) == ({7}, 7)
    assert verdict.wall < 2.0, verdict
    assert "srunddp: rank 1234 on node00154 failed: ValueError: boom (exit code 7)" in errors


def test_the_root_cause_goes_to_all_and_they_close_first() -> None:
    it = Scene()
    it.say(1, HasFailed.about(BOOM))
    assert it.root_cause.ranks == (1,)
    assert [it.messages_to(rank, Verdict) for rank in (1, 2)] == [[Verdict((1,), 7)]] * 2
    assert not it.monitor.finished
    for rank in (1, 2):
        it.close(rank)
    assert it.monitor.finished


def test_connections_are_closed_when_scripts_have_ended() -> None:
    """And rank 0 waits no longer than a second or so for the others to close."""
    it = Scene()
    it.say(1, HasFailed.about(BOOM))
    it.monitor.ended()
    it.say(2, EndedAfterVerdict(), now=0.5)
    it.monitor.tick(1.0)
    assert not it.connections[2].ended, "rank 1 may have something left to do"
    it.say(1, EndedAfterVerdict(), now=2.0)
    it.monitor.tick(2.0)
    assert it.connections[2].ended
    assert not it.monitor.finished
    it.monitor.tick(3.5)
    assert it.monitor.finished


@pytest.mark.parametrize("saving", [0, 2])
def test_connections_stay_while_a_rank_that_may_save_saves(saving: int) -> None:
    """And no longer than until all workers that can be ended have ended."""
    it = Scene()
    it.say(1, HasFailed.about(BOOM))
    it.say(1, EndedAfterVerdict())
    if saving:
        it.say(2, SavesAfterVerdict())
        it.monitor.ended()
    else:
        it.say(2, EndedAfterVerdict())
        it.monitor.saves()
    for now in (1.0, 10.0, 41.9):
        it.monitor.tick(now)
        assert not it.connections[2].ended
    it.monitor.tick(42.1)
    assert it.connections[2].ended


def test_a_rank_that_says_nothing_after_the_verdict_delays_the_end_by_seconds() -> None:
    """Its word that it saves may still be on the way."""
    it = Scene()
    it.say(1, HasFailed.about(BOOM))
    it.say(1, EndedAfterVerdict())
    it.monitor.ended()
    it.monitor.tick(0.0)
    assert it.monitor.tick(1.0) <= 2.0
    assert not it.connections[2].ended
    it.monitor.tick(3.0)
    assert it.connections[2].ended


@pytest.mark.parametrize("weight", [FailureKind.SECONDARY, FailureKind.ABORTED])
def test_a_doubtful_failure_waits_for_its_cause(weight: FailureKind) -> None:
    it = Scene(size=4)
    it.say(2, HasFailed.about(failed(2, weight=weight)), now=10.0)
    assert it.monitor.tick(10.0) <= 1.0
    assert it.monitor.root_cause is None
    it.monitor.tick(11.0)
    # After an abort the others are asked where they are.
    assert bool(it.monitor.root_cause) == (weight is FailureKind.SECONDARY)
    it.monitor.tick(14.0)
    assert it.root_cause.ranks == (2,)


def waits_for_rank_2() -> Scene:
    """Rank 1 has failed as if it missed another rank, and rank 2's kernel does not answer."""
    it = Scene()
    it.connections[2].answers = False
    it.say(1, HasFailed.about(failed(1)), now=10.0)
    assert it.messages_to(2, Pong), "its kernel is asked"
    for now in (10.7, 20.0, 40.0):
        it.monitor.tick(now)
        assert it.monitor.root_cause is None
    return it


def test_a_doubtful_failure_waits_for_a_rank_that_cannot_be_reached() -> None:
    """Its node may be cut off, and the cause."""
    it = waits_for_rank_2()
    it.say(1, Ping(0), now=60.0)
    it.close(2, now=61.0, lost=True)
    assert (it.root_cause.node, it.root_cause.ending) == ("node03", Ending.LOST)


def test_a_rank_that_can_be_reached_again_delays_another_s_failure_once() -> None:
    """The kernel may answer before the supervisor's own words arrive; and a network that comes and
    goes delays no longer.
    """
    it = waits_for_rank_2()
    it.connections[2].answers = True
    it.monitor.tick(41.0)
    assert it.monitor.root_cause is None
    it.say(2, Ping(0), now=42.0)
    it.monitor.tick(42.0)
    it.connections[2].answers = False
    it.monitor.tick(42.6)
    assert it.monitor.root_cause is None
    it.monitor.tick(42.7)
    assert it.root_cause.ranks == (1,)


@pytest.mark.parametrize("where", ["its kernel answers", "on rank 0's node"])
def test_a_rank_that_is_merely_silent_delays_no_failure(where: str) -> None:
    """Its supervisor may be stopped or starved, which a kernel is not."""
    it = Scene(**fold(3, per_node=3)) if where == "on rank 0's node" else Scene()
    it.connections[2].answers = where == "its kernel answers"
    it.say(1, HasFailed.about(failed(1)), now=10.0)
    it.monitor.tick(10.7)
    assert it.root_cause.ranks == (1,)


@pytest.mark.parametrize(
    ("spare", "silence", "reset", "ending"),
    [
        (True, 7.0, True, Ending.LOST),
        (True, 7.0, False, Ending.FAILED),  # it was killed
        (True, 6.0, True, Ending.FAILED),  # it had its lease
        (False, 8.9, True, Ending.FAILED),  # there is no lease
    ],
)
def test_a_rank_that_may_have_left_for_want_of_an_answer_was_cut_off(
    spare: bool, silence: float, reset: bool, ending: Ending
) -> None:
    """Its kernel resets the connection as soon as it can be reached. The restart waits for the end
    of its worker, as for any other node that is lost.
    """
    it = spared() if spare else Scene(lost_after=9.0)
    for now in (1.0, 3.0):
        it.say(2, it.clock.ping(), now=now)
        it.monitor.tick(now)
    it.clock.now += 2.0 + silence
    for rank in (1, 3, 4):
        if rank in it.connections:
            it.say(rank, it.clock.ping(), now=3.0 + silence)
    it.close(2, now=3.0 + silence, reset=reset)
    found = it.root_cause
    assert (found.node, found.ranks, found.ending) == ("node03", (2,), ending)
    if ending is Ending.LOST:
        assert found.cause == "no answer for 9 s"
        assert it.monitor.next_start().not_before > it.clock.now


def test_a_node_that_has_ended_its_ranks_itself_is_the_lost_one() -> None:
    it = spared()
    it.say(2, LeaseHasEnded())
    assert it.connections[2].lost
    it.close(2, lost=True)
    assert (it.root_cause.node, it.root_cause.ranks) == ("node03", (2,))
    assert it.root_cause.cause == "it had no answer for 9 s, and ended its ranks"


def test_secondary_failures_do_not_put_the_decision_off() -> None:
    it = Scene(size=4)
    for rank, now in ((1, 10.0), (2, 10.4), (3, 10.6)):
        it.monitor.fail(failed(rank), now)
    it.monitor.tick(10.8)
    assert it.root_cause.ranks == (1,)


def test_a_connection_that_ends_is_a_killed_supervisor() -> None:
    it = Scene()
    it.close(2)
    assert (it.root_cause.ranks, it.root_cause.exit_code) == ((2,), 137)


@pytest.mark.parametrize(
    ("oom_kill_step", "likely", "obstacle"),
    [
        ("", "", ""),
        ("0", "", ""),
        (
            "1",
            ", probably out of memory, as OOMKillStep is on",
            "; srun --oom-kill-step=0 leaves it there",
        ),
    ],
)
def test_where_the_kernel_kills_a_whole_step_memory_is_named(
    oom_kill_step: str,
    likely: str,
    obstacle: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Then supervisor and worker go together, and nobody can read why."""
    monkeypatch.setenv("SLURM_OOM_KILL_STEP", oom_kill_step)
    it = Scene(restarts=RestartPolicy(3, Starts(), lambda: "where", lambda: True))
    it.close(1)
    assert (it.root_cause.cause, it.root_cause.exit_code) == (
        f"srunddp itself was killed{likely}",
        137,
    )
    said = capfd.readouterr().err
    assert f"\nsrunddp: not restarted: srunddp has ended on a rank{obstacle}\n" in said


@pytest.mark.parametrize(
    ("size", "lost", "link", "node"),
    [(3, (2,), True, "node03"), (3, (1, 2), True, "node01"), (3, (2,), False, "node01")],
)
def test_a_lost_connection_is_a_lost_node(
    size: int, lost: tuple[int, ...], link: bool, node: str
) -> None:
    """Rank 0's own, where no other node answers, or its own link is down."""
    it = Scene(link_is_up=lambda: link)
    for rank in lost[:-1]:
        it.connections[rank].lost = True
    it.close(lost[-1], lost=True)
    found = it.root_cause
    assert (found.node, found.ending, found.exit_code) == (node, Ending.LOST, 69)


def test_all_leave_together() -> None:
    """Else srun may end those that are still there, as with --wait."""
    it = Scene()
    for rank in (1, 2):
        it.say(rank, ScriptIsOver())
        it.say(rank, WorkerHasEnded())
    it.monitor.done()
    it.monitor.tick(1.0)
    assert not it.connections[1].ended
    assert it.messages_to(1, RunIsOver) == []
    it.monitor.left()
    it.monitor.tick(2.0)
    for rank in (1, 2):
        assert it.messages_to(rank, RunIsOver) == [RunIsOver()]
        assert it.connections[rank].ended
    assert not it.monitor.finished
    it.close(1)
    it.close(2)
    assert it.monitor.finished


def test_spare_nodes_hear_of_a_good_end_before_all_leave_together() -> None:
    """Also where the last rank says in one breath that its script is over and its worker gone."""
    it = spared()
    for number in (3, 4):
        it.say(number, ScriptIsOver(waits=True))
    it.monitor.done()
    it.monitor.left()
    for rank in (1, 2):
        it.say(rank, ScriptIsOver())
        it.say(rank, WorkerHasEnded())
    it.monitor.tick(1.0)
    assert it.messages_to(3, AllScriptsAreOver) == [AllScriptsAreOver()]
    assert not it.connections[3].ended, "it would be taken for the end of rank 0"
    for number in (3, 4):
        it.say(number, WorkerHasEnded())
    it.monitor.tick(2.0)
    assert it.connections[3].ended


def test_a_supervisor_that_is_stopped_after_its_worker_s_end_keeps_nobody() -> None:
    it = Scene()
    for rank in (1, 2):
        it.say(rank, ScriptIsOver())
        it.say(rank, WorkerHasEnded())
    it.monitor.done()
    it.monitor.left()
    it.monitor.tick(1.0)
    it.close(1)
    limit = DEFAULT_LIMITS.killed_within
    assert it.monitor.tick(2.0) <= limit - 1.0
    assert not it.monitor.finished
    it.monitor.tick(1.0 + limit)
    assert it.monitor.finished
    assert it.monitor.root_cause is None


def test_a_supervisor_that_ends_while_its_worker_is_in_exit_handlers_was_killed() -> None:
    it = Scene()
    it.say(1, ScriptIsOver())
    it.close(1, reset=True)
    assert (it.root_cause.ranks, it.root_cause.exit_code) == ((1,), 137)


def test_ranks_that_have_left_may_close() -> None:
    it = Scene()
    for rank in (1, 2):
        it.say(rank, ScriptIsOver())
        it.say(rank, WorkerHasEnded())
        it.close(rank, reset=rank == 2)
    assert it.monitor.root_cause is None
    assert not it.monitor.finished, "rank 0 itself still works"
    it.monitor.done()
    assert it.monitor.released
    it.monitor.left()
    assert it.monitor.finished


def test_a_last_word_that_comes_twice_or_late_says_nothing_new() -> None:
    """As of a worker that ends while its supervisor has yet to read that its script is over."""
    policy = RestartPolicy(3, Starts(1, out_of_memory=True), lambda: "where", lambda: True)
    it = Scene(restarts=policy)
    for message in (ScriptIsOver(), WorkerHasEnded(), WorkerHasEnded(), ScriptIsOver()):
        it.say(1, message)
    it.monitor.done()
    it.monitor.left()
    it.monitor.tick(1.0)
    assert not it.connections[1].ended, "rank 2 still works"
    it.close(1)
    assert it.monitor.root_cause is None, "rank 1 has said goodbye"


def test_the_ranks_that_wait_are_told_when_all_scripts_are_over() -> None:
    it = Scene()
    it.say(1, ScriptIsOver(waits=True))
    it.say(2, ScriptIsOver())
    it.monitor.tick(1.0)
    assert (it.messages_to(1, AllScriptsAreOver), it.monitor.released) == ([], False)
    it.monitor.done(waits=True)
    assert it.monitor.released
    for now in (2.0, 3.0):
        it.monitor.tick(now)
    assert (it.messages_to(1, AllScriptsAreOver), it.messages_to(2, AllScriptsAreOver)) == (
        [AllScriptsAreOver()],
        [],
    )


def test_the_goodbyes_of_four_thousand_ranks_are_cheap() -> None:
    it = Scene(size=4096, nodes={rank: f"node{rank // 8}" for rank in range(4096)}, node="node0")
    it.monitor.tick(0.0)
    began = time.process_time()
    for message in (ScriptIsOver(), WorkerHasEnded()):
        for rank in it.connections:
            it.say(rank, message, now=1.0)
            it.monitor.tick(1.0)
            assert not it.monitor.finished
    assert time.process_time() - began < 1.0


def test_a_silent_rank_whose_kernel_answers_is_named() -> None:
    it = Scene(lost_after=9.0)
    for now in range(0, 52, 5):
        it.say(1, Ping(0), now=float(now))
        it.monitor.tick(float(now))
    assert it.root_cause.ranks == (2,)
    assert "silent for 39 s" in it.root_cause.cause


@pytest.mark.parametrize("rank", [0, 1])
def test_a_long_rendezvous_is_no_silence(rank: int) -> None:
    it = Scene(rank)
    it.monitor.tick(1000.0)
    assert it.monitor.root_cause is None


SINFO = '#!/bin/sh\necho "$@" >> {folder}/asked\necho "node02 {state}"\n'


@pytest.mark.parametrize(("state", "down"), [("down*", True), ("alloc", False), ("", False)])
def test_a_silent_node_down_for_slurm_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, down: bool
) -> None:
    write(tmp_path / "sinfo", SINFO.format(folder=tmp_path, state=state)).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    it = Scene()
    threads = set(threading.enumerate())
    for now in (6.0, 11.0, 16.0, 21.0):
        assert not (tmp_path / "asked").exists()
        it.say(2, Ping(0), now=now)
        it.monitor.tick(now)
    until((tmp_path / "asked").exists)
    until(lambda: not set(threading.enumerate()) - threads)
    it.monitor.tick(26.0)
    assert "--nodes node02" in (tmp_path / "asked").read_text()
    expected = ((1,), "Slurm says that the node is down") if down else None
    found = it.monitor.root_cause
    assert (found and (found.ranks, found.cause)) == expected


def test_a_silent_supervisor_on_a_node_that_is_down_is_one_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are noticed at the same moment."""
    write(tmp_path / "sinfo", SINFO.format(folder=tmp_path, state="down*")).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    it = Scene(lost_after=9.0)
    threads = set(threading.enumerate())
    it.say(1, Ping(0), now=1.0)
    it.say(2, Ping(0), now=1.0)
    it.monitor.tick(12.0)
    until((tmp_path / "asked").exists)
    until(lambda: not set(threading.enumerate()) - threads)
    it.say(2, Ping(0), now=60.0)
    it.monitor.tick(60.0)
    assert [len(it.messages_to(rank, Verdict)) for rank in (1, 2)] == [1, 1]
    assert "silent" in it.root_cause.cause


# Steps that stop, and ranks that hang.


def working(size: int = 3, **changes: Any) -> Scene:
    """All ranks have made seven steps by 1 s."""
    it = Scene(
        size=size, stall_timeout=3.0, **{"step": lambda: 7, "stacks": lambda: ALL_REDUCE} | changes
    )
    for rank in range(1, size):
        it.say(rank, Ping(7), now=1.0)
    it.monitor.tick(1.0)
    return it


def test_the_rank_that_blocks_a_stall_is_named() -> None:
    it = working()
    it.monitor.tick(3.9)
    assert not it.messages_to(1, StacksWanted)
    it.monitor.tick(4.0)
    assert [it.messages_to(rank, StacksWanted) for rank in (1, 2)] == [[StacksWanted()]] * 2
    it.say(1, Stacks(LOAD_BATCH), now=4.1)
    it.monitor.tick(4.1)
    assert it.monitor.root_cause is None
    it.say(2, Stacks(ALL_REDUCE), now=4.2)
    it.monitor.tick(4.2)
    assert (it.root_cause.ranks, it.root_cause.exit_code) == ((1,), 124)


def test_a_step_after_the_question_ends_the_stall() -> None:
    it = working()
    it.monitor.tick(4.0)
    it.say(2, Ping(8), now=4.1)
    it.monitor.tick(6.9)
    it.monitor.tick(7.0)
    assert it.monitor.root_cause is None


def test_a_finished_rank_is_expected_to_make_no_step() -> None:
    """It may be saving or uploading for long; and so may one that has said so by its last
    heartbeat.
    """
    it = working()
    it.monitor.done()
    for rank in (1, 2):
        it.say(rank, ScriptIsOver())
        it.say(rank, Ping(8))
    for now in (2.0, 5.0, 8.0, 11.0, 14.0):
        it.monitor.tick(now)
    assert it.monitor.root_cause is None


def restarted(**changes: Any) -> Scene:
    """In an earlier start the first step came after 5 s, so this one has 45 s for it."""
    policy = RestartPolicy(3, HAS_STEPPED, lambda: "where", lambda: False)
    known: dict[str, Any] = {"step": lambda: 0, "stacks": lambda: ALL_REDUCE, "restarts": policy}
    it = Scene(stall_timeout=3.0, **known | changes)
    it.monitor.tick(1.0)
    for rank in (1, 2):
        it.say(rank, Ping(0), now=1.0)
    return it


def test_a_restarted_start_that_hangs_before_its_first_step_ends_and_restarts() -> None:
    it = restarted()
    it.monitor.tick(45.9)
    assert not it.messages_to(1, StacksWanted)
    it.monitor.tick(46.0)
    it.say(1, Stacks(LOAD_BATCH), now=46.1)
    it.say(2, Stacks(ALL_REDUCE), now=46.1)
    it.monitor.tick(46.2)
    assert (it.root_cause.ranks, it.root_cause.exit_code) == ((1,), 124)
    assert it.monitor.restart == "where"


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_pauses_before_its_first_step_has_no_limit(who: int) -> None:
    it = restarted(paused=lambda: who == 0)
    for now in (5.0, 52.0):
        it.monitor.tick(now)
        it.say(1, Ping(0, paused=who == 1), now=now)
    assert it.monitor.root_cause is None
    assert not it.messages_to(1, StacksWanted)


@pytest.mark.parametrize(
    "said",
    [Ping(1), ScriptIsOver(waits=True, has_steps=True), HasFailed.about(BOOM, has_steps=True)],
    ids=lambda said: said.kind,
)
def test_steps_of_another_rank_are_progress(said: RankMessage) -> None:
    for message, restarts in ((said, True), (Ping(0), False)):
        before = Starts(1, False, False, "killed by SIGKILL", "node02", False)
        policy = RestartPolicy(3, before, lambda: "where", lambda: False)
        it = Scene(restarts=policy)
        it.say(1, message, now=1.0)
        it.monitor.fail(BOOM, 2.0)
        assert it.monitor.restart == ("where" if restarts else None)


def test_nothing_is_due_again_and_again_while_a_rank_saves() -> None:
    it = working()
    it.monitor.fail(failed(1, "the launcher ended the run", FailureKind.SIGNALLED, 143), 2.0)
    it.say(2, Ping(1), now=9.0)
    it.monitor.tick(10.0)
    assert it.monitor.tick(10.1) > 0.1


def test_nor_while_ranks_save_that_might_have_hung() -> None:
    """They have been asked for their stacks before the signal came."""
    it = Scene()
    it.say(1, HasFailed.about(failed(1, LIMIT)), now=1.0)
    it.monitor.tick(2.0)
    assert it.messages_to(2, StacksWanted)
    it.monitor.fail(failed(0, "the launcher ended the run", FailureKind.SIGNALLED, 143), 3.0)
    for now in (5.5, 6.0):
        assert it.monitor.tick(now) > 0.1
    assert it.monitor.root_cause is None


# What each of three ranks has failed of, or its stack; and the rank, exit code and cause that are
# named.
HANGS = {
    "one limit, one waits": ((LIMIT, LOAD_BATCH, ALL_REDUCE), (1, 124, "it hangs in load_batch")),
    "two limits": ((LIMIT, LOAD_BATCH, LIMIT), (1, 124, "it hangs in load_batch")),
    "two limits, one closed": ((LIMIT, LOAD_BATCH, CLOSED), (1, 124, "it hangs in load_batch")),
    "as NCCL's watchdogs": (("SIGABRT", LOAD_BATCH, "SIGABRT"), (1, 124, "it hangs in load_batch")),
    "an abort, the others wait": (
        (ALL_REDUCE, "SIGABRT", ALL_REDUCE),
        (1, 134, "killed by SIGABRT"),
    ),
    "an abort, the others work": (
        (LOAD_BATCH, "SIGABRT", LOAD_BATCH),
        (1, 134, "killed by SIGABRT"),
    ),
    "an abort, its echo, one works": (
        (CLOSED, "SIGABRT", LOAD_BATCH),
        (1, 134, "killed by SIGABRT"),
    ),
    "an error, the others work": ((CLOSED, LOAD_BATCH, LOAD_BATCH), (0, 1, "RuntimeError")),
    "a limit, the others wait": ((LIMIT, ALL_REDUCE, ALL_REDUCE), (0, 1, "RuntimeError")),
}


@pytest.mark.parametrize("name", HANGS)
def test_the_rank_that_the_failed_ones_waited_for_is_named(name: str) -> None:
    does, (culprit, code, cause) = HANGS[name]
    it = Scene(stacks=lambda: does[0])
    stacks = {rank: text for rank, text in enumerate(does) if text in (LOAD_BATCH, ALL_REDUCE)}
    for rank in set(range(3)) - set(stacks):
        abort = ("killed by SIGABRT", FailureKind.ABORTED, 134)
        failure = failed(rank, *(abort if does[rank] == "SIGABRT" else (does[rank],)))
        it.say(rank, HasFailed.about(failure), now=1.0) if rank else it.monitor.fail(failure, 1.0)
    it.monitor.tick(2.0)
    for rank in set(stacks) - {0}:
        if it.messages_to(rank, StacksWanted):
            it.say(rank, Stacks(stacks[rank]), now=2.1)
    it.monitor.tick(2.1)
    found = it.root_cause
    assert (found.ranks, found.exit_code) == ((culprit,), code)
    assert cause in found.cause
    assert ("in load_batch" in found.traceback) == (code == 124), "its stack"


# With spare nodes: of five tasks three are ranks, each task on a node of its own.

HOW: dict[str, tuple[Callable[[Scene], None], str]] = {
    "closes": (lambda it: it.close(4), "srunddp itself was killed"),
    "is reset": (lambda it: it.close(4, reset=True), "srunddp itself was killed"),
    "is lost": (lambda it: it.close(4, lost=True), "no answer"),
    "fails": (lambda it: it.say(4, HasFailed.about(failed(4, "boom"))), "boom"),
    "is silent": (lambda _: None, "srunddp has been silent for 39 s, stopped or starved"),
}


@pytest.mark.parametrize("how", HOW)
def test_a_spare_that_ends_costs_nothing_and_is_said_once(
    how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its node takes no rank any more: of two nodes that are lost then, the second has none to go
    to.
    """
    it = spared()
    (does, cause) = HOW[how]
    does(it)
    for now in range(0, 62, 5):
        for rank in (1, 2, 3):
            it.say(rank, it.clock.ping(), now=float(now))
        it.monitor.tick(float(now))
    assert it.monitor.root_cause is None
    assert capfd.readouterr().err == f"\nsrunddp: spare node node05 is lost: {cause}\n"
    it.connections[2].open = False
    it.close(1, lost=True)
    said = (
        "srunddp: ended with it: rank 0 on node01, rank 2 on node03\n\nsrunddp: not restarted: no"
        " spare node is left\n"
    )
    assert capfd.readouterr().err.endswith(said)
    assert it.messages_to(3, Verdict) == [Verdict((1,), 69)]


def test_a_spare_that_leaves_when_all_scripts_are_over_is_not_lost(
    capfd: pytest.CaptureFixture[str],
) -> None:
    it = spared()
    it.say(4, ScriptIsOver(waits=True))
    for rank in (1, 2):
        it.say(rank, ScriptIsOver())
    it.monitor.done()
    it.monitor.tick(1.0)
    it.say(4, WorkerHasEnded())
    it.close(4, reset=True)
    assert (it.monitor.has_lost, it.monitor.root_cause) == (False, None)
    assert capfd.readouterr().err == ""


def test_a_spare_node_of_several_tasks_is_said_to_be_lost_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    it = spared(ranks=4, **fold(6, 2))
    for number in (4, 5):
        it.close(number, lost=True)
    (said,) = capfd.readouterr().err.split("\n")[1:-1]
    assert tells(said, "spare node", "node03", "lost")


@pytest.mark.parametrize(("lost", "quorum"), [(True, 4), (False, 4)])
def test_who_stays_starts_anew_and_who_is_on_a_lost_node_leaves(lost: bool, quorum: int) -> None:
    """One that was killed is on no other side; the worker of one that is lost may run until its
    lease is over.
    """
    it = spared(ranks=4, **fold(8, 2))
    clock = it.clock
    it.monitor.fail(failed(6), 0.0)
    for heard_of in ((1, 2, 3, 4, 5), (1, 4, 5, 7)):
        clock.now += 8.0
        for rank in heard_of:
            it.say(rank, clock.ping())
    it.close(3, lost=lost)
    verdict = Verdict((2, 3), 69) if lost else Verdict((3,), 137)
    for rank in (1, 4, 5, 7):
        assert it.messages_to(rank, Verdict) == [replace(verdict, restart_at="where")]
    assert it.messages_to(2, Verdict) == [replace(verdict, node_is_given_up=True)]
    monitor = it.monitor
    assert (monitor.restart, monitor.fenced) == ("where", False)
    for rank in (1, 4, 5, 7):  # they close; rank 2 as well, unless it is cut off
        it.close(rank)
    until = clock.now + 9.0 + 3.0
    assert monitor.next_start() == NextStart((1, 4, 5, 7), quorum, until - 8.0, ("node02",))
    it.close(2)
    until = until - 8.0 if lost else 0.0
    assert monitor.next_start() == NextStart((1, 4, 5, 7), quorum, until, ("node02",))


def test_a_failure_moves_nobody_the_first_time() -> None:
    """The second time the ranks of that node move, and rank 0's as all others."""
    last = Starts(1, True, False, "boom", "node02", True)
    for before, moves in ((Starts(), False), (last, True)):
        it = spared(last=before)
        it.say(1, HasFailed.about(BOOM))
        stays = Verdict((1,), 7, restart_at="where")
        given_up = Verdict((1,), 7, node_is_given_up=True)
        assert it.messages_to(1, Verdict) == [given_up if moves else stays]
    it = spared(last=replace(last, node="node01"))
    it.monitor.fail(failed(0, "boom", FailureKind.PRIMARY), 1.0)
    assert (it.monitor.fenced, it.monitor.cut_off, it.monitor.restart) == (True, False, None)
    assert it.messages_to(1, Verdict)[0].restart_at == TAKEOVER


def test_a_node_that_fails_twice_comes_back() -> None:
    """Rank 0's as well, to the one that takes over. A lost node is not told, and not expected."""
    last = Starts(1, True, False, "boom", "node02", True)
    back = {f"node0{number}": (9 + number,) for number in range(1, 6)}
    it = spared(last=last, comes_back=back)
    it.say(1, HasFailed.about(BOOM))
    given_up = Verdict((1,), 7, restart_at="where", node_is_given_up=True)
    assert it.messages_to(1, Verdict) == [given_up]
    assert (it.monitor.restart, it.monitor.returns) == ("where", False)
    assert it.monitor.next_start().expected == (2, 3, 4, 11)
    assert it.monitor.next_start().left == ("node02",)
    it = spared(last=replace(last, node="node01"), comes_back=back)
    it.monitor.fail(failed(0, "boom", FailureKind.PRIMARY), 1.0)
    assert (it.monitor.fenced, it.monitor.restart, it.monitor.returns) == (True, TAKEOVER, True)
    it = spared(comes_back=back)
    it.close(1, lost=True)
    assert it.monitor.next_start().expected == (2, 3, 4)
    assert it.monitor.next_start().left == ("node02",)


IMPORT = Failure(
    1,
    "node02",
    "ModuleNotFoundError: No module named 'm'",
    1,
    category=FailureCategory.IMPORT_FAILED,
    failed_import="ModuleNotFoundError m",
)


def test_a_node_that_cannot_import_what_others_could_is_given_up_at_once() -> None:
    for before, moves in ((Starts(), False), (HAS_STEPPED, True)):
        policy = RestartPolicy(3, before, lambda: "where", lambda: False)
        it = spared(restarts=policy)
        it.say(1, HasFailed.about(IMPORT))
        assert [each.node_is_given_up for each in it.messages_to(1, Verdict)] == [moves]
        assert it.monitor.restart == ("where" if moves else None)


def test_where_a_second_node_cannot_either_the_script_is_wrong() -> None:
    before = replace(HAS_STEPPED, node="node03", failed_import="ModuleNotFoundError m", moved=True)
    it = spared(restarts=RestartPolicy(3, before, lambda: "where", lambda: False))
    it.say(1, HasFailed.about(IMPORT))
    assert it.monitor.restart is None
    assert it.messages_to(1, Verdict) == [Verdict((1,), 1)]


@pytest.mark.parametrize("asked", [False, True])
def test_what_forbids_a_restart_also_forbids_that_others_go_on_without_rank_0(asked: bool) -> None:
    """For the second time in a row on rank 0's node, which would else be given up."""
    it = spared(last=replace(HAS_STEPPED, node="node01"))
    final = replace(BOOM, rank=0, node="node01")
    if asked:
        it.monitor.asked("SIGTERM")
    else:
        final = replace(final, exit_code=78, category=FailureCategory.FINAL)
    it.monitor.fail(final, 1.0)
    assert (it.monitor.fenced, it.monitor.restart) == (False, None)
    assert it.messages_to(2, Verdict) == [Verdict((0,), final.exit_code)]


@pytest.mark.parametrize("answer", [(1, 3), (1,)], ids=str)
def test_rank_0_without_an_answer_of_half_ends_itself(answer: tuple[int, ...]) -> None:
    """With it, the answers of two of four others are more than half."""
    it = spared()
    clock = it.clock
    for now in (3.0, 6.0, 9.0, 12.0, 15.0):
        clock.now = 1000.0 + now
        for rank in answer:
            it.say(rank, clock.ping())
        assert it.monitor.tick(now) <= 3.0
    cut_off = len(answer) < 2
    assert (it.monitor.fenced, it.monitor.cut_off, it.monitor.restart) == (cut_off, cut_off, None)
    assert not cut_off or (it.root_cause.node, it.root_cause.exit_code) == (
        "node01",
        69,
    )


def test_when_all_scripts_are_over_no_answer_is_needed() -> None:
    it = spared()
    clock = it.clock
    it.monitor.done()
    for rank in (1, 2, 3, 4):
        it.say(rank, ScriptIsOver(waits=True))
    it.monitor.tick(1.0)
    assert it.messages_to(4, AllScriptsAreOver) == [AllScriptsAreOver()]
    clock.now += 60.0
    it.monitor.tick(2.0)
    assert it.monitor.root_cause is None


@pytest.mark.parametrize("weight", [FailureKind.STOPPED, FailureKind.SECONDARY])
def test_nobody_waits_for_a_spare_to_fail_as_well(weight: FailureKind) -> None:
    it = spared()
    for rank in (0, 1, 2):
        it.monitor.fail(failed(rank, weight=weight), 1.0)
    it.monitor.tick(1.0)
    assert it.monitor.root_cause


def test_abandoned_rank_0_leaves_its_ranks_to_a_spare_node(
    capfd: pytest.CaptureFixture[str],
) -> None:
    it = spared(comes_back={"node01": (10,)})
    assert it.monitor.abandon(replace(BOOM, rank=0, node="node01"), 1.0)
    assert (it.monitor.fenced, it.monitor.restart) == (True, None)
    assert it.messages_to(2, Verdict) == [Verdict((0,), 7, restart_at=TAKEOVER)]
    assert "rank 0 on node01 lost: ValueError: boom" in capfd.readouterr().err
    assert not it.monitor.returns
    assert not it.monitor.abandon(BOOM, 2.0), "all have been told of an end already"
    assert not Scene().monitor.abandon(BOOM, 1.0)


# Whatever comes over a connection.

ENDS = st.sampled_from(["closed", "lost", "reset"])
SAID = st.sampled_from(
    [
        ScriptIsOver(),
        ScriptIsOver(waits=True),
        WorkerHasEnded(),
        EndedAfterVerdict(),
        Ping(3, 1000.0, 1000.0),
        Stacks(LOAD_BATCH),
        *(HasFailed.about(failed(1, LIMIT, kind)) for kind in FailureKind),
    ]
)
EVENTS = st.tuples(st.sampled_from([0.1, 1.0, 20.0]), st.integers(1, 4), SAID | ENDS)


@given(events=st.lists(EVENTS, max_size=12), has_spares=st.booleans())
def test_whatever_the_ranks_say_and_do_all_are_told_once_and_rank_zero_ends(
    events: list[tuple[float, int, Any]], has_spares: bool
) -> None:
    it = spared() if has_spares else Scene(size=5, stall_timeout=5.0)
    now = 1.0
    ended: set[int] = set()
    for seconds, peer, what in events:
        now += seconds
        it.clock.now += seconds
        if isinstance(what, RankMessage) and peer not in ended:
            it.say(peer, what, now)
        elif isinstance(what, str) and peer not in ended:
            ended.add(peer)
            it.close(peer, now, lost=what == "lost", reset=what == "reset")
        it.monitor.tick(now)
    if not it.monitor.root_cause:
        it.monitor.fail(failed(0, "boom", FailureKind.PRIMARY), now)
    it.monitor.ended()
    for peer in {1, 2, 3, 4} - ended:
        it.say(peer, EndedAfterVerdict(), now)
    for _ in range(3):
        now += 1.3
        it.monitor.tick(now)
    assert it.monitor.finished
    for peer in (1, 2, 3, 4):
        told = len(it.messages_to(peer, Verdict))
        is_spare = has_spares and peer > 2
        assert told == 1 or (is_spare and told == 2), "one that is dropped has been told before"


STRANGE = [
    HasFailed.about(BOOM).encode(),
    HasFailed.about(failed(1)).encode(),
    b'{"kind": "has_failed", "cause": "boom", "exit_code": 0}',
    b'{"kind": "has_failed", "cause": "boom", "exit_code": 256}',
    b'{"kind": "has_failed", "cause": "boom", "exit_code": true}',
    b'{"kind": "has_failed", "cause": "boom", "exit_code": 7, "rank": 2}',
    b'{"kind": "has_failed", "cause": "boom", "exit_code": 7, "weight": 9}',
    b'{"kind": "has_failed"}',
    b'{"kind": "ping", "step": 5}',
    b'{"kind": "ping", "step": 1' + 40 * b"0" + b"}",
    b'{"kind": "ping", "step": 1, "sent_at": NaN, "echo": 1e999}',
    b'{"kind": "lease_has_ended"}',
    Stacks("Current thread 0x01 (most recent call first):\n").encode(),
    b'{"kind": "stacks", "text": 5}',
    ScriptIsOver().encode(),
    WorkerHasEnded().encode(),
    Verdict((2,), 7).encode(),
    b'{"kind": ["ping"]}',
    b"[]",
]
kinds = st.sampled_from(["has_failed", "ping", "stacks", "worker_has_ended", "verdict", "nothing"])
values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=3)
words = st.sampled_from(["cause", "exit_code", "weight", "step", "sent_at", "echo", "text"])
made_up = st.builds(
    lambda kind, others: json.dumps({"kind": kind, **others}).encode(),
    kinds,
    st.dictionaries(words, values, max_size=3),
)


@given(lines=st.lists(st.sampled_from(STRANGE) | made_up | st.binary(max_size=9), max_size=6))
def test_no_garbage_ends_rank_zero_or_blames_another_rank(lines: list[bytes]) -> None:
    it = Scene(stall_timeout=1.0)
    for line in lines:
        it.say(1, line)
        it.monitor.tick(0.5)
    said = [RankMessage.decode(line) for line in lines]
    left = any(isinstance(message, ScriptIsOver | WorkerHasEnded) for message in said)
    it.close(1)
    for now in (20.0, 140.0):
        it.monitor.tick(now)
    found = it.monitor.root_cause
    assert found or left
    if found:
        assert found.ranks in ((1,), (2,))
        assert found.ranks == (1,) or found.exit_code != 7, "rank 2 has said nothing"
        assert 0 < found.exit_code < 256


@pytest.mark.parametrize("line", STRANGE, ids=repr)
def test_after_a_strange_message_the_next_is_heard(line: bytes) -> None:
    it = Scene()
    it.say(1, line)
    it.say(2, HasFailed.about(Failure(2, "node03", "IndexError: late", 9)))
    it.monitor.tick(10.0)
    assert it.root_cause.exit_code in (1, 7, 9)
