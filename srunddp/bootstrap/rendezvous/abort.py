"""The failure of one rank during the rendezvous: how its own process learns of it, and how it is put into words."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srunddp.errors import PeerError, RendezvousError, Scope, SrunddpError

_LONGEST = 2000
TELL_FOR = 5.0  # seconds for which a rank tells rank 0 that it has failed, and rank 0 those that come later


@dataclass(frozen=True)
class AbortReason:
    """Why a rank failed, as its own message says it, and its exit code."""

    text: str
    code: int

    def message(self) -> dict[str, Any]:
        """What goes over the connection."""
        return {"failed": self.text[:_LONGEST], "code": self.code}

    def of(self, rank: int, node: str, scope: Scope = Scope.JOB) -> PeerError:
        """The error that all ranks raise."""
        return PeerError(f"rank {rank} on {node} failed: {self.text}", code=self.code, scope=scope)


def read(message: Mapping[str, Any]) -> AbortReason | None:
    """The failure that a rank's message tells of; None where it tells of none."""
    if "failed" not in message:
        return None
    code = message.get("code")
    return AbortReason(str(message["failed"])[:_LONGEST], code if type(code) is int and 0 < code < 256 else 1)


def error_from_message(message: Mapping[str, Any]) -> SrunddpError:
    """The error that rank 0's message ``failed`` stands for: a rank's own failure, or that they did not meet."""
    if failure := read(message) if "code" in message else None:
        return PeerError(failure.text, code=failure.code)
    return RendezvousError(str(message["failed"])[:_LONGEST], scope=Scope.JOB)


def message_of(error: SrunddpError) -> dict[str, Any]:
    """What rank 0 tells the others when it raises this error."""
    return (
        AbortReason(str(error), error.exit_code).message() if isinstance(error, PeerError) else {"failed": str(error)}
    )


class CancelToken:
    """Ends this rank's meeting from another thread, such as the one that sees its worker die.

    On rank 0 all present ranks are told; another rank tells rank 0. Then the rendezvous raises PeerError.

    Attributes:
        failure: what :meth:`fail` was told.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = socket.socketpair()
        self.failure: AbortReason | None = None

    def fail(self, text: str, code: int) -> None:
        """End the rendezvous, now or as soon as it begins, by this rank's failure; only the first call counts."""
        if not self.failure:
            self.failure = AbortReason(text, code)
            with contextlib.suppress(OSError):  # the meeting is over
                self._write_end.send(b"!")

    def fileno(self) -> int:
        """A descriptor that becomes readable, and stays so, when it has failed."""
        return self._read_end.fileno()

    def wait(self, deadline: float, connection: socket.socket | None = None) -> bool:
        """Wait, until a time of :func:`time.monotonic`, for something to read from the connection.

        Returns:
            Whether there is; False when this rank has failed or the time is over.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            if connection:
                selector.register(connection, selectors.EVENT_READ)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
        return any(key.fileobj is connection for key, _ in ready) and not self.failure

    def close(self) -> None:
        """Give the descriptors back."""
        self._read_end.close()
        self._write_end.close()
