"""The ranks meet: each says hello to rank 0, and all are told the store's address when the last has
come.

A hello carries a token of job and step, so that a stranger's socket, or another step's rank 0, is
recognised and ignored; and both ends prove that they belong to this world. The connection that
said it stays open. Rank 0's side is in ``server``.
"""

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from srunddp.bootstrap.network.interface import shares_subnet
from srunddp.bootstrap.rendezvous import auth, protocol
from srunddp.bootstrap.rendezvous.auth import Authenticator, Challenge
from srunddp.bootstrap.rendezvous.messages import (
    AbortReason,
    CannotCome,
    Hello,
    Here,
    Moved,
    NotMet,
    Refused,
    RendezvousInfo,
    RendezvousMessage,
    Seen,
    Told,
    error_from,
)
from srunddp.bootstrap.rendezvous.protocol import Address, CancelToken
from srunddp.errors import PeerError, ReassignedError, RendezvousError, Scope, SrunddpError
from srunddp.util.messages import receive, send
from srunddp.util.tcp import limit_silence

# Seconds for which a rank waits for an answer: at first, and at most after doubling.
ANSWER_WITHIN = 1.0
_LONGEST_PATIENCE = 8.0
# Ranks, by rank 0 at least, where all come at once; munged does 4,000 proofs.
ANSWERED_PER_SECOND = 2000
# Linux keeps so many connections until they are accepted, and drops others, which try again 1 s
# later, and then 2 s.
_AT_ONCE = 4096
_LATER_PER_SECOND = 16000
# Rank 0 keeps the deadline, and may have begun to wait later than this rank did.
_RANK_ZERO_LATER = 60.0
# Letters of a refusal in our error: whoever refuses has proven nothing.
_LONGEST_REASON = 400


def join(
    candidates: list[Address],
    hello: Hello,
    deadline: float,
    own: Authenticator | None = None,
    interrupt: CancelToken | None = None,
    lost_after: float | None = None,
) -> tuple[socket.socket, RendezvousInfo]:
    """Find rank 0 among the candidates, say hello, and wait for the answer.

    Strangers that refuse, stay mute, answer something else or prove nothing are ignored. Rank 0 may
    come later than this rank, so the candidates are tried again until the deadline.

    Args:
        candidates: addresses, the likeliest first; a single one where a channel told it.
        hello: what this rank says of itself.
        deadline: of :func:`time.monotonic`.
        own: this rank's kind of proof; None for none.
        interrupt: ends the search by this rank's own failure, of which rank 0 is told.
        lost_after: seconds without an answer of rank 0's node, after which rank 0 is lost; None for
            no limit.

    Raises:
        RendezvousError: rank 0 was not found in time, refused, or has addresses of another family
            only.
        PeerError: a rank failed during the rendezvous, this one perhaps.
        ReassignedError: this is a task of a spare node, and gets a rank.
    """
    own = own or Authenticator()
    cancel = interrupt or CancelToken()
    try:
        return RendezvousClient(_reachable(candidates, hello), hello, own, cancel, lost_after).run(
            deadline
        )
    finally:
        if not interrupt:
            cancel.close()


def report_failure(
    candidates: list[Address], hello: Hello, own: Authenticator, what: AbortReason, deadline: float
) -> bool:
    """Tell rank 0 that this rank has failed before it could meet the others.

    Args:
        candidates: addresses at which rank 0 may be, the likeliest first.
        hello: what this rank says of itself; its address may be empty, where the failure is about
            the interface.
        own: this rank's kind of proof.
        what: why it has failed.
        deadline: of :func:`time.monotonic`.

    Returns:
        Whether rank 0 knows of the failure.
    """
    # A token of its own, as this rank's may just have ended its search. Errors mean that rank 0
    # refuses us, or that we can reach none.
    with contextlib.closing(CancelToken()) as cancel, contextlib.suppress(SrunddpError):
        return RendezvousClient(_reachable(candidates, hello), hello, own, cancel).tell(
            what, deadline
        )
    return False


def _reachable(candidates: list[Address], hello: Hello) -> list[Address]:
    """Return the candidates of this rank's address family.

    Raises:
        RendezvousError: all are of another.
    """
    found = [
        one
        for one in candidates
        if not hello.address or one.family == Address(hello.address, 0).family
    ]
    if found or not candidates:
        return found
    raise RendezvousError(
        f"rank 0 has {', '.join(dict.fromkeys(each.host for each in candidates))}, {hello} has"
        f" {hello.address}",
        expected="IPv4 on all nodes or IPv6 on all",
        hint="correct ifaces.conf so that all interfaces have addresses of one family",
    )


def comes_later(rank: int) -> float:
    """Seconds for which a rank waits before it connects, so that not too many do so at once."""
    return max(0, rank - _AT_ONCE) / _LATER_PER_SECOND


class _Kind(Enum):
    """How an address has shown that it is not rank 0's, or not yet."""

    SILENT = auto()  # nobody listens there, or nobody answers
    STRANGER = auto()  # somebody else's process has answered
    REFUSED = auto()  # somebody there has our token, and refuses us


class _NotRankZeroError(Exception):
    """The address that is tried is passed over."""

    def __init__(self, kind: _Kind, why: str) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why


@dataclass(frozen=True)
class _Greeted:
    """A connection to rank 0, which has proven itself.

    Attributes:
        connection: to rank 0.
        address: where it is.
        proof: our own, which rank 0 has yet to see.
    """

    connection: socket.socket
    address: Address
    proof: str


@dataclass
class RendezvousClient:
    """A rank that looks for rank 0 among the candidates.

    Attributes:
        candidates: addresses, the likeliest first.
        hello: what this rank says of itself.
        own: this rank's kind of proof.
        interrupt: ends the search by this rank's own failure.
        lost_after: see :func:`join`.
        passed_over: for each kind of address that is not rank 0's the last one, and why.
    """

    candidates: list[Address]
    hello: Hello
    own: Authenticator
    interrupt: CancelToken
    lost_after: float | None = None
    passed_over: dict[_Kind, str] = field(default_factory=dict)

    def run(self, deadline: float) -> tuple[socket.socket, RendezvousInfo]:
        """Find rank 0, and wait until all ranks have met.

        Args:
            deadline: of :func:`time.monotonic`.

        Returns:
            The connection to rank 0, and what it tells at the end of the rendezvous.

        Raises:
            RendezvousError, PeerError, ReassignedError: as :func:`join`.
        """
        patience = ANSWER_WITHIN
        self.interrupt.wait(min(time.monotonic() + comes_later(self.hello.rank), deadline))
        while True:
            for address in self.candidates:
                self._stop_if_interrupted()
                if time.monotonic() >= deadline:
                    raise self._not_found()
                if greeted := self._try(address, patience, deadline):
                    return greeted.connection, self._await_others(greeted, deadline)
            # A rank 0 that answers late may be busy with proofs: each rank that has given up and
            # says hello again costs it one more.
            patience = min(2 * patience, _LONGEST_PATIENCE)
            # Where nobody listens yet the kernel refuses at once, and this pause is all that keeps
            # the search from spinning.
            self.interrupt.wait(min(time.monotonic() + 0.05 * patience, deadline))

    def tell(self, what: AbortReason, deadline: float) -> bool:
        """Say hello as often as it takes, and then that this rank has failed.

        Args:
            what: why it has failed.
            deadline: of :func:`time.monotonic`.

        Returns:
            Whether rank 0 knows of it.
        """
        while self.candidates and time.monotonic() < deadline:
            for address in self.candidates:
                if greeted := self._try(address, ANSWER_WITHIN, deadline):
                    with greeted.connection as connection:
                        if _is_known(_tell(connection, CannotCome.because(what, greeted.proof))):
                            return True
            self.interrupt.wait(min(time.monotonic() + 0.1, deadline))
        return False

    def _stop_if_interrupted(self) -> None:
        if failure := self.interrupt.failure:
            # The search has no connection to rank 0: it is told over a new one.
            by = time.monotonic() + protocol.TELL_FOR
            raise self._failed(
                failure, report_failure(self.candidates, self.hello, self.own, failure, by)
            )

    def _failed(self, failure: AbortReason, reported: bool) -> PeerError:
        """Return this rank's own failure, which rank 0 prints where it was reported to it."""
        return failure.error_of(
            self.hello.rank, self.hello.node, Scope.JOB if reported else Scope.RANK
        )

    def _try(self, address: Address, patience: float, deadline: float) -> _Greeted | None:
        """Greet whoever listens there; None where that is not rank 0, and a note why."""
        connection = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            proof = self._greet(connection, address, patience, deadline)
        except OSError as error:
            # When a socket's time limit is over Python raises a TimeoutError without an errno.
            why = os.strerror(error.errno) if error.errno else "did not answer"
            self.passed_over[_Kind.SILENT] = f"{address} {why}"
        except _NotRankZeroError as error:
            self.passed_over[error.kind] = f"{address} {error.why}"
        except BaseException:
            # This rank's own failure, or an interrupt of the user: nobody gets the connection.
            connection.close()
            raise
        else:
            return _Greeted(connection, address, proof)
        connection.close()
        return None

    def _greet(
        self, connection: socket.socket, address: Address, patience: float, deadline: float
    ) -> str:
        """Connect, say hello, and have rank 0 prove itself.

        Args:
            connection: not yet connected.
            address: of the one that may be rank 0.
            patience: seconds to wait for its answer.
            deadline: of :func:`time.monotonic`.

        Returns:
            Our proof for rank 0.

        Raises:
            OSError: nobody answers.
            _NotRankZeroError: somebody else has answered, or refuses us.
        """
        # New for each connection, so that rank 0's proof cannot be one that was made for another.
        nonce = auth.nonce()
        # A timeout of 0 would mean a socket that does not block.
        connection.settimeout(max(0.01, min(patience, deadline - time.monotonic())))
        # Between two subnets routes decide: a strict reverse-path filter drops what comes by
        # another interface.
        if self.hello.address and shares_subnet(self.hello.address, address.host):
            connection.bind((self.hello.address, 0))
        connection.connect((address.host, address.port))
        send(connection, replace(self.hello, nonce=nonce, proof_kind=self.own.kind))
        # Whoever has accepted may be rank 0 with a crowd before it: it gets the time that all ranks
        # take together. A closed port or a lost packet, above, gets none of that.
        answer_by = min(
            time.monotonic() + patience + self.hello.world_size / ANSWERED_PER_SECOND, deadline
        )
        self.interrupt.wait(answer_by, connection)
        self._stop_if_interrupted()
        return self._prove(connection, nonce, receive(connection, RendezvousMessage, answer_by))

    def _prove(
        self, connection: socket.socket, nonce: str, greeting: RendezvousMessage | None
    ) -> str:
        """Check rank 0's proof, and return ours."""
        if isinstance(greeting, Refused):
            why = f"refused it: {greeting.why[:_LONGEST_REASON]}"
            if self.own.kind == "none":
                # It can verify no answer, and believes this one as it would all others.
                raise self._refusal(f"rank 0 {why}")
            raise _NotRankZeroError(_Kind.REFUSED, why)  # somebody else may hold the port
        if not isinstance(greeting, Seen) or not auth.is_nonce(greeting.nonce):
            raise _NotRankZeroError(_Kind.STRANGER, "belongs to somebody else")
        challenge = Challenge(
            self.hello.token,
            self.hello.rank,
            # As this end sees it: a relay in between has another address than rank 0, which signs
            # its own.
            str(Address(*connection.getpeername()[:2])),
            nonce,
            greeting.nonce,
        )
        objection = self.own.why_invalid(greeting.proof, challenge.text(auth.SERVER))
        if objection:
            raise _NotRankZeroError(_Kind.REFUSED, f"did not prove that it is rank 0: {objection}")
        try:
            return self.own.sign(challenge.text(auth.CLIENT))
        except auth.ProofError as reason:
            raise _NotRankZeroError(_Kind.REFUSED, f"cannot be given a proof: {reason}") from None

    def _refusal(self, why: str) -> RendezvousError:
        return RendezvousError(f"{self.hello}: {why}", expected=auth.EXPECTED, hint=auth.HINT)

    def _not_found(self) -> RendezvousError:
        """Return the error at the deadline. Of all that was passed over, who has our token tells
        most, and a stranger more than an address where nobody listens.
        """
        if refused := self.passed_over.get(_Kind.REFUSED):
            return self._refusal(refused)
        why = self.passed_over.get(_Kind.STRANGER)
        why = why or self.passed_over.get(_Kind.SILENT, "nothing tried")
        first, *more = self.candidates
        where = f"{first} and {len(more)} more" if more else str(first)
        who = f"{self.hello} ({self.hello.address})" if self.hello.address else str(self.hello)
        return RendezvousError(
            f"{who} did not reach rank 0 at {where}: {why}",
            expected="rank 0 to answer there",
            hint=(
                "see whether rank 0 started, and whether both nodes' interfaces are on one network"
            ),
        )

    def _await_others(self, greeted: _Greeted, deadline: float) -> RendezvousInfo:
        """Be there, and wait until the last rank has come."""
        connection = greeted.connection
        send(connection, Here(greeted.proof))
        # From here on rank 0 may be silent for long, as it waits for others: only its kernel's
        # answers tell that its node is still there.
        if self.lost_after is not None:
            limit_silence(connection, self.lost_after)
        try:
            return self._receive_info(
                connection, max(deadline, time.monotonic()) + _RANK_ZERO_LATER
            )
        except OSError:
            raise RendezvousError(
                f"{self.hello} lost rank 0 at {greeted.address} during the rendezvous",
                expected="rank 0 to stay",
                hint="see rank 0's own message",
            ) from None

    def _receive_info(self, connection: socket.socket, deadline: float) -> RendezvousInfo:
        while True:
            self.interrupt.wait(deadline, connection)
            if failure := self.interrupt.failure:
                answer = _tell(connection, failure)
                if isinstance(answer, RendezvousInfo):
                    # Rank 0 sent this before it could read of the failure, and passes over what it
                    # reads of it now: the ranks have met, and the failure monitor has to tell it.
                    connection.settimeout(None)
                    return answer
                raise self._failed(failure, _is_known(answer))
            # A line that is no message is None, and passed over. Without one until the deadline
            # receive() raises an OSError.
            match receive(connection, RendezvousMessage, deadline):
                case AbortReason() | NotMet() as why:
                    raise error_from(why)
                case Refused(why=text):
                    raise self._refusal(f"rank 0 refused it: {text[:_LONGEST_REASON]}")
                case Moved(rank=rank):
                    connection.close()
                    raise ReassignedError(rank)
                case RendezvousInfo() as info:
                    # receive() has set a limit; whoever takes the connection over has limits of its
                    # own.
                    connection.settimeout(None)
                    return info


def _tell(connection: socket.socket, failure: AbortReason | CannotCome) -> RendezvousMessage | None:
    """Send that this rank has failed, and return rank 0's next message; None if there is none."""
    send(connection, failure)
    try:
        return receive(connection, RendezvousMessage, time.monotonic() + ANSWER_WITHIN)
    except OSError:
        return None


def _is_known(answer: RendezvousMessage | None) -> bool:
    """Whether rank 0 knows of a failure by its answer: it has read of it, or is failing itself.

    If rank 0 is telling a failure itself, it prints that one, and this rank does not add its own.
    """
    return isinstance(answer, Told | AbortReason | NotMet)
