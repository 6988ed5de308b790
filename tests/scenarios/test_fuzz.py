"""Whatever is thrown at a rank 0 that gathers, the world still meets, and nothing counts that is
not proven.
"""

from __future__ import annotations

import contextlib
import random
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srunddp.bootstrap.rendezvous.auth import HmacAuthenticator
from srunddp.bootstrap.rendezvous.client import join
from srunddp.bootstrap.rendezvous.messages import (
    AbortReason,
    CannotCome,
    Here,
    RendezvousInfo,
    Told,
)
from srunddp.supervisor.messages import ScriptIsOver
from tests.bootstrap.rendezvous.test_client import LONG, RankZero, greeting, hello, rank_zero, soon
from tests.support.starting import until

SECRET = HmacAuthenticator(b"s" * 32)
REAL = [
    message.encode()
    for message in (
        greeting(hello(1), "secret"),
        greeting(hello(0, 7), "secret"),
        greeting(hello(1, token="1207.0.1"), "secret"),
        greeting(hello(1), "none"),
        Here("0" * 64),
        CannotCome("0" * 64, "broken", 78),
        AbortReason("broken", 78),
        Told(),
        RendezvousInfo(master_addr="127.0.0.1", master_port=1, run="1207.0.0", master_node="n"),
        ScriptIsOver(),
    )
]


def changed(text: bytes, where: int, by: bytes, cut: int) -> bytes:
    """A real message in which one place has been replaced, and which may end early."""
    where %= len(text)
    return (text[:where] + by + text[where + len(by) :])[: cut or None]


real = st.sampled_from(REAL)
mutated = st.builds(changed, real, st.integers(0, 999), st.binary(max_size=9), st.integers(0, 300))
said = st.lists(
    st.lists(st.one_of(real, mutated, st.binary(max_size=5000)), max_size=4), max_size=6
)


def throw(server: RankZero, pieces: list[bytes]) -> None:
    with contextlib.suppress(ConnectionError), server.connect() as caller:
        for piece in pieces:
            caller.sendall(piece)


def meets_all_the_same(said: list[list[bytes]]) -> None:
    with rank_zero(2, trust=SECRET) as server:
        for pieces in said:
            throw(server, pieces)
        connection, meeting = join([server.address], hello(1), soon(), SECRET)
        connection.close()
        assert server.result().meeting == meeting
        assert sorted(server.result().connections) == [1]
        assert len(server.said) <= 10
        assert all(line.isprintable() and len(line) < 1000 for line in server.said)


@given(said)
def test_no_bytes_keep_a_world_from_meeting(said: list[list[bytes]]) -> None:
    meets_all_the_same(said)


@pytest.mark.soak
@settings(max_examples=20_000)
@given(said)
def test_no_bytes_keep_a_world_from_meeting_in_a_long_campaign(said: list[list[bytes]]) -> None:
    meets_all_the_same(said)


@given(st.lists(mutated, max_size=6))
def test_no_bytes_of_a_proven_rank_do_more_than_end_the_meeting(pieces: list[bytes]) -> None:
    """With no proof asked for, they are heard as a rank's own: the meeting succeeds, or ends with
    one message.
    """
    with rank_zero(3, linger=0.0, within=5) as server, server.connect() as caller:
        with contextlib.suppress(ConnectionError):
            caller.sendall(greeting(hello(1, 3)).encode() + Here("").encode())
            for piece in pieces:
                caller.sendall(piece)
            caller.sendall(b"\n" + AbortReason("the end", 3).encode())
        server.refusal_of_any_kind()


@pytest.mark.slow
def test_a_flood_costs_rank_zero_no_memory_to_speak_of() -> None:
    """Endless lines, half messages and mute connections, ten at once."""
    pieces = [b"x" * 100_000, REAL[0][:-1], REAL[0], b"\n" * 5000, b"{" * 4095]
    draw = random.Random(1)
    with rank_zero(2, trust=SECRET) as server, ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda _: throw(server, [draw.choice(pieces)]), range(500)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        list(pool.map(lambda _: throw(server, [draw.choice(pieces)]), range(5000)))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 20_000, f"{grown} KiB"
        began = time.monotonic()
        connection, meeting = join([server.address], hello(1), soon(), SECRET)
        connection.close()
        assert server.meeting() == meeting
        assert time.monotonic() - began < LONG / 3


def test_a_line_without_an_end_is_cut_off() -> None:
    with rank_zero(2, trust=SECRET) as server, server.connect() as caller:
        with pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(64):
                caller.sendall(b"x" * (1 << 20))
        until(lambda: server.said)  # after it has closed
