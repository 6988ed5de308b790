"""The guard of every rank but rank 0: one line to rank 0's supervisor, which judges; here its verdict is obeyed."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from srunddp.supervisor.connection import LOST_AFTER, SupervisorConnection
from srunddp.supervisor.failure import Failure, FailureKind
from srunddp.supervisor.root_cause import LOST, RootCause, report_as_deputy

PING_EVERY = 5.0
_STARVED_FOR = 30.0
_WITNESS_WITHIN = 2.0
_SOON = 0.1


@dataclass(frozen=True)
class RankContext:
    """What a guard knows of its own rank.

    Attributes:
        rank, node: of this supervisor; nodes: of the ranks that it knows, rank 0's among them.
        stall_timeout: seconds without a step; 0 for no limit.
        step: how many steps the worker has made; stacks: asks it where it is.
        link_is_up: whether this node's interface has a link.
        folder: of the run's logs.
        asked: the number of the launcher's signal that ends this run, at a time; 0 for none.
        lost_after: seconds without an answer of another node's kernel, after which that node is lost.
    """

    rank: int
    node: str
    nodes: Mapping[int, str]
    stall_timeout: float
    step: Callable[[], int]
    stacks: Callable[[], str]
    link_is_up: Callable[[], bool]
    folder: Path | None = None
    lost_after: float = LOST_AFTER
    asked: Callable[[float], int] = lambda _: 0

    @property
    def ping_every(self) -> float:
        """Seconds between two pings, which also say how far this rank has come."""
        return min(PING_EVERY, self.lost_after / 4, self.stall_timeout / 4 or PING_EVERY)

    @property
    def silent_after(self) -> float:
        """Seconds without a ping, though the kernel answers, after which a supervisor is stopped or starved."""
        return self.lost_after + _STARVED_FOR

    @property
    def starved(self) -> str:
        """The cause then."""
        return f"srunddp has been silent for {self.silent_after:g} s, stopped or starved"


class Participant:
    """The guard below rank 0.

    Attributes:
        verdict: once there is one, all leave with its code; released: the worker may end; finished: and so may we.
    """

    def __init__(self, post: RankContext, line: socket.socket) -> None:
        self.verdict: RootCause | None = None
        self.released = self._left = False
        self._post = post
        self._wire = SupervisorConnection(line, post.lost_after)
        self._failure: Failure | None = None
        self._deputy: Mapping[str, Any] = {}
        self._heard = self._pinged = 0.0

    @property
    def finished(self) -> bool:
        """Whether the supervisor may leave: after a verdict when rank 0 ends the line, as a launcher then kills all."""
        return (self._left and self._wire.sent) or (self.verdict is not None and not self._wire.open)

    @property
    def _is_through(self) -> bool:
        return self._left or self.verdict is not None

    def lines(self) -> Iterable[socket.socket]:
        """What to watch for :meth:`on_line`."""
        return (self._wire.line,)

    def on_line(self, _: socket.socket, now: float) -> bool:
        """Read what rank 0 says; False when the line has ended."""
        self._heard = now
        for message in self._wire.read():
            self._hear(message)
        if not self._wire.open and not self._is_through:
            self._on_end("srunddp itself was killed", now)
        return self._wire.open

    def _hear(self, message: Mapping[str, Any]) -> None:
        if isinstance(message.get("verdict"), dict):
            self.verdict = self.verdict or _told(message["verdict"])
        elif "stacks" in message:
            self._wire.send({"stacks": self._post.stacks()})
        elif isinstance(message.get("deputy"), dict):
            self._deputy = message["deputy"]

    def fail(self, failure: Failure, now: float) -> None:
        """This rank has failed; rank 0 is told and judges."""
        self._failure = self._failure or failure
        self._wire.send({"failure": asdict(failure)})
        if not self._wire.open and not self._is_through:
            self._on_end("srunddp itself was killed", now)

    def done(self) -> None:
        """The script is over, without an error. The worker need not wait: the store is rank 0's."""
        # Before the worker's end: MPI_Finalize, which comes next, needs all ranks at once.
        self._wire.send({"goodbye": True})
        self.released = True

    def left(self) -> None:
        """The worker has ended with 0."""
        self._wire.send({"left": True})
        self._left = True

    def ended(self) -> None:
        """The worker has ended after the verdict."""
        self._wire.send({"ended": True})

    def tick(self, now: float) -> float:
        """Do what is due; returns the seconds until something is."""
        self._heard = self._heard or now  # nothing is expected before the first ping
        if now - self._heard > self._post.silent_after and not self._is_through and not self.released:
            self._on_end(self._post.starved, now, silent=True)
        if not self._wire.open and not self._is_through:
            self._on_end("srunddp itself was killed", now)
        if now >= self._pinged + self._post.ping_every:
            self._pinged = now
            self._wire.send({"ping": self._post.step()})
        return _SOON if self._left else self._pinged + self._post.ping_every - now

    def _on_end(self, cause: str, now: float, *, silent: bool = False) -> None:
        if self._post.asked(now) and not self._failure:
            return  # the launcher ends one node after the other, and the worker may have something to save
        lost, self._wire.open = self._wire.lost or silent, False
        if self._failure and not (lost and self._failure.weight is FailureKind.ECHO):
            self.verdict = RootCause.of(self._failure)
        elif lost:
            ours = self._wire.lost and not self._connected
            rank, node = (self._post.rank, self._post.node) if ours else (0, self._post.nodes[0])
            cause = f"no answer for {self._post.lost_after:g} s" if self._wire.lost else cause
            self.verdict = RootCause((rank,), node, cause, LOST, how="lost")
        else:
            self.verdict = RootCause((0,), self._post.nodes[0], cause, 137)
        if self._is_to_speak(lost):
            report_as_deputy(self.verdict, self._post.folder)

    def _is_to_speak(self, lost: bool) -> bool:
        """Where rank 0 is gone: the lowest rank left, that is one on another node when rank 0's node is gone."""
        if not lost:
            return bool(self._deputy.get("here"))
        return bool(self._deputy.get("elsewhere")) and self._connected

    @cached_property
    def _connected(self) -> bool:
        """Whether the network is there from here: then rank 0's node is the one that is gone, and not ours."""
        witness = self._deputy.get("witness")
        if not self._post.link_is_up():
            return False
        if not witness:
            return True
        try:
            socket.create_connection((witness[0], witness[1]), _WITNESS_WITHIN).close()
        except ConnectionError:
            return True  # it refuses, so it is there
        except OSError as error:
            return error.errno == errno.EHOSTUNREACH  # as a firewall there may say; to nobody, the connection times out
        except (TypeError, ValueError, LookupError, OverflowError):
            return False
        return True


def _told(verdict: Mapping[str, Any]) -> RootCause | None:
    """Rank 0's; None where it is garbage, and then the end of the line is what counts."""
    try:
        ranks, code = tuple(map(int, verdict["ranks"])), verdict["exit_code"]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return RootCause(ranks, "", "", code) if type(code) is int and 0 < code < 256 else None
