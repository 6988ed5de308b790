"""Rank 0 asks for what is wrong with GPUs before it ends the run, and waits for that no longer than
3 s.
"""

from __future__ import annotations

from typing import Any

import pytest

from srunddp.supervisor.failure import Failure, FailureCategory, FailureKind, GpuFault, GpuFaultKind
from srunddp.supervisor.failure_monitor import FailureMonitor
from srunddp.supervisor.messages import (
    GpuFaults,
    GpuFaultsWanted,
    HasFailed,
    Ping,
    RunIsOver,
    ScriptIsOver,
    Stacks,
    Verdict,
    WorkerHasEnded,
)
from srunddp.supervisor.restart import RestartPolicy, Starts
from tests.support.connections import Scene, fold
from tests.support.recorded_writes import ALL_REDUCE

BOOM = Failure(2, "node02", "RuntimeError: CUDA error", 1)
ECHO = Failure(2, "node02", "RuntimeError: Connection closed", 1, FailureKind.SECONDARY)
BROKEN = GpuFault(3, "GPU-d", "Xid 79, fallen off the bus", GpuFaultKind.HARDWARE.value, 79)
PROGRAMS_OWN = GpuFault(3, "GPU-d", "Xid 31", GpuFaultKind.PROGRAM.value, 31)


class FakeGpus:
    """Those of rank 0's node.

    Attributes:
        asked: how often rank 0 has asked; answer: what it gets, None for nothing yet.
    """

    def __init__(self, answer: tuple[GpuFault, ...] | None = ()) -> None:
        self.asked = 0
        self.answer = answer

    def ask(self) -> None:
        self.asked += 1

    def look(self) -> tuple[GpuFault, ...] | None:
        return self.answer

    def news(self) -> tuple[GpuFault, ...]:
        return ()


def scene(gpus: FakeGpus | None) -> Scene:
    """Six ranks on three nodes."""
    return Scene(gpus=gpus, **fold(6, 2))


def stalled(gpus: FakeGpus, **changes: Any) -> Scene:
    """Three ranks of which none makes a step, and which are asked about their GPUs since 4.1."""
    context: dict[str, Any] = {"stall_timeout": 3.0, "stacks": lambda: ALL_REDUCE, "gpus": gpus}
    it = Scene(step=lambda: 7, **context, **changes)
    for rank in (1, 2):
        it.say(rank, Ping(7), now=1.0)
    it.monitor.tick(1.0)
    it.monitor.tick(4.0)
    for rank in (1, 2):
        it.say(rank, Stacks(ALL_REDUCE), now=4.1)
    it.monitor.tick(4.1)
    assert gpus.asked == 1
    return it


def asked(it: Scene) -> set[int]:
    return {rank for rank in range(1, 6) if it.messages_to(rank, GpuFaultsWanted)}


def fail(it: Scene, failure: Failure) -> None:
    it.say(failure.rank, HasFailed.about(failure))
    # A failure that follows waits for its cause.
    for now in (0.0, 1.0, 5.0, 9.0):
        it.monitor.tick(now)
        if asked(it) or it.monitor.root_cause:
            return


def test_of_a_sure_culprit_its_node_alone_is_asked() -> None:
    """Its first rank, which may watch the GPUs, and the culprit, which may have others."""
    it = scene(FakeGpus())
    fail(it, Failure(3, "node02", "RuntimeError: CUDA error", 1))
    assert asked(it) == {2, 3}
    assert it.monitor.root_cause is None
    assert not it.monitor.finished
    it.say(2, GpuFaults((BROKEN,), is_answer=True), now=1.0)
    it.monitor.tick(1.0)
    assert it.monitor.root_cause is None
    it.say(3, GpuFaults((), is_answer=True), now=1.1)
    it.monitor.tick(1.1)
    assert it.root_cause.ranks == (3,)
    assert [(fault.node, fault.xid) for fault in it.root_cause.gpu_faults] == [("node02", 79)]
    assert it.messages_to(5, Verdict) == [Verdict((3,), 1)]


def test_if_the_failure_only_follows_all_nodes_are_asked() -> None:
    gpus = FakeGpus()
    it = scene(gpus)
    fail(it, ECHO)
    assert asked(it) == {2, 4}
    assert gpus.asked == 1
    it.say(2, GpuFaults((), is_answer=True), now=9.0)
    it.say(4, GpuFaults((BROKEN,), is_answer=True), now=9.0)
    it.monitor.tick(9.0)
    assert (it.root_cause.ranks, it.root_cause.node) == ((), "node03")
    assert it.root_cause.cause.startswith("GPU 3 (GPU-d) of node03: Xid 79, fallen off the bus; ")


def test_nobody_waits_longer_than_three_seconds() -> None:
    """Neither for another rank nor for rank 0's own node."""
    it = scene(FakeGpus(None))
    fail(it, ECHO)
    began = 9.0 if it.monitor.tick(9.0) else 0.0
    it.monitor.tick(began + 3.1)
    assert it.root_cause.ranks == (2,)
    assert it.root_cause.gpu_faults == ()


def test_while_others_are_asked_rank_zero_wakes_when_their_time_is_over() -> None:
    """Neither later nor again and again before."""
    it = scene(FakeGpus())
    it.say(2, HasFailed.about(BOOM))
    assert it.monitor.tick(0.0) == pytest.approx(3.0)
    assert it.monitor.tick(2.0) == pytest.approx(1.0)
    it.monitor.tick(3.0)
    assert it.root_cause.ranks == (2,)


def test_rank_zero_looks_soon_whether_its_own_driver_has_answered() -> None:
    """Also in the turn in which it asks."""
    it = scene(FakeGpus(None))
    it.say(2, HasFailed.about(ECHO))
    it.monitor.tick(0.0)
    for now in (0.7, 0.8):
        assert it.monitor.tick(now) <= 0.1
        assert asked(it) == {2, 4}


def test_what_happens_while_ranks_are_asked_changes_no_cause(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It most often follows from the cause. What is heard of other GPUs meanwhile is named."""
    it = scene(FakeGpus())
    fail(it, BOOM)
    it.say(4, HasFailed.about(Failure(4, "node03", "ValueError: another", 9)), now=0.1)
    it.say(4, GpuFaults((BROKEN,)), now=0.1)
    it.close(5, now=0.2, lost=True)
    it.monitor.tick(0.2)
    assert it.monitor.root_cause is None
    assert capfd.readouterr().err == ""
    it.say(2, GpuFaults((PROGRAMS_OWN,), is_answer=True), now=0.3)
    it.monitor.tick(0.3)
    assert (it.root_cause.ranks, it.root_cause.exit_code) == ((2,), 1)
    assert [fault.node for fault in it.root_cause.gpu_faults] == ["node02", "node03"]


def test_ranks_that_end_well_while_they_are_asked_hear_the_verdict_all_the_same() -> None:
    """As those that were stalled may go on after all."""
    gpus = FakeGpus(None)
    it = stalled(gpus)
    it.monitor.done()
    it.monitor.left()
    for rank in (1, 2):
        it.say(rank, ScriptIsOver(), now=4.2)
        it.say(rank, WorkerHasEnded(), now=4.2)
    for now in (4.2, 5.2):
        it.monitor.tick(now)
    gpus.answer = ()
    it.monitor.tick(7.1)
    assert it.root_cause.exit_code == 124
    for rank in (1, 2):
        assert not it.messages_to(rank, RunIsOver)
        assert [verdict.exit_code for verdict in it.messages_to(rank, Verdict)] == [124]


def test_rank_zero_s_worker_may_save_before_the_connections_end() -> None:
    """Its supervisor says so when it has heard of the verdict."""
    gpus = FakeGpus(None)
    policy = RestartPolicy(3, Starts(), lambda: "where", lambda: True)
    it = stalled(gpus, restarts=policy)
    gpus.answer = ()
    it.monitor.tick(7.1)
    assert it.monitor.restart
    it.monitor.saves()
    for now in (7.1, 9.0):
        it.monitor.tick(now)
        assert not it.connections[1].ended
    it.monitor.ended()
    it.monitor.tick(9.1)
    assert it.connections[1].ended


def test_rank_zero_stays_for_its_own_driver_when_all_others_are_gone() -> None:
    gpus = FakeGpus(None)
    it = Scene(gpus=gpus, **fold(2, 2))
    it.say(1, HasFailed.about(Failure(1, "node01", "RuntimeError: CUDA error", 1)))
    it.close(1)
    it.monitor.done()
    it.monitor.left()
    it.monitor.tick(0.1)
    assert (it.monitor.root_cause, it.monitor.finished) == (None, False)
    gpus.answer = ()
    it.monitor.tick(0.2)
    assert it.root_cause.ranks == (1,)
    assert it.monitor.finished


def test_a_rank_alone_asks_as_well() -> None:
    gpus = FakeGpus(None)
    monitor = FailureMonitor(None, gpus=gpus)
    monitor.fail(BOOM, 0.0)
    monitor.fail(ECHO, 0.1)
    monitor.left()
    assert monitor.tick(0.1) <= 0.1
    assert (gpus.asked, monitor.root_cause, monitor.finished) == (1, None, False)
    gpus.answer = (BROKEN,)
    monitor.tick(0.2)
    found = monitor.root_cause
    assert found
    assert (found.cause, [fault.node for fault in found.gpu_faults]) == (BOOM.cause, ["node02"])
    assert monitor.finished


def test_a_rank_that_is_gone_is_not_waited_for() -> None:
    it = scene(FakeGpus())
    fail(it, BOOM)
    it.close(2)
    it.monitor.tick(0.1)
    assert it.root_cause.ranks == (2,)


@pytest.mark.parametrize(
    ("gpus", "failure"),
    [
        (None, BOOM),  # a node without GPUs
        (FakeGpus(), Failure(2, "node02", "x", 1, category=FailureCategory.IMPORT_FAILED)),
        (FakeGpus(), Failure(2, "node02", "x", 75, FailureKind.STOPPED)),
    ],
)
def test_nobody_is_asked_where_no_gpu_can_be_the_reason(
    gpus: FakeGpus | None, failure: Failure
) -> None:
    it = scene(gpus)
    it.say(failure.rank, HasFailed.about(failure))
    it.monitor.tick(400.0)
    assert it.root_cause.ranks == (2,)
    assert asked(it) == set()


def test_a_fault_of_the_hardware_is_said_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """The ranks may hang from then on, and nothing fails for long."""
    it = scene(FakeGpus())
    it.say(4, GpuFaults((BROKEN,)))
    it.say(4, GpuFaults((BROKEN,)))
    line = "srunddp: GPU 3 (GPU-d) of node03: Xid 79, fallen off the bus"
    assert capfd.readouterr().err.strip() == line
    assert it.monitor.root_cause is None


def test_a_rank_without_gpus_answers_at_once() -> None:
    it = Scene(rank=1)
    it.say(0, GpuFaultsWanted())
    assert it.messages_to(0, GpuFaults) == [GpuFaults((), is_answer=True)]


def test_a_rank_answers_when_its_driver_has() -> None:
    gpus = FakeGpus(None)
    it = Scene(rank=1, gpus=gpus)
    it.say(0, GpuFaultsWanted())
    it.monitor.tick(0.0)
    assert it.messages_to(0, GpuFaults) == []
    gpus.answer = (PROGRAMS_OWN,)
    it.monitor.tick(0.1)
    assert it.messages_to(0, GpuFaults) == [GpuFaults((PROGRAMS_OWN,), is_answer=True)]
