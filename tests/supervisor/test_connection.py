"""A connection tells messages, its end and its loss; the kernel's answers are not the process's
doing.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Iterator

import pytest

from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.messages import HasFailed, Ping, Stacks, WorkerHasEnded
from tests.support.connections import pair
from tests.support.starting import until

Ends = tuple[SupervisorConnection, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with pair() as (ours, theirs):
        yield SupervisorConnection(ours), theirs


def test_messages_arrive_as_they_were_sent(ends: Ends) -> None:
    ours = ends[0]
    far = SupervisorConnection(ends[1])
    sent = [Ping(1), HasFailed("ü\n\ud800", 7)]
    for message in sent:
        ours.send(message)
    arrived: list[object] = []

    def both_arrived() -> bool:
        arrived.extend(far.read())
        return len(arrived) == 2

    until(both_arrived)
    assert arrived == sent


def test_a_message_in_parts_is_one_and_garbage_is_left_out(ends: Ends) -> None:
    ours, other = ends
    line = Ping(1).encode()
    other.sendall(line[:9])
    assert ours.read() == []
    other.sendall(line[9:] + b"no json\n[1]\n\xff\xfe\n" + b"[" * 5000 + b"\n" + line + b"{")
    assert ours.read() == [Ping(1), Ping(1)]
    assert ours.open


def test_a_message_that_the_kernel_takes_in_parts_arrives(ends: Ends) -> None:
    ours = ends[0]
    far = SupervisorConnection(ends[1])
    long = Stacks("x" * 500_000)
    for _ in range(10):
        ours.send(long)  # without waiting for a peer that does not read
    found: list[object] = []

    def arrived() -> bool:
        ours.send(Ping(1))
        found.extend(far.read())
        return long in found

    until(arrived)


def test_a_message_without_end_is_cut_off(ends: Ends) -> None:
    ours, other = ends
    other.setblocking(False)

    def cut_off() -> bool:
        with contextlib.suppress(BlockingIOError):
            other.send(b"x" * (1 << 16))
        return ours.read() == [] and not ours.open

    until(cut_off)


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_was_closed_or_reset_is_not_lost(ends: Ends, reset: bool) -> None:
    ours, other = ends
    assert ours.read() == [], "reading does not wait"
    other.sendall(WorkerHasEnded().encode())
    assert ours.read() == [WorkerHasEnded()], "what came before the end is heard"
    if reset:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    ours.read()
    assert (ours.open, ours.lost, ours.reset) == (False, False, reset)


class Broken:
    """A socket upon which the kernel says in one call that nobody answers, and afterwards that it
    has ended.
    """

    def __init__(self, call: str, number: int) -> None:
        self.call = call
        self.number = number

    def __getattr__(self, name: str) -> object:
        def call(*_: object) -> object:
            if name == self.call:
                raise OSError(self.number, "")
            return {"send": 0, "recv": b""}.get(name)

        return call


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETDOWN])
@pytest.mark.parametrize("call", ["send", "recv"])
def test_an_error_that_says_that_nobody_answers_is_a_loss(call: str, number: int) -> None:
    ours = SupervisorConnection(Broken(call, number))  # type: ignore[arg-type]
    ours.send(Ping(1))
    ours.read()
    assert (ours.open, ours.lost) == (False, True)


def test_a_kernel_answers_for_a_process_that_reads_nothing() -> None:
    """But not for what it has no room for."""
    with pair() as (ours, _):
        connection = SupervisorConnection(ours)
        connection.send(Stacks("short"))
        until(lambda: connection.is_answered)
        connection.send(Stacks("x" * (64 << 20)))
        assert not connection.is_answered
