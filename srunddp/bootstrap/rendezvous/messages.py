"""What a rank and rank 0 tell each other until all ranks have met.

Two versions of srunddp may come together here. One that has more fields is understood, so that both
can be named; the version is compared when a rank has proven itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

from srunddp.errors import PeerError, RendezvousError, Scope, SrunddpError
from srunddp.supervisor.worker_messages import WorkerMessage
from srunddp.util.messages import Message

# The rank, the address and the port of each that may act for rank 0 when it is gone.
Deputies = tuple[tuple[int, str, int], ...]

# Bytes of JSON: with a proof it stays below what rank 0 reads of one line.
_LONGEST_TEXT = 3000


class RendezvousMessage(Message, extensible=True):
    """What a rank and rank 0 tell each other until all ranks have met."""


# From a rank to rank 0.


@dataclass(frozen=True)
class Hello(RendezvousMessage, kind="hello"):
    """What a rank says of itself: who it is, where, which process, and on which CPUs it may run.

    Attributes:
        token: Of the job and step.
        rank, world_size: With spare nodes their tasks count, too, with the numbers behind all
            ranks.
        local_world_size: As the launcher told it; 0 where it did not.
        version: srunddp's.
        deputy_port: On which it listens for the time when rank 0 is gone; 0 where it does not.
        nonce: Of this connection, which rank 0's proof is about.
        proof_kind: How the rank proves itself: ``secret``, ``munge`` or ``none``.
    """

    token: str
    rank: int
    world_size: int
    local_rank: int
    node: str
    address: str
    pid: int
    cpus: str = ""
    local_world_size: int = 0
    version: str = ""
    deputy_port: int = 0
    # These two are filled in for each connection; two hellos of one rank are equal without them.
    nonce: str = field(default="", compare=False)
    proof_kind: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


@dataclass(frozen=True)
class Here(RendezvousMessage, kind="here"):
    """The rank has got rank 0's proof, and waits for the others.

    Attributes:
        proof: The rank's own.
    """

    proof: str


@dataclass(frozen=True)
class CannotCome(RendezvousMessage, kind="cannot_come"):
    """The rank has failed before it could meet the others.

    Attributes:
        proof: The rank's own.
        text, exit_code: As of :class:`AbortReason`.
    """

    proof: str
    text: str
    exit_code: int

    @classmethod
    def because(cls, reason: AbortReason, proof: str) -> CannotCome:
        """Return the message about a failure of this rank.

        Args:
            reason: the failure.
            proof: that this rank belongs to the run.
        """
        return cls(proof=proof, text=_beginning(reason.text), exit_code=reason.exit_code)

    @property
    def reason(self) -> AbortReason:
        """Why it cannot come."""
        return AbortReason(self.text, self.exit_code)


@dataclass(frozen=True)
class Goodbye(RendezvousMessage, kind="goodbye"):
    """The rank has no more use for rank 0's store; without a supervisor only."""


# From both.


@dataclass(frozen=True)
class AbortReason(RendezvousMessage, kind="failed"):
    """A rank has failed, this one or another.

    Attributes:
        text: Why, in the words of its error.
        exit_code: The rank's.
    """

    text: str
    exit_code: int

    def encode(self) -> bytes:
        """Return the line, with as much of the text as fits into it."""
        return RendezvousMessage.encode(replace(self, text=_beginning(self.text)))

    def error_of(self, rank: int, node: str, scope: Scope = Scope.JOB) -> PeerError:
        """Return the error that all ranks raise for this failure.

        Args:
            rank, node: whose it is.
            scope: who sees the error.
        """
        text = f"rank {rank} on {node} failed: {self.text}"
        return PeerError(text, code=self._failing_exit_code, scope=scope)

    def error_as_told(self) -> PeerError:
        """Return the same error on another rank: the text names the rank already."""
        return PeerError(self.text, code=self._failing_exit_code)

    @property
    def _failing_exit_code(self) -> int:
        # wait(2) has 8 bits for it: 256 would arrive as 0, and the failure would look like success.
        return self.exit_code if 0 < self.exit_code < 256 else 1


# From rank 0.


@dataclass(frozen=True)
class Stranger(RendezvousMessage, kind="stranger"):
    """Whoever listens here is rank 0 of another run, or does not take this for a hello."""


@dataclass(frozen=True)
class Seen(RendezvousMessage, kind="seen"):
    """Rank 0 has read the hello. The rank counts once it has answered :class:`Here`.

    Attributes:
        nonce: Which the rank's proof is about.
        proof: Rank 0's own.
    """

    nonce: str
    proof: str


@dataclass(frozen=True)
class Refused(RendezvousMessage, kind="refused"):
    """The rank has not proven itself, or rank 0 cannot do so.

    Attributes:
        why: For the rank's error.
    """

    why: str


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo(WorkerMessage, RendezvousMessage, kind="world"):
    """What every rank knows after the rendezvous; the defaults are those of a process that meets no
    others.

    Its supervisor hands it on to the worker.

    Attributes:
        master_addr, master_port: Of the store.
        nnodes, node_rank, local_world_size: torch's terms, counted from the hellos.
        run: The job and step, for ``TORCHELASTIC_RUN_ID``.
        channel: Over which the ranks met.
        master_node: Rank 0's.
        sharers: Ranks of this node with this rank's affinity mask, itself included.
        deputies: Rank, address and port of those that may act for rank 0 when it is gone, the first
            one first.
        takeover: With spare nodes, what rank 0 would publish of them then.
        vacant: Numbers of tasks that are gone.
    """

    master_addr: str
    master_port: int
    nnodes: int = 1
    node_rank: int = 0
    local_world_size: int = 1
    run: str
    channel: str = "none"
    master_node: str
    sharers: int = 1
    deputies: Deputies = ()
    # It has the secret of the next rendezvous, which must not get into a log.
    takeover: str = field(default="", repr=False)
    vacant: tuple[int, ...] = ()


@dataclass(frozen=True)
class NotMet(RendezvousMessage, kind="not_met"):
    """The ranks do not meet, without a failure of one: some did not come, or they do not fit.

    Attributes:
        text: Rank 0's error.
    """

    text: str


@dataclass(frozen=True)
class Moved(RendezvousMessage, kind="moved"):
    """The task of a spare node gets a rank, and says hello again as that one.

    Attributes:
        rank: Which.
    """

    rank: int


@dataclass(frozen=True)
class Told(RendezvousMessage, kind="told"):
    """Rank 0 knows that the rank has failed, and prints it."""


# For the table in docs/how-it-works.md, in the order of a rendezvous.
FROM_A_RANK = (Hello, Here, CannotCome, AbortReason, Goodbye)
FROM_RANK_ZERO = (Stranger, Seen, Refused, RendezvousInfo, Moved, AbortReason, NotMet, Told)


def about(error: SrunddpError) -> AbortReason | NotMet:
    """Return what rank 0 tells the others when it raises this error."""
    if isinstance(error, PeerError):
        return AbortReason(str(error), error.exit_code)
    return NotMet(_beginning(str(error)))


def error_from(message: AbortReason | NotMet) -> SrunddpError:
    """Return the error that another rank raises when rank 0 has told it :func:`about` its own."""
    if isinstance(message, AbortReason):
        return message.error_as_told()
    return RendezvousError(message.text, scope=Scope.JOB)


def _beginning(text: str) -> str:
    """Return as much of a text as fits into a line."""
    # The bound is for the line: as JSON one letter may be twelve bytes, such as \ud83d\ude00.
    while len(json.dumps(text)) > _LONGEST_TEXT:
        text = text[: len(text) * 3 // 4]
    return text
