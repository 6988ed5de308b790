"""The failure monitor of every rank but rank 0: it tells rank 0's supervisor what happens here, and obeys it."""

import errno
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.failure import Failure, FailureKind
from srunddp.supervisor.failure_monitor import FailureMonitor, RankContext
from srunddp.supervisor.root_cause import LOST, RootCause, report_as_deputy

_KILLED = "srunddp itself was killed"
_WITNESS_WITHIN = 2.0
_SOON = 0.1


class Participant(FailureMonitor):
    """The failure monitor of a rank above 0."""

    def __init__(self, context: RankContext, connection: SupervisorConnection) -> None:
        super().__init__(context.folder)
        self._context = context
        self._connection = connection
        self._failure: Failure | None = None
        self._deputy: Mapping[str, Any] = {}
        self._waits = False
        self._heard = self._pinged = 0.0

    @property
    def released(self) -> bool:
        return self._done and not self._waits

    @property
    def finished(self) -> bool:
        # After a failure when rank 0 closes: a launcher kills all at the first bad end.
        return (self._left and self._connection.sent) or (self.root_cause is not None and not self._connection.open)

    def connections(self) -> Iterable[SupervisorConnection]:
        return (self._connection,)

    def on_readable(self, connection: SupervisorConnection, now: float) -> None:
        self._heard = now
        for message in connection.read():
            self._on_message(message)
        self._notice_end(now)

    def _on_message(self, message: Mapping[str, Any]) -> None:
        if isinstance(message.get("verdict"), dict):
            self.root_cause = self.root_cause or _root_cause_of(message["verdict"])
            self.restart = message["verdict"].get("restart")
        elif "stacks" in message:
            self._connection.send({"stacks": self._context.stacks()})
        elif isinstance(message.get("deputy"), dict):
            self._deputy = message["deputy"]
        elif "over" in message:
            self._waits = False

    def fail(self, failure: Failure, now: float) -> None:
        self._failure = self._failure or failure
        self._connection.send({"failure": asdict(failure)})
        self._notice_end(now)

    def done(self, *, waits: bool = False) -> None:
        # The store is rank 0's. But where a rank fails while another is in MPI_Finalize, Open MPI's mpirun may hang.
        super().done()
        self._waits = waits
        self._connection.send({"goodbye": True, "waits": waits})

    def left(self) -> None:
        super().left()
        self._connection.send({"left": True})

    def asked(self, by: str) -> None:
        self._connection.send({"asked": by})

    def uses_mpi(self) -> None:
        self._connection.send({"mpi": True})

    def ended(self) -> None:
        self._connection.send({"ended": True})

    def tick(self, now: float) -> float:
        self._heard = self._heard or now  # nothing is expected before the first ping
        if now - self._heard > self._context.silent_after and self._needs_rank_zero and not self._done:
            self._on_end(self._context.starved, now, silent=True)
        self._notice_end(now)
        if now >= self._pinged + self._context.ping_every:
            self._pinged = now
            self._connection.send({"ping": self._context.step()})
        return _SOON if self._left else self._pinged + self._context.ping_every - now

    @property
    def _needs_rank_zero(self) -> bool:
        return not self._left and self.root_cause is None

    def _notice_end(self, now: float) -> None:
        if not self._connection.open and self._needs_rank_zero:
            self._on_end(_KILLED, now)

    def _on_end(self, cause: str, now: float, *, silent: bool = False) -> None:
        if self._context.asked(now) and not self._failure:
            return  # the launcher ends one node after the other, and the worker may have something to save
        lost, self._connection.open = self._connection.lost or silent, False
        self.root_cause = self._own_root_cause(cause, lost=lost)
        # Where rank 0 is gone: the lowest rank left, that is one on another node when rank 0's node is gone.
        if (self._deputy.get("elsewhere") and self._network_is_up) if lost else self._deputy.get("here"):
            report_as_deputy(self.root_cause, self._folder)

    def _own_root_cause(self, cause: str, *, lost: bool) -> RootCause:
        """Without rank 0: this rank's own failure, else a lost node, rank 0's or ours, else rank 0's supervisor."""
        context = self._context
        if self._failure and not (lost and self._failure.weight is FailureKind.SECONDARY):
            return RootCause.of(self._failure)
        if not lost:
            return RootCause((0,), context.nodes[0], cause, 137)
        ours = self._connection.lost and not self._network_is_up
        rank, node = (context.rank, context.node) if ours else (0, context.nodes[0])
        if self._connection.lost:
            cause = f"no answer for {context.lost_after:g} s"
        return RootCause((rank,), node, cause, LOST, how="lost")

    @cached_property
    def _network_is_up(self) -> bool:
        """Whether others can be reached from here: then rank 0's node is the one that is gone, and not ours."""
        witness = self._deputy.get("witness")
        if not self._context.link_is_up():
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


def _root_cause_of(message: Mapping[str, Any]) -> RootCause | None:
    """What rank 0 has decided; None where it is garbage, and then the end of the connection is what counts."""
    try:
        ranks, code = tuple(map(int, message["ranks"])), message["exit_code"]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return RootCause(ranks, "", "", code) if type(code) is int and 0 < code < 256 else None
