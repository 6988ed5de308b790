"""What rank 0 asks the other ranks of a check, and what they answer.

Two versions of srunddp may come together here, so that both can be named.
"""

from __future__ import annotations

from dataclasses import dataclass

from srunddp.bootstrap.network.probe import Probe
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.util.messages import Message


class CheckMessage(Message, extensible=True):
    """What rank 0 asks the other ranks of a check, and what they answer."""


# Rank 0 asks.


@dataclass(frozen=True)
class CollectFacts(CheckMessage, kind="collect_facts"):
    """Look at the node and the rank. :class:`CollectedFacts` is the answer.

    Attributes:
        checks: The names of the checks to collect for.
    """

    checks: tuple[str, ...]


@dataclass(frozen=True)
class ReadClock(CheckMessage, kind="read_clock"):
    """Read the node's clock. :class:`Clock` is the answer."""


@dataclass(frozen=True)
class Listen(CheckMessage, kind="listen"):
    """Listen on these addresses, with empty queues. :class:`Listening` is the answer."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Connect(CheckMessage, kind="connect"):
    """Try these connections. :class:`Connected` is the answer."""

    probes: tuple[Probe, ...]


@dataclass(frozen=True)
class FindHalfOpen(CheckMessage, kind="find_half_open"):
    """Look which connections came through, but not the answer. :class:`HalfOpen` is the answer."""


@dataclass(frozen=True)
class SendBytes(CheckMessage, kind="send_bytes"):
    """Send as much as goes for a short time. :class:`Sent` is the answer.

    Attributes:
        source: The address of this node to send from.
        host, port: Where the other node listens.
    """

    source: str
    host: str
    port: int


@dataclass(frozen=True)
class ReceiveBytes(CheckMessage, kind="receive_bytes"):
    """Take in what one sender sends to an address. :class:`Received` is the answer.

    Attributes:
        address: One on which the rank listens since :class:`Listen`.
    """

    address: str


@dataclass(frozen=True)
class AllReduce(CheckMessage, kind="all_reduce"):
    """Add up with the others. :class:`srunddp.check.allreduce.AllReduceFacts` is the answer.

    Attributes:
        info: As after a rendezvous.
        within: Seconds, after which the rank gives up and says so.
    """

    info: RendezvousInfo
    within: float


@dataclass(frozen=True)
class CheckIsOver(CheckMessage, kind="check_is_over"):
    """Nothing more is asked. There is no answer.

    Attributes:
        exit_code: With which the rank ends.
    """

    exit_code: int


# The rank answers.


@dataclass(frozen=True)
class CollectedFacts(CheckMessage, kind="collected_facts"):
    """What was collected.

    Attributes:
        version: The rank's srunddp; of another one the facts may mean something else.
        facts: By check, the fields of its dataclass.
        failed: By check, why there are none.
    """

    version: str
    # Any JSON: only once the versions are known to be the same is it a dataclass (`Report.take`).
    facts: dict[str, object]
    failed: dict[str, str]


@dataclass(frozen=True)
class Clock(CheckMessage, kind="clock"):
    """The node's time, in seconds of :func:`time.time`."""

    time: float


@dataclass(frozen=True)
class Listening(CheckMessage, kind="listening"):
    """On which port, by address; 0 for an address that cannot be bound."""

    ports: dict[str, int]


@dataclass(frozen=True)
class Connected(CheckMessage, kind="connected"):
    """For each probe why the connection failed; empty where it was made."""

    failures: tuple[str, ...]


@dataclass(frozen=True)
class HalfOpen(CheckMessage, kind="half_open"):
    """The addresses whose connections came through, but not the answer."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Sent(CheckMessage, kind="sent"):
    """It was sent, as far as it went."""


@dataclass(frozen=True)
class Received(CheckMessage, kind="received"):
    """What was received, in bytes per second; 0 where nobody came."""

    rate: float


@dataclass(frozen=True)
class CannotAnswer(CheckMessage, kind="cannot_answer"):
    """The rank could not do what was asked, and may be asked something else.

    Attributes:
        why: As an error says it.
    """

    why: str
