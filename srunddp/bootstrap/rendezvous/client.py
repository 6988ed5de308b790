"""The ranks meet: each says hello to rank 0, and all are told the store's address when the last has come.

A hello carries a token of job and step, so that a stranger's socket, or another step's rank 0, is
recognised and passed over; and both ends prove that they belong to this world. The connection that
said it stays open. Rank 0's side is in ``server``.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

from srunddp.bootstrap.network.interface import shares_subnet
from srunddp.bootstrap.rendezvous import abort, auth
from srunddp.bootstrap.rendezvous.abort import TELL_FOR, AbortReason, CancelToken
from srunddp.bootstrap.rendezvous.auth import Authenticator, Challenge, NullAuthenticator
from srunddp.bootstrap.rendezvous.protocol import Address, Hello, RendezvousInfo
from srunddp.errors import RendezvousError, Scope, SrunddpError
from srunddp.util.json_lines import receive, send

ANSWER_WITHIN = 1.0
_LONGEST_PATIENCE = 8.0
# Rank 0 keeps the deadline, and may have begun to wait later than this rank did.
_RANK_ZERO_LATER = 60.0
_LONGEST_REASON = 400


def join(
    candidates: list[Address],
    hello: Hello,
    deadline: float,
    own: Authenticator | None = None,
    interrupt: CancelToken | None = None,
) -> tuple[socket.socket, RendezvousInfo]:
    """The other ranks' side: find rank 0 among the candidates, say hello, wait for the answer.

    Strangers that refuse, stay mute, answer something else or prove nothing are passed over. Rank 0 may come
    later than this rank, so the candidates are tried again until the deadline.

    Args:
        candidates: addresses, the likeliest first; a single one where a channel told it.
        hello: what this rank says of itself.
        deadline: of :func:`time.monotonic`.
        own: this rank's kind of proof; None for none.
        interrupt: ends the search by this rank's own failure, of which rank 0 is told.

    Raises:
        RendezvousError: rank 0 was not found in time, refused, or has addresses of another family only.
        PeerError: a rank failed before all had met, this one perhaps.
    """
    reachable = [address for address in candidates if _reachable(address, hello)]
    if not reachable:
        raise _other_family(candidates, hello)
    search = RendezvousClient(reachable, hello, own or NullAuthenticator(), interrupt or CancelToken())
    try:
        return search.run(deadline)
    except _InterruptedError as reason:
        reported = search.tell(reason.failure, time.monotonic() + TELL_FOR)
        raise reason.failure.of(hello.rank, hello.node, Scope.JOB if reported else Scope.RANK) from None
    finally:
        if not interrupt:
            search.interrupt.close()


def report_failure(
    candidates: list[Address], hello: Hello, own: Authenticator, what: AbortReason, deadline: float
) -> bool:
    """Tell rank 0 that this rank has failed before it could meet the others.

    Args:
        hello: its address may be empty, where the failure is about the interface.

    Returns:
        Whether rank 0 knows of it.
    """
    interrupt = CancelToken()
    try:
        reachable = [address for address in candidates if _reachable(address, hello)]
        return RendezvousClient(reachable, hello, own, interrupt).tell(what, deadline)
    finally:
        interrupt.close()


def _reachable(address: Address, hello: Hello) -> bool:
    return not hello.address or address.family == Address(hello.address, 0).family


class _PassedOverError(Exception):
    """This address is not rank 0's, or not yet."""


class _StrangerError(_PassedOverError):
    """Somebody else's process has answered."""


class _RefusedError(_PassedOverError):
    """Somebody there has our token, and refuses us."""


class _InterruptedError(Exception):
    """This rank has failed meanwhile."""

    def __init__(self, what: AbortReason) -> None:
        super().__init__(what.text)
        self.failure = what


@dataclass
class RendezvousClient:
    candidates: list[Address]
    hello: Hello
    own: Authenticator
    interrupt: CancelToken
    last: str = "nothing tried"
    stranger: str = ""
    refused: str = ""

    def run(self, deadline: float) -> tuple[socket.socket, RendezvousInfo]:
        patience = ANSWER_WITHIN
        while True:
            for address in self.candidates:
                self._stop_if_interrupted()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise (
                        self._refusal()
                        if self.refused
                        else _not_found(self.candidates, self.hello, self.stranger or self.last)
                    )
                if greeted := self._try(address, min(patience, remaining)):
                    connection, proof = greeted
                    return connection, self._await_others(connection, proof, address, deadline)
            patience = min(2 * patience, _LONGEST_PATIENCE)
            self.interrupt.wait(min(time.monotonic() + 0.05 * patience, deadline))

    def tell(self, what: AbortReason, deadline: float) -> bool:
        """Say hello as often as it takes, and then that this rank has failed."""
        # What has just interrupted the search must not interrupt this.
        quiet = CancelToken()
        search = RendezvousClient(self.candidates, self.hello, self.own, quiet)
        try:
            while time.monotonic() < deadline and self.candidates:
                for address in self.candidates:
                    remaining = max(0.01, deadline - time.monotonic())
                    if greeted := search._try(address, min(ANSWER_WITHIN, remaining)):
                        connection, proof = greeted
                        with connection:
                            if _confirmed(connection, {"here": True, "proof": proof, **what.message()}):
                                return True
                quiet.wait(min(time.monotonic() + 0.1, deadline))
        except SrunddpError:
            return False  # rank 0 refuses us
        finally:
            quiet.close()
        return False

    def _stop_if_interrupted(self) -> None:
        if self.interrupt.failure:
            raise _InterruptedError(self.interrupt.failure)

    def _try(self, address: Address, patience: float) -> tuple[socket.socket, str] | None:
        """The connection to rank 0, which has proven itself, and our proof for it; None where this is not rank 0."""
        try:
            return self._greet(address, patience)
        except _RefusedError as reason:
            self.refused = f"{address} {reason}"
        except _StrangerError as reason:
            self.stranger = f"{address} {reason}"
        except _PassedOverError as reason:
            self.last = f"{address} {reason}"
        return None

    def _greet(self, address: Address, patience: float) -> tuple[socket.socket, str]:
        connection = socket.socket(address.family, socket.SOCK_STREAM)
        nonce = auth.nonce()
        try:
            connection.settimeout(patience)
            # Between two subnets routes decide: a strict reverse-path filter drops what comes by another interface.
            if self.hello.address and shares_subnet(self.hello.address, address.host):
                connection.bind((self.hello.address, 0))
            connection.connect((address.host, address.port))
            send(connection, {"hello": asdict(self.hello), "nonce": nonce, "kind": self.own.kind})
            answer_by = time.monotonic() + patience
            self.interrupt.wait(answer_by, connection)
            self._stop_if_interrupted()
            greeting = receive(connection, answer_by)
            return connection, self._prove(connection, nonce, greeting)
        except OSError as error:
            connection.close()
            raise _PassedOverError(os.strerror(error.errno) if error.errno else "did not answer") from None
        except BaseException:
            connection.close()
            raise

    def _prove(self, connection: socket.socket, nonce: str, greeting: dict[str, Any]) -> str:
        """Our proof, once rank 0's has been checked."""
        if "refused" in greeting:
            self._refused(_printable(greeting["refused"]))
        if "seen" not in greeting or not auth.is_nonce(greeting.get("nonce")):
            raise _StrangerError("belongs to somebody else")
        challenge = Challenge(
            self.hello.token, self.hello.rank, str(Address(*connection.getpeername()[:2])), nonce, greeting["nonce"]
        )
        if objection := self.own.why_invalid(greeting.get("proof"), challenge.text(auth.SERVER)):
            raise _RefusedError(f"did not prove that it is rank 0: {objection}")
        try:
            return self.own.sign(challenge.text(auth.CLIENT))
        except auth.ProofError as reason:
            raise _RefusedError(f"cannot be given a proof: {reason}") from None

    def _refused(self, why: str) -> None:
        self.refused = f"rank 0 refused it: {why}"
        if isinstance(self.own, NullAuthenticator):
            raise self._refusal()  # it can verify no answer, and believes this one as it would all others
        raise _RefusedError(f"refused it: {why}")  # somebody else may hold the port

    def _refusal(self) -> RendezvousError:
        return RendezvousError(
            f"rank {self.hello.rank} on {self.hello.node}: {self.refused}", expected=auth.EXPECTED, hint=auth.HINT
        )

    def _await_others(self, connection: socket.socket, proof: str, address: Address, deadline: float) -> RendezvousInfo:
        send(connection, {"here": True, "proof": proof})
        try:
            return self._receive_info(connection, max(deadline, time.monotonic()) + _RANK_ZERO_LATER)
        except (OSError, TypeError):
            raise RendezvousError(
                f"rank {self.hello.rank} on {self.hello.node} lost rank 0 at {address} before all ranks had met",
                expected="rank 0 to stay",
                hint="see rank 0's own message",
            ) from None

    def _receive_info(self, connection: socket.socket, deadline: float) -> RendezvousInfo:
        while True:
            self.interrupt.wait(deadline, connection)
            if self.interrupt.failure:
                reported = _confirmed(connection, self.interrupt.failure.message())
                raise self.interrupt.failure.of(self.hello.rank, self.hello.node, Scope.JOB if reported else Scope.RANK)
            answer = receive(connection, deadline)
            if "failed" in answer:
                raise abort.error_from_message(answer)
            if "refused" in answer:
                self.refused = f"rank 0 refused it: {_printable(answer['refused'])}"
                raise self._refusal()
            if "meeting" in answer:
                connection.settimeout(None)
                return RendezvousInfo(**answer["meeting"])


def _confirmed(connection: socket.socket, message: dict[str, Any]) -> bool:
    """Send that this rank has failed; whether rank 0 has read it, or is failing itself."""
    send(connection, message)
    try:
        answer = receive(connection, time.monotonic() + ANSWER_WITHIN)
    except OSError:
        return False
    return "told" in answer or "failed" in answer


def _printable(text: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:_LONGEST_REASON])


def _other_family(candidates: list[Address], hello: Hello) -> RendezvousError:
    hosts = ", ".join(dict.fromkeys(address.host for address in candidates))
    return RendezvousError(
        f"rank 0 has {hosts}, rank {hello.rank} on {hello.node} has {hello.address}",
        expected="IPv4 on all nodes or IPv6 on all",
        hint="correct ifaces.conf so that all interfaces have addresses of one family",
    )


def _not_found(candidates: list[Address], hello: Hello, last: str) -> RendezvousError:
    tried = str(candidates[0]) if len(candidates) == 1 else f"{candidates[0]} and {len(candidates) - 1} more"
    own = f" ({hello.address})" if hello.address else ""
    return RendezvousError(
        f"rank {hello.rank} on {hello.node}{own} did not reach rank 0 at {tried}: {last}",
        expected="rank 0 to answer there",
        hint="see whether rank 0 started, and whether both nodes' interfaces are on one network",
    )
