"""A line tells messages, its end, and a loss; what the kernel of the other end answers is not the process's doing."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator

import pytest

from srunddp.supervisor.connection import SupervisorConnection
from tests.support.socket_pairs import pair, told


@pytest.fixture
def ends() -> Iterator[tuple[SupervisorConnection, socket.socket]]:
    with pair() as (ours, theirs):
        yield SupervisorConnection(ours), theirs


def test_messages_come_as_they_were_sent(ends: tuple[SupervisorConnection, socket.socket]) -> None:
    wire, other = ends
    wire.send({"ping": 1})
    wire.send({"failure": {"cause": "ü\n\ud800"}})
    assert told(other) == [{"ping": 1}, {"failure": {"cause": "ü\n\ud800"}}]


def test_what_comes_in_pieces_is_one_message_and_garbage_is_an_empty_one(
    ends: tuple[SupervisorConnection, socket.socket],
) -> None:
    wire, other = ends
    other.sendall(b'{"ping"')
    assert wire.read() == []
    other.sendall(b": 1}\nno json\n[1]\n\xff\xfe\n" + b"[" * 5000 + b"\n{")
    assert wire.read() == [{"ping": 1}, {}, {}, {}, {}]
    assert wire.open


def test_reading_does_not_wait(ends: tuple[SupervisorConnection, socket.socket]) -> None:
    assert ends[0].read() == []
    assert ends[0].open


def test_a_line_that_was_closed_has_ended_and_is_not_lost(ends: tuple[SupervisorConnection, socket.socket]) -> None:
    wire, other = ends
    other.sendall(b'{"left": true}\n')
    other.close()
    assert wire.read() == [{"left": True}], "what came before the end is heard"
    wire.read()
    assert (wire.open, wire.lost) == (False, False)


def test_a_line_that_was_reset_has_ended_and_is_not_lost(ends: tuple[SupervisorConnection, socket.socket]) -> None:
    wire, other = ends
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    wire.read()
    assert (wire.open, wire.lost) == (False, False)


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETDOWN])
def test_an_error_that_says_that_nobody_answers_is_a_loss(number: int) -> None:
    class Silent:
        def __getattr__(self, name: str) -> object:
            return lambda *_: None

        def recv(self, _: int) -> bytes:
            raise OSError(number, "")

    wire = SupervisorConnection(Silent())  # type: ignore[arg-type]
    wire.read()
    assert (wire.open, wire.lost) == (False, True)


def test_sending_does_not_wait_for_a_peer_that_does_not_read_and_is_no_error(
    ends: tuple[SupervisorConnection, socket.socket],
) -> None:
    for _ in range(200):
        ends[0].send({"stacks": "x" * 60000})


def test_what_the_kernel_said_when_we_sent_counts_when_the_line_ends() -> None:
    """It says a loss once, to whatever is called first."""

    class Lost:
        def __getattr__(self, name: str) -> object:
            return lambda *_: None

        def send(self, *_: object) -> int:
            raise OSError(errno.ETIMEDOUT, "")

        def recv(self, _: int) -> bytes:
            return b""

    wire = SupervisorConnection(Lost())  # type: ignore[arg-type]
    wire.send({"ping": 1})
    wire.read()
    assert (wire.open, wire.lost) == (False, True)
