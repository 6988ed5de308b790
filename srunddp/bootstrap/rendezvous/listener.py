"""Accepts connections on rank 0, makes each peer prove that it belongs to this run, and passes on
the messages of proven peers.

Whatever peers without a proof send, and however many they are, they cannot disturb the rendezvous:
they cause at most a few lines in the log.
"""

import errno
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from srunddp.bootstrap.rendezvous import auth
from srunddp.bootstrap.rendezvous.auth import Authenticator, Challenge
from srunddp.bootstrap.rendezvous.messages import (
    CannotCome,
    Hello,
    Here,
    Refused,
    RendezvousMessage,
    Seen,
    Stranger,
)
from srunddp.bootstrap.rendezvous.protocol import Address, CancelToken
from srunddp.errors import RendezvousError, Scope
from srunddp.util.json_lines import LineBuffer
from srunddp.util.messages import send

UNPROVEN = 1024  # connections without a proof that are kept, in addition to one for each rank
PATIENCE = 30.0  # seconds after which a connection without a proof is closed
# The most that a peer may send: bytes of a line, and letters of one text in a hello.
_LONGEST = 4096
_LONGEST_WORD = 256
# The most lines in the log about refused peers: a stranger that comes repeatedly must not fill it.
_MOST_NOTES = 10
# The most connections that are accepted in a row, and how many ready sockets are read until new
# connections are accepted again.
_AT_ONCE = 4096
_BETWEEN = 64

# The peer's hello, its connection, and a message that it sent; None when the connection has ended.
PeerEvent = tuple[Hello, socket.socket, RendezvousMessage | None]


@dataclass(eq=False)
class PendingPeer:
    """One connection that was accepted.

    Attributes:
        connection: the connection itself.
        address: the peer's address.
        since: the time of :func:`time.monotonic` at which it was accepted.
        received: the bytes that the peer has sent, as lines.
        hello: the peer's hello; None before rank 0 has read it.
        challenge: what the peer has to prove; None before rank 0 has answered the hello.
    """

    connection: socket.socket
    address: Address
    since: float
    received: LineBuffer = field(default_factory=LineBuffer)
    hello: Hello | None = None
    challenge: Challenge | None = None

    def __str__(self) -> str:
        if self.hello:
            return f"{self.hello} ({self.address})"
        return str(self.address)


@dataclass(kw_only=True)
class AuthenticatedListener:
    """Rank 0's listening sockets, and the peers that have connected. It is a context manager: when
    the ``with`` block ends, it closes the connections of peers without a proof, and leaves the
    listening sockets and the connections in :attr:`known` open.

    Attributes:
        listening: the listening sockets.
        own: rank 0's hello.
        trust: rank 0's kind of proof.
        say: takes a line for the log.
        interrupt: ends a wait when rank 0 itself fails.
        known: the peers that have proven themselves, by their connections.
    """

    listening: Sequence[socket.socket]
    own: Hello
    trust: Authenticator
    say: Callable[[str], None]
    interrupt: CancelToken | None = None
    known: dict[socket.socket, PendingPeer] = field(default_factory=dict)
    _waiting: dict[socket.socket, PendingPeer] = field(default_factory=dict)  # the oldest first
    _waiting_from: Counter[str] = field(default_factory=Counter)  # how many in _waiting, by address
    _drops: bool = False  # whether a connection was closed because there were too many
    _said_by_peers: deque[PeerEvent] = field(default_factory=deque)  # not yet yielded by events()
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _notes: int = 0

    def __enter__(self) -> Self:
        for listener in self.listening:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        if self.interrupt:
            self._selector.register(self.interrupt, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for stranger in self._waiting:
            stranger.close()
        # Close the sockets of proven peers whose connection has ended, if events() has not yet
        # yielded this and closed them. The sockets in `known` belong to the caller.
        for event in self._said_by_peers:
            if event[2] is None:
                event[1].close()

    def events(self, seconds: float) -> Iterator[PeerEvent]:
        """Yield the messages of proven peers that have come; if there are none, wait for some.

        If the caller stops before the last message, for example because of an error, the next call
        yields the remaining messages without waiting.

        Args:
            seconds: how long to wait at most if no message remains from an earlier call.

        Yields:
            Each peer's messages in their order; the first is :class:`Here` or
            :class:`CannotCome`, the last is None when the connection has ended.

        Raises:
            RendezvousError: the process has no free file descriptor, and there is no connection of
                an unproven peer that it could close to get one.
        """
        if not self._said_by_peers:
            self._wait_once(seconds)
        while self._said_by_peers:
            hello, connection, message = self._said_by_peers.popleft()
            if message is None:
                # Close the connection only now: the code that handles the peer's last message may
                # still use it.
                connection.close()
            yield hello, connection, message

    @property
    def has_unproven(self) -> bool:
        """Whether any connected peer has not yet proven that it belongs to this run."""
        return bool(self._waiting)

    @property
    def is_proving(self) -> bool:
        """Whether any connected peer has got rank 0's answer to its hello, but has not yet sent its
        proof.
        """
        return any(peer.challenge is not None for peer in self._waiting.values())

    def _wait_once(self, seconds: float) -> None:
        """Wait once, accept new connections, and read what the peers have sent."""
        before = time.monotonic() - PATIENCE
        # A dict keeps the order of insertion, so its first connection is the oldest.
        while self._waiting and (oldest := next(iter(self._waiting.values()))).since < before:
            self._close(oldest)
        selected = self._selector.select(max(0.0, seconds))
        ready = {key.fileobj for key, _ in selected}
        for number, (key, _) in enumerate(selected):
            # Accept often: the kernel queues 4,096 connections and drops more, which then try again
            # a second later.
            if number % _BETWEEN == 0:
                for listener in self.listening:
                    self._accept(listener, listener in ready)
                    ready.discard(listener)
            if isinstance(key.fileobj, socket.socket):
                if peer := self.known.get(key.fileobj) or self._waiting.get(key.fileobj):
                    self._read(peer)
            else:
                # The interrupt has ended this wait. It stays readable, so stop watching it.
                self._selector.unregister(key.fileobj)

    def _accept(self, listener: socket.socket, ready: bool) -> None:
        """Accept the connections that have come.

        Args:
            listener: the listening socket.
            ready: whether the selector has found at least one connection on it.
        """
        for number in range(_AT_ONCE):
            try:
                connection, address = listener.accept()
            except OSError as error:
                # Without a free descriptor accept() fails even if no connection has come, so only
                # ``ready`` shows that one waits.
                if error.errno in (errno.EMFILE, errno.ENFILE) and ready and number == 0:
                    self._make_room()
                return  # no more connections wait, or the peer has closed this one
            connection.setblocking(False)
            peer = PendingPeer(connection, Address(*address[:2]), time.monotonic())
            self._waiting[connection] = peer
            self._waiting_from[peer.address.host] += 1
            self._selector.register(connection, selectors.EVENT_READ)
            if len(self._waiting) > UNPROVEN + self.own.world_size:
                self._drop_one()
                return  # read what the others have sent, before accepting more

    def _drop_one(self) -> None:
        """Close a connection without a proof: the oldest from the address that has the most.

        A rank proves itself within milliseconds, so its connection is hardly ever the oldest. Ranks
        on other nodes do not compete with a stranger's connections, because they have other
        addresses.
        """
        (host, number), *_ = self._waiting_from.most_common(1)
        dropped = next(peer for peer in self._waiting.values() if peer.address.host == host)
        self._close(dropped)
        if not self._drops:
            self._drops = True
            self.say(f"{number} connections from {host} prove nothing: the oldest are closed")

    def _make_room(self) -> None:
        if self._waiting:
            self._drop_one()
            return
        raise RendezvousError(
            f"rank 0 cannot open more than {len(self.known)} connections",
            expected=f"one for each of {self.own.world_size} ranks",
            hint="raise the limit of open files (ulimit -n)",
            scope=Scope.JOB,
        )

    def _close(self, peer: PendingPeer) -> None:
        self._forget(peer)
        peer.connection.close()

    def _forget(self, peer: PendingPeer) -> None:
        self._selector.unregister(peer.connection)
        self._wait_is_over(peer)
        self.known.pop(peer.connection, None)

    def _wait_is_over(self, peer: PendingPeer) -> None:
        """Remove a peer from those without a proof, because it has proven itself, or its connection
        is no longer watched. Nothing changes for a proven peer.
        """
        if self._waiting.pop(peer.connection, None):
            self._waiting_from[peer.address.host] -= 1

    def _read(self, peer: PendingPeer) -> None:
        """Read what a peer has sent, and notice if it has closed the connection."""
        try:
            piece = peer.connection.recv(_LONGEST)
        except BlockingIOError:
            # The kernel may report a socket as readable that is not, see select(2).
            return
        except OSError:
            piece = b""
        for line in peer.received.feed(piece):
            self._take(peer, RendezvousMessage.decode(line))
            if peer.connection not in self.known and peer.connection not in self._waiting:
                return  # _take() has refused the peer
        if piece and len(peer.received) < _LONGEST:
            return
        # The connection has ended. Queue the None that says so behind the peer's last messages, so
        # that the caller handles these first.
        if peer.hello and peer.connection in self.known:
            self._forget(peer)
            self._said_by_peers.append((peer.hello, peer.connection, None))
            return
        self._close(peer)
        if piece:
            self._note(peer, "it sent no message of srunddp's")

    def _take(self, peer: PendingPeer, message: RendezvousMessage | None) -> None:
        """Handle one message of a peer, and queue it for :meth:`events` if the peer has proven
        itself.
        """
        if peer.connection not in self.known:
            self._authenticate(peer, message)
        if message and peer.hello and peer.connection in self.known:
            self._said_by_peers.append((peer.hello, peer.connection, message))

    def _authenticate(self, peer: PendingPeer, message: RendezvousMessage | None) -> None:
        """Answer a peer's hello, or check its proof and add it to the known peers."""
        if peer.challenge is None:
            self._greet(peer, message)
            return
        if not isinstance(message, Here | CannotCome):
            self._refuse(peer, "it did not answer with a proof")
            return
        objection = self.trust.why_invalid(message.proof, peer.challenge.text(auth.CLIENT))
        if objection:
            self._refuse(peer, objection)
            return
        self._wait_is_over(peer)
        self.known[peer.connection] = peer

    def _greet(self, peer: PendingPeer, message: RendezvousMessage | None) -> None:
        if not isinstance(message, Hello) or not _is_plausible(message):
            self._dismiss(peer)
            self._note(peer, "it sent no message of srunddp's")
            return
        hello = message
        # Print no line: a rank of another step has tried this port while it looks for the rank 0 of
        # that step, and goes on to the next port.
        if hello.token != self.own.token:
            self._dismiss(peer)
            return
        peer.hello = hello
        if hello.proof_kind != self.trust.kind:
            self._refuse(peer, auth.mismatch(hello.proof_kind, self.trust.kind), auth.HINT)
            return
        with suppress(OSError):
            # If the rank has waited too long for this answer, it has closed the connection, and
            # connects again. Then do not spend time on a proof for this connection.
            if not peer.connection.recv(1, socket.MSG_PEEK):
                self._close(peer)
                return
        own = Address(*peer.connection.getsockname()[:2])
        challenge = Challenge(hello.token, hello.rank, str(own), hello.nonce, auth.nonce())
        try:
            proof = self.trust.sign(challenge.text(auth.SERVER))
        except auth.ProofError as reason:
            self._refuse(peer, f"rank 0 cannot prove itself: {reason}")
            return
        peer.challenge = challenge
        # send() does not block: it is the first line on this connection, and fits into the empty
        # buffer.
        send(peer.connection, Seen(nonce=challenge.server_nonce, proof=proof))

    def _dismiss(self, peer: PendingPeer) -> None:
        send(peer.connection, Stranger())
        self._close(peer)

    def _refuse(self, peer: PendingPeer, why: str, hint: str = "") -> None:
        """Tell a peer that it is not admitted, and print this in the log.

        Args:
            peer: the peer that is not admitted.
            why: the reason.
            hint: advice for the user. If it is empty, the line has the advice on munge, or none if
                this run has a secret.
        """
        send(peer.connection, Refused(why))
        self._close(peer)
        if not hint and self.trust.kind != "secret":
            hint = auth.HINT
        advice = f" -> {hint}" if hint else ""
        self._note(peer, f"{why}; expected {auth.EXPECTED}{advice}")

    def _note(self, peer: PendingPeer, why: str) -> None:
        self._notes += 1
        if self._notes > _MOST_NOTES:
            return
        more = "; further ones are not named" if self._notes == _MOST_NOTES else ""
        self.say(f"refused {peer}: {why}{more}")


def _is_plausible(hello: Hello) -> bool:
    """Whether a hello may come from a rank of srunddp, and its texts can be printed in the log."""
    # A text in the log must not move the terminal's cursor, or add a line.
    for value in vars(hello).values():
        if isinstance(value, str) and not (value.isprintable() and len(value) <= _LONGEST_WORD):
            return False
    return auth.is_nonce(hello.nonce) and hello.proof_kind in auth.KINDS
