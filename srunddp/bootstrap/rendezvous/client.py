"""Runs the rendezvous on every rank but 0: the rank says hello to rank 0, and gets the store's
address when all ranks have said hello.

A hello carries the run's token, so that the rank recognises and ignores the socket of another
program or of another step's rank 0. Then both ends prove that they belong to this run. The
connection stays open afterwards. Rank 0's side is in ``server``.
"""

import contextlib
import errno
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NoReturn

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
    RunHasEnded,
    Seen,
    Told,
    error_from,
)
from srunddp.bootstrap.rendezvous.protocol import Address, CancelToken
from srunddp.errors import (
    CutOffError,
    NotNeededError,
    PeerError,
    ReassignedError,
    RendezvousError,
    Scope,
    SrunddpError,
    one_line,
)
from srunddp.util.console import SAY_EVERY
from srunddp.util.messages import receive, send
from srunddp.util.tcp import limit_silence

# Seconds for which a rank waits for an answer in the first round of addresses. Each further round
# doubles the time, up to _LONGEST_PATIENCE.
ANSWER_WITHIN = 1.0
_LONGEST_PATIENCE = 8.0
# The number of ranks that rank 0 answers per second at least, if all come at once; munged makes
# 4,000 proofs per second.
ANSWERED_PER_SECOND = 2000
# Linux queues this many connections until they are accepted, and drops further ones, which try
# again after 1 s and after 2 s. So higher ranks connect later, at this rate.
_AT_ONCE = 4096
_LATER_PER_SECOND = 16000
# Seconds for which a rank waits for rank 0's answer beyond its own deadline: rank 0 ends the
# rendezvous at its deadline, which may be later.
_RANK_ZERO_LATER = 60.0
# The most letters of a refusal that the error quotes, because the process that refuses has not
# proven that it is rank 0.
_LONGEST_REASON = 400
# These four are for a task that comes back after its node was given up.
_NEXT_ROUND_AFTER = 1.0  # seconds between two rounds, in which the task tries all addresses
# If a round takes longer than this many seconds for each address, a process has accepted the task's
# connection and kept it.
_ACCEPTED_AFTER = 2.0
# Seconds after which the task makes its connection anew, because no poll() can wait for ever.
_LONGEST_STAY = 7 * 86400.0
# While the task waits at one address, it tries every so many seconds whether a likelier answers.
_LOOKS_BACK_EVERY = 5.0
# With spare nodes: if no process listens at any address for this many seconds, a rank gives up.
_NOBODY_AFTER = 5.0
# If a rank has not found rank 0 after this many seconds, it prints where it looks for it. Normally
# all ranks have started by then.
_SAYS_AFTER = 15.0


@dataclass(frozen=True, kw_only=True)
class SearchReport:
    """How a rank that does not find rank 0 reports on its search to the user.

    Attributes:
        interface: the name of the rank's network interface; empty if it is not known.
        network_hint: how to find a network over which the nodes reach each other; empty if that
            cannot help.
        say: prints a line while the search lasts; None for a rank that prints nothing, because
            other ranks print the same.
        after: seconds until the first line.
        every: seconds until the next line, which is printed only if the reason has changed.
    """

    interface: str = ""
    network_hint: str = ""
    say: Callable[[str], None] | None = None
    after: float = _SAYS_AFTER
    every: float = SAY_EVERY


def join(
    candidates: list[Address],
    hello: Hello,
    deadline: float,
    own: Authenticator | None = None,
    interrupt: CancelToken | None = None,
    lost_after: float | None = None,
    report: SearchReport | None = None,
) -> tuple[socket.socket, RendezvousInfo]:
    """Find rank 0 among the candidates, say hello, and wait for the answer.

    An address is passed over if the process there refuses this rank, does not answer, sends another
    answer, or does not prove that it is rank 0. Rank 0 may start later than this rank, so the
    candidates are tried again until the deadline.

    Args:
        candidates: addresses at which rank 0 may be, the likeliest first.
        hello: what this rank says of itself.
        deadline: a time of :func:`time.monotonic`.
        own: this rank's kind of proof; None for the kind ``none``.
        interrupt: ends the search when this rank fails; rank 0 is then told of the failure.
        lost_after: seconds without an answer of rank 0's node after which rank 0 is lost; None for
            no limit.
        report: how to report on the search to the user; None to print nothing before it ends.

    Returns:
        The connection to rank 0, and what rank 0 has told this rank.

    Raises:
        RendezvousError: rank 0 was not found in time, refused this rank, was lost, or has only
            addresses of another family; or rank 0 has ended the rendezvous with an error.
        PeerError: a rank failed during the rendezvous, perhaps this one.
        ReassignedError: this task has been given another number.
    """
    own = own or Authenticator()
    cancel = interrupt or CancelToken()
    try:
        return RendezvousClient(
            _reachable(candidates, hello),
            hello,
            own,
            cancel,
            lost_after,
            report or SearchReport(),
        ).run(deadline)
    finally:
        if not interrupt:
            cancel.close()


@dataclass(frozen=True)
class Round:
    """The result of one round, in which a task that wants to come back tries each address once.

    Attributes:
        are_all_closed: whether each node has answered, and no process listens on any of them.
        has_waited: whether a process has accepted the task's connection and kept it for a while.
    """

    are_all_closed: bool = False
    has_waited: bool = False


def come_back(
    candidates: list[Address],
    hello: Hello,
    own: Authenticator,
    interrupt: CancelToken | None,
    lost_after: float,
    why_over: Callable[[Round], str],
) -> NoReturn:
    """Wait for rank 0 to take this task, whose node was given up, into a next start.

    Rank 0's kernel accepts the connection at once. Rank 0 itself answers when the next start
    begins, which may be hours later.

    Args:
        candidates: addresses at which rank 0 may be, the likeliest first.
        hello, own, interrupt: as for :func:`join`.
        lost_after: seconds without an answer of rank 0's node after which this task looks for rank
            0 again.
        why_over: is called before each round with the result of the previous round. It returns why
            the task should stop looking for rank 0; empty if it should go on.

    Raises:
        ReassignedError: the run takes the task back, with this number.
        NotNeededError: the run is over.
        RendezvousError: ``why_over`` has returned a reason, or the run has ended with an error.
        PeerError: a rank failed during the rendezvous, perhaps this one.
    """
    cancel = interrupt or CancelToken()
    try:
        RendezvousClient(
            _reachable(candidates, hello), hello, own, cancel, lost_after, waits=True
        ).come_back(why_over)
    finally:
        if not interrupt:
            cancel.close()


def report_failure(
    candidates: list[Address], hello: Hello, own: Authenticator, what: AbortReason, deadline: float
) -> bool:
    """Tell rank 0 that this rank has failed before the rendezvous.

    Args:
        candidates: addresses at which rank 0 may be, the likeliest first.
        hello: what this rank says of itself; its address may be empty, because the failure may be
            about the interface.
        own: this rank's kind of proof.
        what: this rank's failure.
        deadline: a time of :func:`time.monotonic`.

    Returns:
        Whether rank 0 knows of the failure.
    """
    # Use a new CancelToken, because this rank's own may just have ended its search. An error means
    # that rank 0 refuses this rank, or that no address can be reached.
    with contextlib.closing(CancelToken()) as cancel, contextlib.suppress(SrunddpError):
        return RendezvousClient(_reachable(candidates, hello), hello, own, cancel).tell(
            what, deadline
        )
    return False


def _reachable(candidates: list[Address], hello: Hello) -> list[Address]:
    """Return the candidates that have this rank's address family.

    Raises:
        RendezvousError: all candidates have the other family.
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
    """Return the seconds for which a rank waits before it connects, so that not more ranks connect
    at once than rank 0's kernel queues; 0 for the first 4,096 ranks.
    """
    return max(0, rank - _AT_ONCE) / _LATER_PER_SECOND


class _Kind(Enum):
    """Why an address was passed over: rank 0 is not there, or not yet.

    The reasons are ordered by how much they tell the user: of several, the last one is printed as
    the cause.
    """

    NOT_LISTENING = auto()  # the node answers, and no process listens there
    UNREACHABLE = auto()  # this node or a router has no route there
    NO_ANSWER = auto()  # nothing comes back: the node is down, or a firewall drops the packets
    DEPUTY = auto()  # a deputy listens there, and a process listens at a likelier address
    MUTE = auto()  # a process has accepted the connection, and does not answer
    STRANGER = auto()  # a process of another run, or another program, has answered
    REFUSED = auto()  # a process with this run's token has another kind of proof
    IMPOSTOR = auto()  # a process with this run's token does not prove that it is rank 0


class _NotRankZeroError(Exception):
    """The process that was greeted is not rank 0, or refuses this rank."""

    def __init__(self, kind: _Kind, why: str) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why


# Reasons that come from a process with this run's token. They are kept even if later tries at the
# same address fail for another reason.
_LASTING = (_Kind.REFUSED, _Kind.IMPOSTOR)
# What each kind may mean to the user, while the search lasts.
_MEANINGS = {
    _Kind.NOT_LISTENING: (
        "rank 0 has not started yet, or listens on another network, or a firewall refuses"
    ),
    _Kind.UNREACHABLE: "rank 0's node is down or on another network, or a firewall refuses",
    _Kind.NO_ANSWER: "rank 0's node is down, or a firewall closes this network",
    _Kind.DEPUTY: "rank 0 listens at another address",
    _Kind.MUTE: "rank 0 is slow or stopped, or another program has its port",
    _Kind.STRANGER: "rank 0 has not started yet, or another program has its port",
    _Kind.REFUSED: "see rank 0's own line about this rank",
    _Kind.IMPOSTOR: "see rank 0's own line about this rank",
}


@dataclass(frozen=True)
class _PassedOver:
    """Why an address was passed over, for the user."""

    kind: _Kind
    why: str


@dataclass(frozen=True)
class _Greeted:
    """A connection to rank 0, after rank 0 has proven itself.

    Attributes:
        connection: the connection to rank 0.
        address: where rank 0 listens.
        proof: this rank's proof, which has not been sent to rank 0 yet.
    """

    connection: socket.socket
    address: Address
    proof: str


@dataclass
class RendezvousClient:
    """A rank that looks for rank 0 among the candidates.

    Attributes:
        candidates: addresses at which rank 0 may be, the likeliest first.
        hello: what this rank says of itself.
        own: this rank's kind of proof.
        interrupt: ends the search when this rank fails.
        lost_after, report: see :func:`join`.
        waits: whether rank 0 may answer very late, see :func:`come_back`.
        passed_over: why each address was passed over.
    """

    candidates: list[Address]
    hello: Hello
    own: Authenticator
    interrupt: CancelToken
    lost_after: float | None = None
    report: SearchReport = field(default_factory=SearchReport)
    waits: bool = False
    passed_over: dict[Address, _PassedOver] = field(default_factory=dict)
    # The candidates that come before the address at which this task waits to come back.
    _likelier: list[Address] = field(default_factory=list)
    _began: float = 0.0
    _says_at: float = 0.0
    _said: frozenset[_Kind] = frozenset()

    def run(self, deadline: float) -> tuple[socket.socket, RendezvousInfo]:
        """Find rank 0, and wait until all ranks have met.

        Args:
            deadline: a time of :func:`time.monotonic`.

        Returns:
            The connection to rank 0, and what rank 0 tells this rank at the end of the rendezvous.

        Raises:
            RendezvousError, PeerError, ReassignedError: as :func:`join`.
        """
        patience = ANSWER_WITHIN
        self.interrupt.wait(min(time.monotonic() + comes_later(self.hello.rank), deadline))
        self._began = time.monotonic()
        self._says_at = self._began + self.report.after
        open_at = self._began
        while True:
            for address in self.candidates:
                self._stop_if_interrupted()
                self._say_if_due(time.monotonic())
                if time.monotonic() >= deadline:
                    raise self._not_found()
                if greeted := self._try(address, patience, deadline):
                    return greeted.connection, self._await_others(greeted, deadline)
            now = time.monotonic()
            if not self._are_all_closed:
                open_at = now
            elif self.lost_after is not None and now - open_at > _NOBODY_AFTER:
                # Do not wait until the deadline: after a restart, rank 0 or the deputies that may
                # take over listen all the time.
                raise self._not_found()
            # If rank 0 answers late, it may be busy with proofs. A rank that gives up and says
            # hello again costs rank 0 one more proof, so wait longer the next time.
            patience = min(2 * patience, _LONGEST_PATIENCE)
            # If no process listens yet, the kernel refuses at once. Without this pause the loop
            # would then keep a CPU busy.
            self.interrupt.wait(min(time.monotonic() + 0.05 * patience, deadline))

    def come_back(self, why_over: Callable[[Round], str]) -> NoReturn:
        """Try the addresses, round after round, and wait at one that accepts the connection.

        Args:
            why_over: As for the function :func:`come_back`.
        """
        found = Round()
        while True:
            self._stop_if_interrupted()
            if why := why_over(found):
                raise RendezvousError(why)
            self.passed_over.clear()
            began = time.monotonic()
            for number, address in enumerate(self.candidates):
                self._likelier = self.candidates[:number]
                if not self._wait_at(address):
                    break
            # A round lasts this long only if a process has accepted a connection and kept it. A
            # connection that is accepted and closed at once does not count: if it did, the task
            # would look for rank 0 for ever.
            accepted = time.monotonic() - began > _ACCEPTED_AFTER * max(1, len(self.candidates))
            found = Round(are_all_closed=self._are_all_closed, has_waited=accepted)
            self.interrupt.wait(time.monotonic() + _NEXT_ROUND_AFTER)

    @property
    def _are_all_closed(self) -> bool:
        """Whether each node has answered in this round, and no process listens on any of them."""
        kinds = [reason.kind for reason in self.passed_over.values()]
        return kinds == [_Kind.NOT_LISTENING] * len(self.candidates)

    def _wait_at(self, address: Address) -> bool:
        """Connect to one address and wait as long as the connection lasts. An answer that decides
        what becomes of the task is raised as an error, see the function :func:`come_back`.

        Returns:
            Whether to try the next address; False if a process now listens at a likelier one, so
            that the next round should begin.
        """
        self._stop_if_interrupted()
        deadline = time.monotonic() + _LONGEST_STAY
        greeted = self._try(address, ANSWER_WITHIN, deadline)
        if greeted is None:
            passed_over = self.passed_over.get(address)
            return passed_over is None or passed_over.kind is not _Kind.DEPUTY
        try:
            self._await_others(greeted, deadline)
        except CutOffError:
            pass  # the others may go on elsewhere
        except RendezvousError as error:
            if error.scope is Scope.JOB:
                raise  # the run has ended
        greeted.connection.close()
        return True

    def _await_answer(self, connection: socket.socket, deadline: float) -> None:
        """Wait for the first answer to this task's hello, but only until a process listens at a
        likelier address.

        This task may wait at a deputy, because the deputy was the first process that it could reach
        when the network came back. A deputy queues connections and reads nothing unless it takes
        over. As long as rank 0 runs, the next start takes tasks from rank 0's socket only.

        Raises:
            _NotRankZeroError: A process accepts connections at a likelier address.
        """
        # Try only one likelier address each time. If its node is off, the try takes ANSWER_WITHIN
        # seconds, and a new rank 0 waits for this task's proof for no more than 2 s.
        likelier = itertools.cycle(self._likelier)
        while time.monotonic() < deadline:
            look_at = min(time.monotonic() + _LOOKS_BACK_EVERY, deadline)
            if self.interrupt.wait(look_at, connection) or self.interrupt.failure:
                return
            if address := next(likelier, None):
                with contextlib.suppress(OSError):
                    socket.create_connection((address.host, address.port), ANSWER_WITHIN).close()
                    raise _NotRankZeroError(_Kind.DEPUTY, "is a deputy")

    def tell(self, what: AbortReason, deadline: float) -> bool:
        """Look for rank 0 until the deadline, and tell it that this rank has failed.

        Args:
            what: this rank's failure.
            deadline: a time of :func:`time.monotonic`.

        Returns:
            Whether rank 0 knows of the failure.
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
            # The search has no connection to rank 0 yet, so tell rank 0 over a new one.
            by = time.monotonic() + protocol.TELL_FOR
            raise self._failed(
                failure, report_failure(self.candidates, self.hello, self.own, failure, by)
            )

    def _failed(self, failure: AbortReason, reported: bool) -> PeerError:
        """Return the error about this rank's own failure. If it was reported to rank 0, rank 0
        prints it, and this rank does not.
        """
        return failure.error_of(
            self.hello.rank, self.hello.node, Scope.JOB if reported else Scope.RANK
        )

    def _try(self, address: Address, patience: float, deadline: float) -> _Greeted | None:
        """Greet the process that listens at an address. If it is not rank 0, return None and note
        the reason in :attr:`passed_over`.
        """
        connection = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            proof = self._greet(connection, address, patience, deadline)
        except _NotRankZeroError as error:
            self._pass_over(address, _PassedOver(error.kind, error.why))
        except BaseException:
            # This rank has failed, or the user interrupts it: the connection is not used further.
            connection.close()
            raise
        else:
            return _Greeted(connection, address, proof)
        connection.close()
        return None

    def _pass_over(self, address: Address, reason: _PassedOver) -> None:
        before = self.passed_over.get(address)
        if before is None or before.kind not in _LASTING or reason.kind in _LASTING:
            self.passed_over[address] = reason

    def _greet(
        self, connection: socket.socket, address: Address, patience: float, deadline: float
    ) -> str:
        """Connect, say hello, and have rank 0 prove itself.

        Args:
            connection: a socket that is not yet connected.
            address: where rank 0 may be.
            patience: seconds to wait for the connection, and the least for an answer.
            deadline: a time of :func:`time.monotonic`.

        Returns:
            This rank's proof for rank 0.

        Raises:
            _NotRankZeroError: no process answers, or the one that answers is not rank 0 or refuses
                this rank.
        """
        try:
            self._connect(connection, address, patience, deadline)
        except OSError as error:
            raise _not_connected(error) from None
        if self.waits and self.lost_after is not None:
            limit_silence(connection, self.lost_after)
        try:
            return self._introduce(connection, patience, deadline)
        except OSError as error:
            why = f"accepted the connection, then {_reason(error)}"
            raise _NotRankZeroError(_Kind.MUTE, why) from None

    def _connect(
        self, connection: socket.socket, address: Address, patience: float, deadline: float
    ) -> None:
        # A timeout of 0 would make the socket non-blocking.
        connection.settimeout(max(0.01, min(patience, deadline - time.monotonic())))
        # Bind the socket to this rank's own address only within one subnet. Between two subnets the
        # kernel's routes must choose the interface, because a strict reverse-path filter drops
        # packets that arrive over another interface than the one its routes name.
        if self.hello.address and shares_subnet(self.hello.address, address.host):
            connection.bind((self.hello.address, 0))
        connection.connect((address.host, address.port))

    def _introduce(self, connection: socket.socket, patience: float, deadline: float) -> str:
        """Say hello over a connection, check rank 0's answer, and return this rank's proof."""
        # Each connection has a new nonce, so that a proof for another connection is not valid here.
        nonce = auth.nonce()
        send(connection, replace(self.hello, nonce=nonce, proof_kind=self.own.kind))
        # The process that has accepted may be rank 0 with many ranks to answer, so give it the time
        # that all ranks need together. A closed port or a lost packet has failed in connect(),
        # without this extra time.
        answer_by = min(
            time.monotonic() + patience + self.hello.world_size / ANSWERED_PER_SECOND, deadline
        )
        if self.waits:
            answer_by = deadline
            self._await_answer(connection, answer_by)
        else:
            self.interrupt.wait(answer_by, connection)
        self._stop_if_interrupted()
        return self._prove(connection, nonce, receive(connection, RendezvousMessage, answer_by))

    def _prove(
        self, connection: socket.socket, nonce: str, greeting: RendezvousMessage | None
    ) -> str:
        """Check rank 0's proof, and return this rank's proof."""
        if isinstance(greeting, Refused):
            if greeting.why in auth.mismatches(self.own.kind):
                if self.own.kind == "none":
                    # This rank cannot verify any answer, so it believes this one like all others.
                    raise self._refusal(f"rank 0 refused it: {greeting.why}")
                raise _NotRankZeroError(_Kind.REFUSED, f"refused it: {greeting.why}")
            # Any process may have this port and send any text, so do not quote it.
            raise _NotRankZeroError(_Kind.IMPOSTOR, "refused it without a proof that it is rank 0")
        if not isinstance(greeting, Seen) or not auth.is_nonce(greeting.nonce):
            raise _NotRankZeroError(_Kind.STRANGER, "belongs to somebody else")
        challenge = Challenge(
            self.hello.token,
            self.hello.rank,
            # Take the address to which this rank has connected. Rank 0 signs the address at which
            # it has accepted; with a relay in between the two differ, and the proof is invalid.
            str(Address(*connection.getpeername()[:2])),
            nonce,
            greeting.nonce,
        )
        objection = self.own.why_invalid(greeting.proof, challenge.text(auth.SERVER))
        if objection:
            raise _NotRankZeroError(_Kind.IMPOSTOR, f"did not prove that it is rank 0: {objection}")
        try:
            return self.own.sign(challenge.text(auth.CLIENT))
        except auth.ProofError as reason:
            raise _NotRankZeroError(_Kind.REFUSED, f"cannot be given a proof: {reason}") from None

    def _refusal(self, why: str) -> RendezvousError:
        return RendezvousError(f"{self.hello}: {why}", expected=auth.EXPECTED, hint=auth.HINT)

    def _not_found(self) -> RendezvousError:
        """Return the error for a search that has reached its deadline.

        If a process had this run's token, the error names it, because that explains most. Otherwise
        the error names all addresses that were tried.
        """
        if refused := self._last(_Kind.REFUSED):
            return self._refusal(refused)
        if impostor := self._last(_Kind.IMPOSTOR):
            hint = auth.IMPOSTOR_HINT if self.own.kind == "secret" else auth.HINT
            return RendezvousError(f"{self.hello}: {impostor}", expected=auth.EXPECTED, hint=hint)
        who = f"{self.hello} ({self.hello.address})" if self.hello.address else str(self.hello)
        hint = "see whether rank 0 started, and whether both nodes' interfaces are on one network"
        if self.report.network_hint:
            hint = f"{hint}; {self.report.network_hint}"
        return RendezvousError(
            f"{who} did not reach rank 0 at {self._tried()}",
            expected="rank 0 to answer there",
            hint=hint,
        )

    def _last(self, kind: _Kind) -> str:
        """Return the last address that was passed over for this kind of reason, and the reason;
        empty if there is none.
        """
        found = [
            f"{address} {each.why}"
            for address, each in self.passed_over.items()
            if each.kind is kind
        ]
        return found[-1] if found else ""

    def _tried(self) -> str:
        """Return the addresses that were tried, grouped by the reason why each was passed over; the
        reason that tells the user most comes last.
        """
        by_reason: dict[_PassedOver, list[Address]] = {}
        for address in self.candidates:
            if reason := self.passed_over.get(address):
                by_reason.setdefault(reason, []).append(address)
        if not by_reason:
            return f"{_and_more(self.candidates)}: nothing tried"
        return "; ".join(
            f"{_and_more(by_reason[reason])}: {reason.why}"
            for reason in sorted(by_reason, key=lambda each: each.kind.value)
        )

    def _say_if_due(self, now: float) -> None:
        """Tell the user that rank 0 has not been found for some time, and tell it again if the
        reason has changed.
        """
        if self.report.say is None or now < self._says_at:
            return
        self._says_at = now + self.report.every
        kinds = frozenset(each.kind for each in self.passed_over.values())
        if kinds and kinds != self._said:
            self._said = kinds
            self.report.say(one_line(self._waiting(now, kinds)))

    def _waiting(self, now: float, kinds: Iterable[_Kind]) -> str:
        own = ", ".join(filter(None, (self.report.interface, self.hello.address)))
        hint = _MEANINGS[max(kinds, key=lambda each: each.value)]
        if self.report.network_hint:
            hint = f"{hint}; {self.report.network_hint}"
        return (
            f"{self.hello} (interface {own}) has not reached rank 0 for"
            f" {now - self._began:.0f} s at {self._tried()} -> {hint}"
        )

    def _await_others(self, greeted: _Greeted, deadline: float) -> RendezvousInfo:
        """Send this rank's proof to rank 0, wait until all ranks have come, and return what rank 0
        then tells this rank.
        """
        connection = greeted.connection
        send(connection, Here(greeted.proof))
        # From here on rank 0 may send nothing for long, because it waits for others. Only the
        # answers of its kernel show that its node is still there.
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
                    # Rank 0 sent this answer before it could read the failure, and the rendezvous
                    # no longer reads messages. So end the rendezvous without an error here: the
                    # failure monitor has to report the failure.
                    connection.settimeout(None)
                    return answer
                raise self._failed(failure, _is_known(answer))
            # receive() returns None for a line that is no message, which is ignored. At the
            # deadline it raises an OSError.
            match receive(connection, RendezvousMessage, deadline):
                case AbortReason() | NotMet() as why:
                    raise error_from(why)
                case Refused(why=text):
                    raise self._refusal(f"rank 0 refused it: {text[:_LONGEST_REASON]}")
                case Moved(rank, ranks_per_node, layout, generation):
                    connection.close()
                    raise ReassignedError(rank, ranks_per_node, layout, generation)
                case RunHasEnded():
                    raise NotNeededError("the run is over", scope=Scope.JOB)
                case RendezvousInfo() as info:
                    # Remove the timeout that receive() has set: the code that takes over the
                    # connection sets its own.
                    connection.settimeout(None)
                    return info


def _not_connected(error: OSError) -> _NotRankZeroError:
    """Return why no connection to an address could be made, as the reason to pass it over."""
    if error.errno == errno.ECONNREFUSED:
        return _NotRankZeroError(_Kind.NOT_LISTENING, _reason(error))
    # When a socket's timeout is over, Python raises a TimeoutError without an errno.
    if error.errno in (None, errno.ETIMEDOUT):
        return _NotRankZeroError(_Kind.NO_ANSWER, _reason(error))
    return _NotRankZeroError(_Kind.UNREACHABLE, _reason(error))


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else "did not answer"


def _and_more(addresses: list[Address]) -> str:
    first, *more = addresses
    return f"{first} and {len(more)} more" if more else str(first)


def _tell(connection: socket.socket, failure: AbortReason | CannotCome) -> RendezvousMessage | None:
    """Send that this rank has failed, and return rank 0's next message; None if there is none."""
    send(connection, failure)
    try:
        return receive(connection, RendezvousMessage, time.monotonic() + ANSWER_WITHIN)
    except OSError:
        return None


def _is_known(answer: RendezvousMessage | None) -> bool:
    """Whether rank 0's answer shows that rank 0 knows of this rank's failure, or that it is ending
    the rendezvous because of another failure.

    In both cases rank 0 prints an error, so this rank does not print one.
    """
    return isinstance(answer, Told | AbortReason | NotMet)
