"""Rank 0's listening side: accepts peers, has each prove that it belongs to this world, and hands
on what it says.

Whoever has proven nothing has no effect but at most a line in the log: not by what it sends, not by
staying mute, and not by coming in large numbers.
"""

import errno
import selectors
import socket
import time
from collections import deque
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

UNPROVEN = 1024  # so many connections without a proof are kept, besides one for each rank
PATIENCE = 30.0  # seconds after which one of those is closed
# What anybody who connects may send: bytes of a line, and letters of one text in a hello.
_LONGEST = 4096
_LONGEST_WORD = 256
# Lines in the log: a stranger that comes again and again must not fill it.
_MOST_NOTES = 10
# Connections that are accepted in a row; messages that are read in between.
_AT_ONCE = 4096
_BETWEEN = 64

# Whose connection, the connection, and what came over it; None when it is gone.
PeerEvent = tuple[Hello, socket.socket, RendezvousMessage | None]


@dataclass(eq=False)
class PendingPeer:
    """One connection: where it comes from, since when, what it has sent so far, and who it says it
    is.
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
    """Rank 0's listening sockets, and everybody who has come in. A context manager that stops
    watching at its end.

    Attributes:
        listening: the sockets; own: rank 0's hello; trust: its kind of proof.
        say: takes a line for the log; interrupt: whose failure ends a wait.
        known: the connections that have proven themselves.
    """

    listening: Sequence[socket.socket]
    own: Hello
    trust: Authenticator
    say: Callable[[str], None]
    interrupt: CancelToken | None = None
    known: dict[socket.socket, PendingPeer] = field(default_factory=dict)
    _waiting: dict[socket.socket, PendingPeer] = field(default_factory=dict)  # the oldest first
    _said_by_peers: deque[PeerEvent] = field(default_factory=deque)  # and not yet handed on
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
        # Sockets of peers that have gone, which nobody has been told yet. Those in `known` are the
        # caller's.
        for event in self._said_by_peers:
            if event[2] is None:
                event[1].close()

    def events(self, seconds: float) -> Iterator[PeerEvent]:
        """Hand on what proven peers say: what has come already, else what comes next.

        Whoever stops in the middle, as by an error, finds the others' words at the next call.

        Args:
            seconds: to wait at most where nothing has come yet.

        Returns:
            Each peer's messages in their order; the first is :class:`Here` or
            :class:`CannotCome`.

        Raises:
            RendezvousError: there are no more descriptors, and none is a stranger's.
        """
        if not self._said_by_peers:
            self._wait_once(seconds)
        while self._said_by_peers:
            hello, connection, message = self._said_by_peers.popleft()
            if message is None:
                # Not before: whoever handles the peer's last words may still look at its socket.
                connection.close()
            yield hello, connection, message

    def _wait_once(self, seconds: float) -> None:
        """Take in who comes and what is said, waiting for it once."""
        before = time.monotonic() - PATIENCE
        # A dict keeps the order in which they came.
        while self._waiting and (oldest := next(iter(self._waiting.values()))).since < before:
            self._close(oldest)
        selected = self._selector.select(max(0.0, seconds))
        ready = {key.fileobj for key, _ in selected}
        for number, (key, _) in enumerate(selected):
            # The kernel keeps 4,096 that come, and drops others, which try again a second later.
            if number % _BETWEEN == 0:
                for listener in self.listening:
                    self._accept(listener, listener in ready)
                    ready.discard(listener)
            if isinstance(key.fileobj, socket.socket):
                if peer := self.known.get(key.fileobj) or self._waiting.get(key.fileobj):
                    self._read(peer)
            else:
                # The interrupt stays readable; it has ended this wait.
                self._selector.unregister(key.fileobj)

    def _accept(self, listener: socket.socket, ready: bool) -> None:
        """Take in those that have come; ``ready`` if the selector has found one at least."""
        for number in range(_AT_ONCE):
            try:
                connection, address = listener.accept()
            except OSError as error:
                # Without a free descriptor the kernel does not look whether there are more.
                if error.errno in (errno.EMFILE, errno.ENFILE) and ready and number == 0:
                    self._make_room()
                return  # there are no more, or it has gone again
            connection.setblocking(False)
            self._waiting[connection] = PendingPeer(
                connection, Address(*address[:2]), time.monotonic()
            )
            self._selector.register(connection, selectors.EVENT_READ)
            if len(self._waiting) > UNPROVEN + self.own.world_size:
                # An honest rank that waits for its turn has said hello at least.
                mute = next((one for one in self._waiting.values() if not one.hello), None)
                self._close(mute or next(iter(self._waiting.values())))
                return  # first what the others have sent

    def _make_room(self) -> None:
        if self._waiting:
            self._close(next(iter(self._waiting.values())))
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
        self._waiting.pop(peer.connection, None)
        self.known.pop(peer.connection, None)

    def _read(self, peer: PendingPeer) -> None:
        """Read what a peer has sent, and see whether it has gone."""
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
                return  # it has been refused
        if piece and len(peer.received) < _LONGEST:
            return
        # Its end is queued behind its last messages, so that they are handled first.
        if peer.hello and peer.connection in self.known:
            self._forget(peer)
            self._said_by_peers.append((peer.hello, peer.connection, None))
            return
        self._close(peer)
        if piece:
            self._note(peer, "it sent no message of srunddp's")

    def _take(self, peer: PendingPeer, message: RendezvousMessage | None) -> None:
        """Take one message of a peer, and hand it on where the peer has proven itself."""
        if peer.connection not in self.known:
            self._authenticate(peer, message)
        if message and peer.hello and peer.connection in self.known:
            self._said_by_peers.append((peer.hello, peer.connection, message))

    def _authenticate(self, peer: PendingPeer, message: RendezvousMessage | None) -> None:
        """Greet a peer at its hello, and let it in at its proof."""
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
        self.known[peer.connection] = self._waiting.pop(peer.connection)

    def _greet(self, peer: PendingPeer, message: RendezvousMessage | None) -> None:
        if not isinstance(message, Hello) or not _is_plausible(message):
            self._dismiss(peer)
            self._note(peer, "it sent no message of srunddp's")
            return
        hello = message
        # Not worth a line: a rank of another step on this node has come to the wrong port, and goes
        # on.
        if hello.token != self.own.token:
            self._dismiss(peer)
            return
        peer.hello = hello
        if hello.proof_kind != self.trust.kind:
            self._refuse(peer, f"its proof is {hello.proof_kind}, rank 0's {self.trust.kind}")
            return
        with suppress(OSError):
            # A rank that has waited too long for its turn has closed, and connects again.
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
        # It does not block: nothing has been sent here before, and the line fits into an empty
        # buffer.
        send(peer.connection, Seen(nonce=challenge.server_nonce, proof=proof))

    def _dismiss(self, peer: PendingPeer) -> None:
        send(peer.connection, Stranger())
        self._close(peer)

    def _refuse(self, peer: PendingPeer, why: str) -> None:
        send(peer.connection, Refused(why))
        self._close(peer)
        self._note(peer, f"{why}; expected {auth.EXPECTED} -> {auth.HINT}")

    def _note(self, peer: PendingPeer, why: str) -> None:
        self._notes += 1
        if self._notes > _MOST_NOTES:
            return
        more = "; further ones are not named" if self._notes == _MOST_NOTES else ""
        self.say(f"refused {peer}: {why}{more}")


def _is_plausible(hello: Hello) -> bool:
    """Whether it may be an honest rank's, and can be shown in the log."""
    # What is shown in the log must not move the cursor there, or add a line.
    for value in vars(hello).values():
        if isinstance(value, str) and not (value.isprintable() and len(value) <= _LONGEST_WORD):
            return False
    return auth.is_nonce(hello.nonce) and hello.proof_kind in auth.KINDS
