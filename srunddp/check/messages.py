"""Defines the questions of rank 0 to the other ranks of a check, and their answers.

The ranks may have different versions of srunddp; rank 0 then names both versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from srunddp.bootstrap.network.probe import Probe
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.util.messages import Message


class CheckMessage(Message, extensible=True):
    """A question of rank 0 to another rank of a check, or an answer to one."""


# Rank 0 asks.


@dataclass(frozen=True)
class CollectFacts(CheckMessage, kind="collect_facts"):
    """Collect facts about the rank and its node. :class:`CollectedFacts` is the answer.

    Attributes:
        checks: The names of the checks to collect for.
    """

    checks: tuple[str, ...]


@dataclass(frozen=True)
class ReadClock(CheckMessage, kind="read_clock"):
    """Read the node's clock. :class:`Clock` is the answer."""


@dataclass(frozen=True)
class Listen(CheckMessage, kind="listen"):
    """Listen on these addresses, with an empty queue each. :class:`Listening` is the answer."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Connect(CheckMessage, kind="connect"):
    """Try these connections. :class:`Connected` is the answer."""

    probes: tuple[Probe, ...]


@dataclass(frozen=True)
class FindHalfOpen(CheckMessage, kind="find_half_open"):
    """Find connections whose SYN arrived but whose answer got lost. :class:`HalfOpen` is the
    answer.
    """


@dataclass(frozen=True)
class SendBytes(CheckMessage, kind="send_bytes"):
    """Send for a short time, as fast as the network takes it. :class:`Sent` is the answer.

    Attributes:
        source: The address of this node to send from.
        host: The address at which the other node listens.
        port: The port on which the other node listens.
    """

    source: str
    host: str
    port: int


@dataclass(frozen=True)
class ReceiveBytes(CheckMessage, kind="receive_bytes"):
    """Receive what one sender sends to an address. :class:`Received` is the answer.

    Attributes:
        address: An address on which the rank has listened since :class:`Listen`.
    """

    address: str


@dataclass(frozen=True)
class AllReduce(CheckMessage, kind="all_reduce"):
    """Make an all-reduce with the first ranks.
    :class:`srunddp.check.allreduce.AllReduceFacts` is the answer.

    Attributes:
        world_size: How many ranks take part.
        info: What the rank needs for a process group, as after a rendezvous.
        within: Seconds until the rank stops trying and answers that the time is over.
    """

    world_size: int
    info: RendezvousInfo
    within: float


@dataclass(frozen=True)
class CheckIsOver(CheckMessage, kind="check_is_over"):
    """Rank 0 asks nothing more. There is no answer.

    Attributes:
        exit_code: The exit code with which the rank ends.
    """

    exit_code: int


# The rank answers.


@dataclass(frozen=True)
class CollectedFacts(CheckMessage, kind="collected_facts"):
    """The facts that the checks of one rank collected.

    Attributes:
        version: The rank's version of srunddp. The facts of another version may have another
            meaning.
        facts: For each check that collected facts, the fields of its dataclass.
        failed: For each check that collected none, the reason.
    """

    version: str
    # Any JSON: `Report.take` compares the versions before `Report.seen` makes dataclasses of it.
    facts: dict[str, object]
    failed: dict[str, str]


@dataclass(frozen=True)
class Clock(CheckMessage, kind="clock"):
    """The node's clock, in seconds as :func:`time.time` returns them."""

    time: float


@dataclass(frozen=True)
class Listening(CheckMessage, kind="listening"):
    """The port on which the rank listens, by address; 0 for an address that cannot be bound."""

    ports: dict[str, int]


@dataclass(frozen=True)
class Connected(CheckMessage, kind="connected"):
    """For each probe, why the connection failed; empty if it was made."""

    failures: tuple[str, ...]


@dataclass(frozen=True)
class HalfOpen(CheckMessage, kind="half_open"):
    """The remote addresses of connections whose SYN arrived, but which were not completed."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Sent(CheckMessage, kind="sent"):
    """The rank has stopped sending, whether or not all bytes arrived."""


@dataclass(frozen=True)
class Received(CheckMessage, kind="received"):
    """How many bytes arrived per second; 0 if no sender connected."""

    rate: float


@dataclass(frozen=True)
class CannotAnswer(CheckMessage, kind="cannot_answer"):
    """The rank could not do what rank 0 asked, but can be asked something else.

    Attributes:
        why: The reason, as the report shows it.
    """

    why: str
