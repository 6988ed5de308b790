"""The ranks that act for rank 0 when rank 0 is gone."""

import errno
import socket
from collections.abc import Sequence

from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.util.quick_dataclass import dataclass


@dataclass(frozen=True)
class Deputies:
    """The ranks that may act for rank 0.

    Each deputy runs on a different node and has a listening socket from which it never reads. The
    socket serves other ranks to find out whether the deputy is there: if its kernel accepts a
    connection, it is.

    Attributes:
        listening: Rank, address and port of each deputy, in the order in which they act.
        rank: The rank of this process.
        master: Rank 0's address.
        limits: How long a deputy's kernel may take to accept.
        own: The listening socket of this process, if it is a deputy.
    """

    listening: Sequence[tuple[int, str, int]] = ()
    rank: int = 0
    master: str = ""
    limits: Limits = DEFAULT_LIMITS
    own: socket.socket | None = None

    def stop_listening(self) -> None:
        """Stop being a deputy: close the socket, so that this node's kernel refuses connections to
        it. No effect if this process is no deputy.
        """
        if self.own:
            self.own.close()

    @property
    def here(self) -> bool:
        """Whether this process is a deputy, and still listens."""
        return self._is_listed and not self._has_stopped

    @property
    def _is_listed(self) -> bool:
        return any(rank == self.rank for rank, _, _ in self.listening)

    @property
    def _has_stopped(self) -> bool:
        return self.own is not None and self.own.fileno() < 0

    def first(self, *, lost: bool) -> int | None:
        """Return the rank of the first deputy that can be reached, which may be this rank; None if
        no deputy can be reached.

        Args:
            lost: Whether rank 0's node is lost, so that a deputy on that node does not count.
        """
        for rank, host, port in self.listening:
            if lost and host == self.master:
                continue
            is_there = self.here if rank == self.rank else self._answers(host, port)
            if is_there:
                return rank
        return None

    def network_is_up(self) -> bool:
        """Return whether this node's network works: at least one node of a deputy, other than this
        node and rank 0's, accepts or rejects a connection. True if no deputy is on such a node.
        """
        own = {host for rank, host, _ in self.listening if rank == self.rank} | {self.master}
        others = [(host, port) for _, host, port in self.listening if host not in own]
        return not others or any(self._answers(*other) is not None for other in others)

    def _answers(self, host: str, port: int) -> bool | None:
        """Return True if a deputy's kernel accepts a connection, False if the node rejects it, and
        None if nothing answers.
        """
        # socket.create_connection() may import a module, and nothing may be imported at the moment
        # of a failure.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as connection:
            connection.settimeout(self.limits.deputy_answers_within)
            try:
                connection.connect((host, port))
            except ConnectionError:
                return False
            except OSError as error:
                # A firewall on that node may answer EHOSTUNREACH.
                return False if error.errno == errno.EHOSTUNREACH else None
        return True
