from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from srunddp.bootstrap.environment.rank_zero_discovery import broadcast_over_pmi
from srunddp.errors import RendezvousError
from tests.support.starting import LONG

SPACE = "kvs_4711_0"


class Launcher:
    """A PMI-1 server as Hydra and Slurm have one: a socket per rank, one key-value space, one
    barrier.
    """

    def __init__(self, ranks: int) -> None:
        pairs = [socket.socketpair() for _ in range(ranks)]
        self.ends = [end for end, _ in pairs]
        self.heard: list[list[str]] = [[] for _ in range(ranks)]
        self._values: dict[str, str] = {}
        self._barrier = threading.Barrier(ranks)
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, pair[1]))
            for rank, pair in enumerate(pairs)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, rank: int, wire: socket.socket) -> None:
        with wire, wire.makefile("rw", newline="\n") as lines:
            for line in lines:
                self.heard[rank].append(line.strip())
                words = dict(word.split("=", 1) for word in line.split())
                try:
                    lines.write(self._answer(words) + "\n")
                    lines.flush()
                except (threading.BrokenBarrierError, OSError):
                    return

    def _answer(self, words: dict[str, str]) -> str:
        match words:
            case {"cmd": "init"}:
                return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case {"cmd": "get_my_kvsname"}:
                return f"cmd=my_kvsname kvsname={SPACE}"
            case {"cmd": "put", "kvsname": space, "key": key, "value": value} if space == SPACE:
                self._values[key] = value
                return "cmd=put_result rc=0 msg=success"
            case {"cmd": "barrier_in"}:
                self._barrier.wait(timeout=LONG)
                return "cmd=barrier_out"
            case {"cmd": "get", "kvsname": space, "key": key} if (
                space == SPACE and key in self._values
            ):
                return f"cmd=get_result rc=0 msg=success value={self._values[key]}"
            case {"cmd": "get"}:
                return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
            case {"cmd": "finalize"}:
                return "cmd=finalize_ack"
        return "cmd=error rc=-1"

    def end(self) -> None:
        self._barrier.abort()
        for end in self.ends:
            end.close()
        for thread in self._threads:
            thread.join(LONG)
        assert not any(thread.is_alive() for thread in self._threads)


@contextmanager
def launcher(ranks: int) -> Iterator[Launcher]:
    server = Launcher(ranks)
    try:
        yield server
    finally:
        server.end()


@contextmanager
def answering(*answers: bytes) -> Iterator[int]:
    """A descriptor whose other end gives these answers and then closes."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs:
            for answer in answers:
                if not theirs.recv(4096):
                    return
                theirs.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ours.fileno()
    finally:
        ours.close()
        thread.join(LONG)


def broadcast(server: Launcher, message: str, speaker: int = 0, timeout: float = 20) -> list[str]:
    def one(rank: int) -> str:
        said = message if rank == speaker else None
        return broadcast_over_pmi(said, descriptor=server.ends[rank].fileno(), timeout=timeout)

    with ThreadPoolExecutor(len(server.ends)) as pool:
        return list(pool.map(one, range(len(server.ends))))


@pytest.mark.parametrize(("ranks", "speaker"), [(1, 0), (2, 0), (3, 2)])
@pytest.mark.parametrize(
    "message", ["1207.0.0@10.0.0.1:40123", "ab12@[fd00::7]:40123", "a=b=c", "x" * 200]
)
def test_every_rank_reads_what_rank_zero_says(ranks: int, speaker: int, message: str) -> None:
    """PMI tells the address for any distribution of the ranks."""
    with launcher(ranks) as server:
        assert broadcast(server, message, speaker) == [message] * ranks


def test_every_rank_says_finalize_and_only_rank_zero_puts() -> None:
    """Hydra ends the whole job when a rank that said init leaves without finalize.

    The launcher's descriptors stay open: closing one would free a number that the script's next
    file gets.
    """
    with launcher(3) as server:
        broadcast(server, "here")
        for rank, heard in enumerate(server.heard):
            spoken = [line.split()[0].removeprefix("cmd=") for line in heard]
            if rank == 0:
                puts = ["put"]
            else:
                puts = []
            assert spoken == ["init", "get_my_kvsname", *puts, "barrier_in", "get", "finalize"]
            assert os.fstat(server.ends[rank].fileno())


def test_nothing_is_read_beyond_the_answers() -> None:
    """What follows belongs to the next reader of the shared socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(
            b"".join(_GREETED) + b"cmd=get_result rc=0 value=here\ncmd=finalize_ack\nREST"
        )
        assert broadcast_over_pmi(None, descriptor=ours.fileno(), timeout=LONG) == "here"
        ours.setblocking(True)
        assert ours.recv(100) == b"REST"


def test_pmi_waits_for_a_missing_rank_until_the_timeout() -> None:
    with launcher(2) as server:
        began = time.monotonic()
        with pytest.raises(
            RendezvousError,
            match=r"barrier did not open within [0-9]+ s; expected .* -> .*--timeout",
        ):
            broadcast_over_pmi("here", descriptor=server.ends[0].fileno(), timeout=0.2)
        assert 0.15 < time.monotonic() - began < LONG / 3  # of the barrier


def test_a_descriptor_that_does_not_answer_is_named() -> None:
    """A closed one, one that is no socket, and one whose other end closes."""
    with tempfile.TemporaryFile() as file, answering(b"cmd=response_to_init rc=0\n") as closing:
        closed = os.dup(0)
        os.close(closed)
        for descriptor, wrong in (
            (
                closed,
                (
                    f"PMI_FD={closed} does not answer: Bad file descriptor; expected .*a wrapper"
                    " must exec it"
                ),
            ),
            (file.fileno(), "does not answer: Socket operation on"),
            (closing, "PMI closed its socket|does not answer"),
        ):
            with pytest.raises(RendezvousError, match=wrong) as caught:
                broadcast_over_pmi("here", descriptor=descriptor, timeout=LONG)
            assert caught.value.exit_code == 69


_GREETED = (b"cmd=response_to_init rc=0\n", b"cmd=my_kvsname kvsname=k\n", b"cmd=barrier_out\n")


@pytest.mark.parametrize(
    ("answers", "shown"),
    [
        (
            (b"cmd=response_to_init rc=-1\n",),
            "PMI answered 'cmd=response_to_init rc=-1'; expected cmd=response_to_init",
        ),
        (
            (b"cmd=something_else\n",),
            "PMI answered 'cmd=something_else'; expected cmd=response_to_init",
        ),
        (
            (b"HTTP/1.1 400 Bad Request\n",),
            "PMI answered 'HTTP/1.1 400 Bad Request'; expected cmd=response_to_init",
        ),
        ((b"cmd=response_to_init rc=0\n", b"cmd=my_kvsname rc=0\n"), "PMI answered"),
        ((b"\xff\xfe\x00\n",), "PMI answered"),
        ((b"\n",), "PMI answered ''"),
        # Nobody put it.
        ((*_GREETED, b"cmd=get_result rc=-1 msg=key_not_found value=unknown\n"), "key_not_found"),
    ],
    ids=["refusal", "other-command", "no-pmi", "no-name", "binary", "empty", "no-key"],
)
def test_a_wrong_answer_is_shown_with_what_was_expected(
    answers: tuple[bytes, ...], shown: str
) -> None:
    with answering(*answers) as descriptor, pytest.raises(RendezvousError) as caught:
        broadcast_over_pmi(None, descriptor=descriptor, timeout=LONG)
    assert shown in str(caught.value)
    assert "--channel slurm" in str(caught.value)
