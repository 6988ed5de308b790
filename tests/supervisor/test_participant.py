"""The failure monitor of the other ranks obeys rank 0, and speaks where rank 0 cannot any more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.supervisor.failure import Failure, FailureKind
from srunddp.supervisor.limits import DEFAULT_LIMITS
from srunddp.supervisor.messages import (
    AllScriptsAreOver,
    EndedAfterVerdict,
    HasFailed,
    LeaseHasEnded,
    Ping,
    Pong,
    RunIsOver,
    ScriptIsOver,
    Stacks,
    StacksWanted,
    Verdict,
    WorkerHasEnded,
)
from srunddp.supervisor.node_replacement import NextStart
from srunddp.supervisor.root_cause import Ending
from tests.support.connections import (
    IMPATIENT,
    TAKEOVER,
    Scene,
    deputies,
    listening,
    silent,
    spared,
)

BOOM = Failure(1, "node02", "ValueError: boom", 7)
# An empty line comes first, as a script may have left one unfinished.
LOST = "\nsrunddp: rank 0 on node01 lost: no answer for 60 s (exit code 69)\n"
KILLED = "\nsrunddp: rank 0 on node01 failed: srunddp itself was killed (exit code 137)\n"


def test_rank_zero_is_obeyed_and_nothing_is_said_again(capfd: pytest.CaptureFixture[str]) -> None:
    it = Scene(1)
    it.say(0, Verdict((2,), 9))
    found = it.root_cause
    assert (found.ranks, found.exit_code, it.monitor.finished) == ((2,), 9, False)
    it.monitor.ended()
    it.close(0)
    assert it.monitor.finished
    assert it.connections[0].messages == [EndedAfterVerdict()]
    assert capfd.readouterr().err == ""


def test_rank_zero_is_told_all_and_may_close_after_the_end() -> None:
    it = Scene(
        1, stacks=lambda: "a stack", step=lambda: 5, paused=lambda: True, has_steps=lambda: True
    )
    it.monitor.tick(5.0)
    it.say(0, StacksWanted())
    it.monitor.fail(BOOM, 6.0)
    it.monitor.done()
    assert it.monitor.released
    it.monitor.left()
    messages = [
        Ping(5, paused=True),
        Stacks("a stack"),
        HasFailed.about(BOOM, has_steps=True),
        ScriptIsOver(has_steps=True),
    ]
    assert it.connections[0].messages == [*messages, WorkerHasEnded()]
    it = Scene(1)
    it.monitor.done()
    it.monitor.left()
    it.close(0)
    assert it.monitor.root_cause is None


def test_it_leaves_when_rank_zero_closes(capfd: pytest.CaptureFixture[str]) -> None:
    it = Scene(1)
    it.monitor.done()
    assert it.monitor.released
    it.monitor.left()
    it.say(0, RunIsOver())
    assert not it.monitor.finished
    it.close(0)
    assert it.monitor.finished
    assert it.monitor.root_cause is None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("lost", [True, False])
def test_it_keeps_its_0_but_says_that_rank_zero_is_gone_before_the_end_of_the_run(
    lost: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """All other ranks may be done: then nobody else can say it."""
    it = Scene(1)
    it.monitor.done()
    it.monitor.left()
    it.close(0, lost=lost)
    assert it.monitor.finished
    assert it.monitor.root_cause is None
    assert capfd.readouterr().err == (LOST if lost else KILLED)


@pytest.mark.parametrize("done", [True, False])
def test_a_node_that_was_cut_off_while_rank_zero_ended_does_not_say_how(
    done: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run may have ended in order meanwhile, and nobody could tell this node."""
    it = Scene(1)
    it.monitor.tick(5.0)
    it.say(0, Pong(), now=5.0)
    it.monitor.fail(Failure(1, "node02", "Gloo: peer", 1, weight=FailureKind.SECONDARY), 6.0)
    if done:
        it.monitor.done()
        it.monitor.left()
    it.close(0, now=25.0, reset=True)
    assert it.monitor.finished
    cause = "node02 did not hear of rank 0 on node01 for 20 s, and rank 0 has ended meanwhile"
    assert capfd.readouterr().err == f"\nsrunddp: {cause} (exit code 69)\n"
    if not done:
        assert (it.root_cause.ranks, it.root_cause.exit_code) == ((), 69)


def test_the_launchers_signal_explains_the_end_of_rank_zero_to_one_that_is_done(
    capfd: pytest.CaptureFixture[str],
) -> None:
    it = Scene(1, asked=lambda _: 15)
    it.monitor.done()
    it.monitor.left()
    it.close(0)
    assert it.monitor.finished
    assert capfd.readouterr().err == ""


def test_it_keeps_the_0_of_its_worker_where_another_rank_fails_later() -> None:
    it = Scene(1)
    it.monitor.done()
    it.monitor.left()
    it.say(0, Verdict((2,), 9))
    assert it.root_cause.exit_code == 0
    assert not it.monitor.finished
    it.close(0)
    assert it.monitor.finished


def test_after_a_verdict_it_stays_while_others_may_save() -> None:
    """Rank 0 sends nothing meanwhile, and closes when all have ended."""
    it = Scene(1)
    it.monitor.tick(5.0)
    it.say(0, Verdict((2,), 9), now=6.0)
    it.monitor.done()
    it.monitor.left()
    it.monitor.tick(6.0 + 10_000.0)
    assert not it.monitor.finished
    it.close(0)
    assert it.monitor.finished


def test_it_does_not_stay_for_a_rank_zero_that_is_silent() -> None:
    """As one whose supervisor is stopped."""
    it = Scene(1)
    it.monitor.tick(5.0)
    it.monitor.done()
    it.monitor.left()
    it.monitor.tick(6.0)
    assert not it.monitor.finished
    it.monitor.tick(5.0 + 10_000.0)
    assert it.monitor.finished
    assert it.monitor.root_cause is None


def test_a_deputy_that_is_done_has_the_last_word_all_the_same(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with listening("127.0.0.1", "127.0.0.2") as sockets:
        first, second = (Scene(rank, deputies=deputies(*sockets, rank=rank)) for rank in (1, 2))
        first.monitor.done()
        first.monitor.left()
        second.close(0)
        assert capfd.readouterr().err == ""
        first.close(0)
        assert capfd.readouterr().err == KILLED


def test_a_worker_with_mpi_stays_until_rank_zero_says_over() -> None:
    it = Scene(1)
    it.monitor.done(waits=True)
    assert it.connections[0].messages == [ScriptIsOver(waits=True)]
    assert not it.monitor.released
    it.say(0, AllScriptsAreOver())
    assert it.monitor.released


@pytest.mark.parametrize("lost", [True, False])
def test_of_all_that_lose_rank_zero_the_first_deputy_says_so(
    lost: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where a node is lost, of the deputies on others."""
    with listening("127.0.0.1", "127.0.0.2", "127.0.0.3") as sockets:
        speaker = 2 if lost else 1
        for rank in (3, 4, speaker):
            it = Scene(rank, size=5, deputies=deputies(*sockets, rank=rank))
            it.close(0, lost=lost)
            assert it.root_cause.exit_code == (69 if lost else 137)
            it.monitor.ended()
            assert capfd.readouterr().err == ((LOST if lost else KILLED) if rank == speaker else "")


def test_who_has_spoken_for_rank_zero_can_still_be_reached_for_a_while() -> None:
    """Else the next deputy, which notices later, would say the same again."""
    with listening("127.0.0.1", "127.0.0.2") as sockets:
        it = Scene(1, deputies=deputies(*sockets, rank=1))
        it.close(0)
        it.monitor.ended()
        stays = DEFAULT_LIMITS.deputy_stays
        assert not it.monitor.finished
        assert it.monitor.tick(0.0) <= stays
        it.clock.now += stays
        assert it.monitor.finished


def test_who_does_not_speak_for_rank_zero_stays_for_nobody() -> None:
    with listening("127.0.0.1", "127.0.0.2") as sockets:
        it = Scene(2, deputies=deputies(*sockets, rank=2))
        it.close(0)
        it.monitor.ended()
        assert it.monitor.finished


def test_without_deputies_all_say_that_rank_zero_was_killed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    it = Scene(1)
    it.close(0)
    it.monitor.ended()
    assert capfd.readouterr().err == KILLED


def test_rank_zero_may_have_been_killed_for_memory_with_its_whole_step(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_OOM_KILL_STEP", "1")
    it = Scene(1)
    it.close(0)
    it.monitor.ended()
    likely = "killed, probably out of memory, as OOMKillStep is on (exit"
    assert capfd.readouterr().err == KILLED.replace("killed (exit", likely)


def test_a_launcher_that_ends_the_run_is_no_failure_of_rank_zero() -> None:
    """It ends one node after the other, and the worker here may have something to save."""
    it = Scene(1, asked=lambda _: 15)
    it.close(0)
    assert it.monitor.root_cause is None
    it.monitor.fail(BOOM, 1.0)
    assert it.root_cause.ranks == (1,)


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize(
    ("weight", "culprit"), [(FailureKind.PRIMARY, 1), (FailureKind.SECONDARY, 0)]
)
def test_a_silent_rank_zero_outweighs_a_secondary_failure(
    weight: FailureKind, culprit: int, closes: bool
) -> None:
    """But one that has closed does not: this rank's own failure is then what is known."""
    it = Scene(1)
    it.monitor.fail(Failure(1, "node02", "RuntimeError: Broken pipe", 7, weight), 1.0)
    if closes:
        it.close(0)
        culprit = 1
    it.monitor.tick(0.5)
    it.monitor.tick(91.0)
    assert it.root_cause.ranks == (culprit,)


@pytest.mark.parametrize(
    ("link", "lost"), [(True, "rank 0 on node01"), (False, "rank 1 on node02")]
)
def test_a_lost_connection_is_their_node_or_ours(
    link: bool, lost: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who is cut off itself does not say that rank 0 is lost."""
    with listening("127.0.0.2") as sockets:
        it = Scene(1, link_is_up=lambda: link, deputies=deputies(*sockets, rank=1))
        it.close(0, lost=True)
        it.monitor.ended()
    found = it.root_cause
    assert (f"rank {found.ranks[0]} on {found.node}", found.ending, found.exit_code) == (
        lost,
        Ending.LOST,
        69,
    )
    assert capfd.readouterr().err == (LOST if link else "")


@pytest.mark.parametrize("refuses", [True, False])
def test_another_deputy_shows_whether_the_network_is_up(
    refuses: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that refuses has ended already, and has answered; where none does it is this node that is
    cut off.
    """
    with listening("127.0.0.2", "127.0.0.3") as (own, other), silent("127.0.0.3") as mute:
        it = Scene(1, deputies=deputies(own, other if refuses else mute, rank=1, limits=IMPATIENT))
        if refuses:
            other.close()
        it.close(0, lost=True)
        it.monitor.ended()
    assert capfd.readouterr().err == (LOST if refuses else "")


# With spare nodes.


@pytest.mark.parametrize(
    "how", ["closes", "resets after a long silence", "is lost", "does not answer"]
)
def test_where_rank_zero_is_gone_a_spare_node_takes_over(how: str) -> None:
    """Its worker may run until its lease is over, unless its kernel has said that it is gone."""
    it = spared(1)
    clock = it.clock
    clock.now += 5.0
    it.say(0, clock.pong())
    clock.now += 8.9
    it.monitor.tick(1.0)
    assert it.monitor.root_cause is None
    if how == "does not answer":
        clock.now += 0.1
        it.monitor.tick(2.0)
    else:
        resets = how == "resets after a long silence"
        it.close(0, now=8.9 if resets else 1.0, lost=how == "is lost", reset=resets)
    monitor = it.monitor
    lost = how != "closes"
    assert (monitor.restart, monitor.fenced, monitor.cut_off) == (TAKEOVER, True, lost)
    assert monitor.next_start() == NextStart(not_before=1005.0 + 9.0 + 3.0 if lost else 0.0)
    assert monitor.finished


def test_the_end_of_a_lease_is_told_while_it_can_be() -> None:
    """Nothing can be sent once the connection has ended at this side, and rank 0, which may be
    there, would take the end for that of a killed supervisor.
    """
    it = spared(1)
    connection = it.connections[0]
    told_before_end = []
    connection.end = lambda: told_before_end.extend(connection.messages)  # type: ignore[method-assign]
    it.clock.now += 9.0
    it.monitor.tick(1.0)
    assert told_before_end == [LeaseHasEnded()]
    it.monitor.tick(2.0)
    assert it.messages_to(0, LeaseHasEnded) == [LeaseHasEnded()]


def test_several_ends_of_rank_zero_at_once_are_one(capfd: pytest.CaptureFixture[str]) -> None:
    """Its connection has ended, it has been silent, and the lease is over: after a turn that took
    long, all are found at the same time. What the kernel says is sure.
    """
    it = spared(1)
    it.monitor.tick(0.5)
    it.connections[0].open = False
    it.clock.now += 500.0
    it.monitor.tick(500.0)
    assert it.root_cause.exit_code == 137
    assert not it.monitor.cut_off
    assert it.messages_to(0, LeaseHasEnded) == []
    assert capfd.readouterr().err == KILLED


@pytest.mark.parametrize("asked", ["signal", "by", "nobody"])
def test_asked_to_end_or_without_a_restart_left_none_takes_over(asked: str) -> None:
    it = spared(
        1,
        takeover="" if asked == "nobody" else TAKEOVER,
        asked=lambda _: 15 if asked == "signal" else 0,
    )
    if asked == "by":
        it.monitor.asked("SIGTERM")
    it.clock.now += 9.0
    assert it.monitor.tick(1.0) > 0.0, "nothing is due again and again"
    it.close(0, lost=True)
    assert (it.monitor.restart, it.monitor.fenced) == (None, False)
    assert bool(it.monitor.root_cause) == (asked != "signal")


@pytest.mark.parametrize(
    ("given_up", "restart_at", "code"), [(True, None, 0), (False, "where", 9)], ids=str
)
def test_who_is_on_a_node_that_is_given_up_ends_with_0(
    given_up: bool, restart_at: str | None, code: int
) -> None:
    it = spared(1)
    it.say(0, Verdict((1,), 9, restart_at, given_up))
    assert (it.root_cause.exit_code, it.monitor.fenced) == (code, given_up)
    assert it.monitor.restart == restart_at


def test_who_is_on_such_a_node_may_come_back() -> None:
    """Its worker ends at once, as another may have its rank."""
    it = spared(1)
    it.say(0, Verdict((1,), 9, "where", node_is_given_up=True))
    assert (it.monitor.fenced, it.monitor.restart, it.monitor.returns) == (True, "where", True)
    assert it.monitor.abandon(BOOM, 1.0)
    assert (it.monitor.restart, it.monitor.returns) == (None, False)


def test_the_first_verdict_counts() -> None:
    it = spared(1)
    it.say(0, Verdict((1,), 9, "where"))
    it.say(0, Verdict((2,), 7, "elsewhere", node_is_given_up=True))
    assert (it.root_cause.ranks, it.monitor.restart, it.monitor.fenced) == (
        (1,),
        "where",
        False,
    )


def test_an_abandoned_rank_leaves_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    it = spared(1)
    assert it.monitor.abandon(BOOM, 1.0)
    assert (it.monitor.fenced, it.monitor.cut_off, it.monitor.finished, it.monitor.restart) == (
        True,
        False,
        True,
        None,
    )
    assert (it.connections[0].messages, it.connections[0].ended) == ([], True)
    assert capfd.readouterr().err == ""
    it.say(0, Pong())
    assert it.monitor.finished, "what comes late counts no more"
    assert not Scene(1).monitor.abandon(BOOM, 1.0)


def test_an_abandoned_rank_does_not_go_to_a_restart_that_it_was_told_of() -> None:
    it = spared(1)
    it.say(0, Verdict((2,), 9, restart_at="where"))
    assert it.monitor.restart == "where"
    assert it.monitor.abandon(BOOM, 1.0)
    assert it.monitor.fenced
    following: str | None = it.monitor.restart
    assert following is None


def test_nothing_counts_that_comes_from_a_rank_zero_that_was_given_up() -> None:
    it = Scene(1)
    it.monitor.tick(5.0)
    it.monitor.tick(1000.0)
    assert it.root_cause.ranks == (0,)
    it.say(0, Pong())
    it.say(0, Verdict((2,), 9))
    assert it.root_cause.ranks == (0,)
    assert it.monitor.finished


STRANGE = [
    b"no json",
    b'{"kind": "verdict"}',
    b'{"kind": "verdict", "culprits": 5, "exit_code": 1}',
    b'{"kind": "verdict", "culprits": [1], "exit_code": "many"}',
    b'{"kind": "verdict", "culprits": [1], "exit_code": 0}',
    b'{"kind": "verdict", "culprits": [1], "exit_code": 1e999, "restart_at": "where"}',
    b'{"kind": "verdict", "culprits": [1], "exit_code": 9}',
    b'{"kind": "verdict", "node_is_given_up": true}',
    b'{"kind": "verdict", "culprits": [true], "exit_code": 9, "node_is_given_up": true}',
    b'{"kind": "pong", "sent_at": [], "echo": "soon"}',
    b'{"kind": "stacks_wanted", "now": true}',
]


GARBLED = [
    b'{"kind": "verdict", "restart_at": "where", "node_is_given_up": true}',
    b'{"kind": "verdict", "culprits": [], "restart_at": "where", "node_is_given_up": true}',
    b'{"kind": "verdict", "culprits": [1], "exit_code": 0, "restart_at": "where"}',
    b'{"kind": "verdict", "culprits": [1], "exit_code": 256, "node_is_given_up": true}',
    b'{"kind": "verdict", "culprits": ["1"], "exit_code": 9, "restart_at": "where"}',
    b'{"kind": "verdict", "culprits": [1], "exit_code": 9, "restart_at": 5}',
    b'{"kind": "verdict", "culprits": [1], "exit_code": 9, "node_is_given_up": "yes"}',
    b'{"kind": "verdict", "culprits": [1], "exit_code": 9, "restart": "where"}',
    b'{"kind": "verdict", "culprits": [1], "exit_code": 9, "restart_at": "where"',
]


@pytest.mark.parametrize("message", GARBLED)
def test_of_a_verdict_that_is_none_nothing_counts(message: bytes) -> None:
    it = spared(1)
    it.say(0, message)
    monitor = it.monitor
    assert (monitor.root_cause, monitor.restart, monitor.fenced) == (None, None, False)
    it.say(0, Verdict((2,), 9))
    assert (it.root_cause.ranks, monitor.restart, monitor.fenced) == ((2,), None, False)


@given(messages=st.lists(st.sampled_from(STRANGE), max_size=5), ends=st.booleans())
def test_no_garbage_from_rank_zero_ends_another(messages: list[bytes], ends: bool) -> None:
    it = spared(1)
    for message in messages:
        it.say(0, message)
    if ends:
        it.close(0)
    it.monitor.tick(0.5)
    it.monitor.tick(91.0)
    assert it.monitor.root_cause, "rank 0 has gone"
    assert 0 < it.root_cause.exit_code < 256
