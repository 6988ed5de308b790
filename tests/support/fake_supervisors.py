"""Plays the supervisors of many ranks in one process, as they appear to rank 0, without workers.

``python -m tests.support.fake_supervisors PUBLISHED RANKS FIRST LAST`` plays the ranks from FIRST
up to, but not including, LAST. When it reads the line ``meet``, they say hello. When it reads
``fail RANK``, this rank fails.
"""

from __future__ import annotations

import gc
import heapq
import math
import select
import socket
import sys
import time
from collections.abc import Generator
from dataclasses import replace
from typing import TypeVar

from srunddp.bootstrap.rendezvous import auth, client, protocol
from srunddp.bootstrap.rendezvous.auth import Challenge
from srunddp.bootstrap.rendezvous.messages import (
    Here,
    RendezvousInfo,
    RendezvousMessage,
    Seen,
)
from srunddp.bootstrap.rendezvous.protocol import Address
from srunddp.supervisor.limits import DEFAULT_LIMITS
from srunddp.supervisor.messages import EndedAfterVerdict, HasFailed, Ping, RankMessage, Verdict
from srunddp.util.kernel_file import raise_open_files_limit
from tests.support.fake_ranks import hello, tell

LONGEST_PATIENCE = 8.0  # seconds

Result = TypeVar("Result")

Waiting = Generator[float, bool | None, Result]
"""A generator that yields the time until which it waits. It is then sent whether something came
over the connection before that time. Sending None starts it.
"""


class FakeSupervisor:
    """The supervisor of one rank: it tries to meet rank 0 as the real client of the rendezvous
    does, and then sends the messages of a participant. No call blocks.

    Attributes:
        connection: The connection to rank 0. It does not exist before the rank's first try.
        lines: The complete messages that have come over the connection and were not read yet.
        rest: The beginning of the next message.
    """

    connection: socket.socket
    lines: list[bytes]
    rest: bytes

    def __init__(self, players: Players, rank: int) -> None:
        self.players = players
        self.rank = rank
        self.hello = hello(rank, players.size)
        self.own = players.trust
        self.life = self._live()
        self.due = math.inf

    def _live(self) -> Waiting[None]:
        while True:
            yield from self._meet()
            self.players.note("met")
            verdict = yield from self._await_verdict()
            self.players.note("verdict", verdict.exit_code)
            self.tell(EndedAfterVerdict())
            while (yield from self._line(math.inf)) is not None:
                pass
            self.connection.close()
            if verdict.restart_at is None:
                return
            self.players.published(verdict.restart_at)
            self.own = self.players.trust

    def _meet(self) -> Waiting[None]:
        patience = client.ANSWER_WITHIN
        if later := client.comes_later(self.rank):
            yield time.monotonic() + later
        while not (yield from self._try(patience)):
            self.connection.close()
            self.players.retries += 1
            patience = min(2 * patience, LONGEST_PATIENCE)
            yield time.monotonic() + 0.05 * patience
        message: RendezvousMessage | None = None
        while not isinstance(message, RendezvousInfo):
            assert message is None, message
            message = RendezvousMessage.decode((yield from self._line(math.inf)) or b"")

    def _try(self, patience: float) -> Waiting[bool]:
        self.players.connect(self)
        if not (yield time.monotonic() + patience) or self.connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_ERROR
        ):
            return False
        nonce = auth.nonce()
        self.tell(replace(self.hello, nonce=nonce, proof_kind=self.own.kind))
        patience += self.players.size / client.ANSWERED_PER_SECOND
        line = yield from self._line(time.monotonic() + patience)
        if not line:
            return False
        greeting = RendezvousMessage.decode(line)
        assert isinstance(greeting, Seen), greeting
        challenge = Challenge(
            self.hello.token,
            self.hello.rank,
            str(Address(*self.connection.getpeername()[:2])),
            nonce,
            greeting.nonce,
        )
        assert not self.own.why_invalid(greeting.proof, challenge.text(auth.SERVER))
        self.tell(Here(self.own.sign(challenge.text(auth.CLIENT))))
        return True

    def _await_verdict(self) -> Waiting[Verdict]:
        ping = time.monotonic() + DEFAULT_LIMITS.pings_every * self.rank / self.players.size
        while True:
            message = RankMessage.decode((yield from self._line(ping)) or b"")
            if isinstance(message, Verdict):
                return message
            if time.monotonic() >= ping:
                self.tell(Ping(0))
                ping += DEFAULT_LIMITS.pings_every

    def fail(self) -> None:
        self.tell(HasFailed("ValueError: boom", 7))

    def tell(self, message: RankMessage | RendezvousMessage) -> None:
        self.connection.send(message.encode())

    def _line(self, until: float) -> Waiting[bytes | None]:
        """Return the next line; empty if none comes in time, None if the connection has ended."""
        while not self.lines:
            try:
                piece = self.connection.recv(1 << 16)
            except BlockingIOError:
                if (yield until):
                    continue
                return b""
            except OSError:
                return None
            if not piece:
                return None
            *self.lines, self.rest = (self.rest + piece).split(b"\n")
        return self.lines.pop(0)


class Players:
    """All ranks of this process, and the times and connections for which they wait.

    Args:
        published: The text that says where rank 0 listens.
        size: The number of ranks in the job.
        first, last: The ranks of this process are those from ``first`` to ``last - 1``.
    """

    def __init__(self, published: str, size: int, first: int, last: int) -> None:
        self.size = size
        self.retries = 0
        self.published(published)
        self.ranks = {rank: FakeSupervisor(self, rank) for rank in range(first, last)}
        self._noted: dict[str, list[int]] = {"met": [], "verdict": []}
        self._poll = select.epoll()
        self._poll.register(sys.stdin.fileno(), select.EPOLLIN)
        self._by_descriptor: dict[int, FakeSupervisor] = {}
        self._timers: list[tuple[float, int]] = []

    def published(self, text: str) -> None:
        found = protocol.decode_advertisement(text)
        self.address = found.addresses[0]
        self.trust = auth.choose_authenticator(found.secret)

    def connect(self, rank: FakeSupervisor) -> None:
        rank.connection = socket.socket()
        rank.lines = []
        rank.rest = b""
        rank.connection.setblocking(False)
        rank.connection.bind((rank.hello.address, 0))
        rank.connection.connect_ex((self.address.host, self.address.port))
        self._by_descriptor[rank.connection.fileno()] = rank
        self._poll.register(
            rank.connection.fileno(), select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
        )

    def note(self, what: str, code: int = 0) -> None:
        """Note that a rank has met rank 0, or has the verdict. When this is true of all ranks of
        this process, print a line about it.

        Args:
            what: ``met`` or ``verdict``.
            code: The exit code in the verdict.
        """
        self._noted[what].append(code)
        if len(self._noted[what]) == len(self.ranks):
            codes = sorted({*self._noted[what]})
            tell(at=time.monotonic(), codes=codes, retries=self.retries, cpu=time.process_time())
            self._noted[what] = []

    def run(self) -> None:
        while True:
            wait = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for descriptor, _ in self._poll.poll(wait, 256):
                if descriptor == sys.stdin.fileno():
                    self._obey(*sys.stdin.readline().split())
                else:
                    self._resume(self._by_descriptor[descriptor], ready=True)
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                due, rank = heapq.heappop(self._timers)
                if self.ranks[rank].due == due:
                    self._resume(self.ranks[rank], ready=False)

    def _obey(self, word: str = "", culprit: str = "0") -> None:
        if not word:
            sys.exit()
        if word == "meet":
            for rank in self.ranks.values():
                self._resume(rank, ready=None)
        elif failing := self.ranks.get(int(culprit)):
            failing.fail()

    def _resume(self, rank: FakeSupervisor, ready: bool | None) -> None:
        try:
            due = rank.life.send(ready)
        except StopIteration:
            due = math.inf
        if due not in (rank.due, math.inf):
            heapq.heappush(self._timers, (due, rank.rank))
        rank.due = due


if __name__ == "__main__":
    raise_open_files_limit()
    gc.disable()  # garbage collection would take longer with each rank
    players = Players(sys.argv[1], *map(int, sys.argv[2:]))
    tell(ready=True)
    players.run()
