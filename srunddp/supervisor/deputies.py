"""Who acts for rank 0 when it is gone."""

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits


@dataclass(frozen=True)
class Deputies:
    """The ranks that may act for rank 0, the first one first.

    Each listens on a node of its own, and answers nobody: that its kernel accepts a connection is
    enough.

    Attributes:
        listening: rank, address and port of each.
        rank: of this process; master: rank 0's address.
        limits: how long each may take to answer.
    """

    listening: Sequence[tuple[int, str, int]] = ()
    rank: int = 0
    master: str = ""
    limits: Limits = DEFAULT_LIMITS

    @property
    def here(self) -> bool:
        """Whether this process is one of them."""
        return any(rank == self.rank for rank, _, _ in self.listening)

    def first(self, *, lost: bool) -> int | None:
        """The first that can be reached, this one included; where rank 0's node is ``lost``, of the
        others.
        """
        for rank, host, port in self.listening:
            if not (lost and host == self.master) and (
                rank == self.rank or self._answers(host, port)
            ):
                return rank
        return None

    def network_is_up(self) -> bool:
        """Whether a node that is neither this one's nor rank 0's can be reached; True where there
        is none.
        """
        own = {host for rank, host, _ in self.listening if rank == self.rank} | {self.master}
        others = [(host, port) for _, host, port in self.listening if host not in own]
        return not others or any(self._answers(*other) is not None for other in others)

    def _answers(self, host: str, port: int) -> bool | None:
        """Whether its kernel accepts; None where nothing answers."""
        # Not create_connection, which imports more: nothing is imported at the moment of a failure.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as connection:
            connection.settimeout(self.limits.deputy_answers_within)
            try:
                connection.connect((host, port))
            except ConnectionError:
                return False
            except OSError as error:
                # As a firewall there may say.
                return False if error.errno == errno.EHOSTUNREACH else None
        return True
