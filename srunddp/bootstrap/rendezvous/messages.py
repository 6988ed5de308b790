"""Defines the messages between a rank and rank 0 until the rendezvous is over.

The two ends may be different versions of srunddp. Unknown fields of a message are ignored, so that
rank 0 can read the hello of another version. When the rank has proven itself, rank 0 compares the
versions, and names both in its error if they differ.
"""

from __future__ import annotations

import json
from dataclasses import field, replace

from srunddp.errors import CutOffError, PeerError, RendezvousError, Scope, SrunddpError
from srunddp.supervisor.worker_messages import WorkerMessage
from srunddp.util.messages import Message
from srunddp.util.quick_dataclass import dataclass

# Rank, address and port of each deputy, a rank that may act for rank 0 when rank 0 is gone.
Deputies = tuple[tuple[int, str, int], ...]

# How many bytes a text may have as JSON. A message with such a text and a proof is still shorter
# than the longest line that rank 0 reads.
_LONGEST_TEXT = 3000


class RendezvousMessage(Message, extensible=True):
    """A message between a rank and rank 0 until the rendezvous is over."""


# The messages from a rank to rank 0.


@dataclass(frozen=True)
class Hello(RendezvousMessage, kind="hello"):
    """A rank says who it is, on which node and in which process it runs, and which CPUs it may use.

    Attributes:
        token: The text by which the ranks of one run recognise each other.
        rank: The sender's rank. With spare nodes, their tasks have the numbers after all ranks, and
            a task that comes back after its node was given up has a number from ``world_size`` on.
        world_size: The number of ranks, and with spare nodes also of their tasks.
        local_rank: The sender's number among the ranks of its node.
        node: The name of the sender's node.
        address: The address of the sender's network interface; empty if it has not been chosen.
        pid: The sender's process id.
        cpus: A checksum of the sender's affinity mask.
        local_world_size: The launcher's number of ranks on this node, or 0 if it is not known.
        version: The rank's version of srunddp.
        deputy_port: The port on which the rank listens as a deputy; 0 if it does not.
        layout: How often the ranks have been renumbered in this run.
        generation: How many restarts the run has had.
        nonce: A random number for this connection, which is part of rank 0's proof.
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
    layout: int = 0
    generation: int = 0
    # The client sets nonce and proof_kind anew for each connection, so they do not count when two
    # hellos of a rank are compared.
    nonce: str = field(default="", compare=False)
    proof_kind: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


@dataclass(frozen=True)
class Here(RendezvousMessage, kind="here"):
    """The rank has accepted rank 0's proof, and waits for the other ranks.

    Attributes:
        proof: The rank's proof.
    """

    proof: str


@dataclass(frozen=True)
class CannotCome(RendezvousMessage, kind="cannot_come"):
    """The rank has failed before the rendezvous.

    Attributes:
        proof: The rank's proof.
        text, exit_code: As in :class:`AbortReason`.
    """

    proof: str
    text: str
    exit_code: int

    @classmethod
    def because(cls, reason: AbortReason, proof: str) -> CannotCome:
        """Return the message about a failure of this rank.

        Args:
            reason: the failure.
            proof: the proof that this rank belongs to the run.
        """
        return cls(proof=proof, text=_beginning(reason.text), exit_code=reason.exit_code)

    @property
    def reason(self) -> AbortReason:
        """The failure because of which the rank cannot come."""
        return AbortReason(self.text, self.exit_code)


@dataclass(frozen=True)
class Goodbye(RendezvousMessage, kind="goodbye"):
    """The rank no longer needs rank 0's store; only sent in a run without supervisors."""


# The message that both a rank and rank 0 send.


@dataclass(frozen=True)
class AbortReason(RendezvousMessage, kind="failed"):
    """A rank has failed: the sender itself, or any rank of the run if the sender is rank 0.

    Attributes:
        text: The error of the failed rank.
        exit_code: The exit code of the failed rank.
    """

    text: str
    exit_code: int

    def encode(self) -> bytes:
        """Return the message as a line, with the text cut to what fits into it."""
        return RendezvousMessage.encode(replace(self, text=_beginning(self.text)))

    def error_of(self, rank: int, node: str, scope: Scope = Scope.JOB) -> PeerError:
        """Return the error that all ranks raise for this failure.

        Args:
            rank, node: the rank that failed, and its node.
            scope: which ranks see the error.
        """
        text = f"rank {rank} on {node} failed: {self.text}"
        return PeerError(text, code=self._failing_exit_code, scope=scope)

    def error_as_told(self) -> PeerError:
        """Return the error that a rank raises when it gets this message from rank 0. It equals the
        error of :meth:`error_of`, because rank 0's text names the failed rank already.
        """
        return PeerError(self.text, code=self._failing_exit_code)

    @property
    def _failing_exit_code(self) -> int:
        # wait(2) has 8 bits for an exit code: 256 would arrive as 0, and look like success.
        return self.exit_code if 0 < self.exit_code < 256 else 1


# The messages from rank 0 to a rank.


@dataclass(frozen=True)
class Stranger(RendezvousMessage, kind="stranger"):
    """The listening process is rank 0 of another run, or does not recognise the line as a hello."""


@dataclass(frozen=True)
class Seen(RendezvousMessage, kind="seen"):
    """Rank 0 has read the rank's hello. The rank counts as present when it has answered with
    :class:`Here`.

    Attributes:
        nonce: A random number for this connection, which is part of the rank's proof.
        proof: Rank 0's proof.
    """

    nonce: str
    proof: str


@dataclass(frozen=True)
class Refused(RendezvousMessage, kind="refused"):
    """Rank 0 does not admit the rank, because one of the two cannot prove itself.

    Attributes:
        why: The reason, which the rank's error quotes.
    """

    why: str


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo(WorkerMessage, RendezvousMessage, kind="world"):
    """The rendezvous is over: rank 0 tells each rank the world and the store's address. The rank's
    supervisor passes the message on to the worker. The defaults are those of a single process.

    Attributes:
        master_addr, master_port: For ``MASTER_ADDR`` and ``MASTER_PORT``.
        store_port: The port of the ranks' own store, if the agent store has ``master_port``; 0 if
            there is no agent store, and the ranks' own store has ``master_port``.
        nnodes, node_rank, local_world_size: torch's terms, counted from the hellos.
        run: The run's token, for ``TORCHELASTIC_RUN_ID``.
        channel: The way over which the ranks found rank 0.
        master_node: Rank 0's node.
        sharers: The number of ranks on this node with this rank's affinity mask, this rank
            included.
        deputies: Rank, address and port of each rank that may act for rank 0 when rank 0 is gone,
            in the order in which they do so.
        takeover: Where the deputies listen, written as rank 0 would publish its address. If rank 0
            is gone, the ranks look for its successor there. Empty if no deputy may take over.
        returns_at: Where rank 0 and the deputies listen for tasks that come back after their node
            was given up, written as rank 0 would publish its address. Empty if none can come back.
        vacant: The numbers, of ranks or of spare nodes' tasks, that no task has any more.
        node_list: If the ranks' nodes may change, the names of these nodes in their order, as a
            host list of Slurm; else, or if the list is too long for a message, empty.
    """

    master_addr: str
    master_port: int
    store_port: int = 0
    nnodes: int = 1
    node_rank: int = 0
    local_world_size: int = 1
    run: str
    channel: str = "none"
    master_node: str
    sharers: int = 1
    deputies: Deputies = ()
    # This text has the secret of the next rendezvous, which must not get into a log.
    takeover: str = field(default="", repr=False)
    returns_at: str = field(default="", repr=False)
    vacant: tuple[int, ...] = ()
    node_list: str = ""


@dataclass(frozen=True)
class NotMet(RendezvousMessage, kind="not_met"):
    """The rendezvous has failed, although no rank has: some ranks did not come, or they do not fit
    together, for example because their versions differ.

    Attributes:
        text: The text of rank 0's error.
        is_cut_off: Whether the rank that gets this message is cut off from the others, which may go
            on without it.
    """

    text: str
    is_cut_off: bool = False


@dataclass(frozen=True)
class Moved(RendezvousMessage, kind="moved"):
    """The task has another number from now on, and has to say hello again with it: it was on a
    spare node and gets a rank, the ranks are renumbered, or it comes back as a spare node's task.

    Attributes:
        rank: The task's new number.
        ranks_per_node: How many ranks each node has, as Slurm writes counts.
        layout: How often the ranks have been renumbered.
        generation: How many restarts the run has had.
    """

    rank: int
    ranks_per_node: str
    layout: int
    generation: int


@dataclass(frozen=True)
class RunHasEnded(RendezvousMessage, kind="run_has_ended"):
    """The run is over, or in its last start: a task that has come back to it is not needed."""


@dataclass(frozen=True)
class Told(RendezvousMessage, kind="told"):
    """Rank 0 has read that the rank failed, and will print the error."""


# The rows of the table in docs/how-it-works.md, in the order in which a rendezvous sends the
# messages.
FROM_A_RANK = (Hello, Here, CannotCome, AbortReason, Goodbye)
FROM_RANK_ZERO = (
    Stranger,
    Seen,
    Refused,
    RendezvousInfo,
    Moved,
    AbortReason,
    NotMet,
    Told,
    RunHasEnded,
)


def about(error: SrunddpError) -> AbortReason | NotMet:
    """Return the message by which rank 0 tells the others of an error that it raises."""
    if isinstance(error, PeerError):
        return AbortReason(str(error), error.exit_code)
    return NotMet(_beginning(str(error)), isinstance(error, CutOffError))


def error_from(message: AbortReason | NotMet) -> SrunddpError:
    """Return the error that a rank raises when it gets a message of :func:`about` from rank 0."""
    if isinstance(message, AbortReason):
        return message.error_as_told()
    if message.is_cut_off:
        return CutOffError(message.text, scope=Scope.JOB)
    return RendezvousError(message.text, scope=Scope.JOB)


def short_enough(text: str) -> str:
    """Return a text if it fits into a message as a whole, else an empty one."""
    return text if len(text) <= _LONGEST_TEXT else ""


def _beginning(text: str) -> str:
    """Return the beginning of a text, as much as fits into a message."""
    # Measure the text as JSON, where one letter may take twelve bytes, such as \ud83d\ude00.
    while len(json.dumps(text)) > _LONGEST_TEXT:
        text = text[: len(text) * 3 // 4]
    return text
