"""Measures between nodes how fast TCP is and how much the clocks differ.

While TCP is measured, each node exchanges data with one other node at a time.
"""

import contextlib
import socket
import statistics
import struct
import time
from collections.abc import Iterator, Mapping, Sequence

from srunddp.check.connectivity import Endpoint, Way
from srunddp.check.finding import FAIL, WARN, Finding, limited_to_rows
from srunddp.check.messages import (
    CheckMessage,
    Clock,
    ReadClock,
    ReceiveBytes,
    Received,
    SendBytes,
)
from srunddp.check.session import CheckSession

NAME = "rate"
CLOCK = "clock"
_SECONDS = 0.2  # seconds of sending: longer than TCP's slow start takes on a cluster's network
_WITHIN = 3.0  # seconds for the other side to connect, and for each receive
_SLACK = 15.0  # seconds for a busy node's answer, in addition to the time of sending
_MOST_ROUNDS = 8  # each round takes half a second, however many nodes there are
_TRIES = 3  # another job's traffic or the scheduler may have disturbed an attempt
_AGAIN = 64  # the most slow ways that are measured again in each of the _TRIES, one by one
_SLOW = 0.5  # share of the median rate below which a way is slow
_PIECE = 1 << 20  # bytes for each send and receive
# In seconds. Munge's credentials expire after 300 s, and then Slurm's daemons refuse each other.
_OFF = 2.0
_REFUSED = 300.0
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER with 0 s: close() drops what is not sent yet


def send(source: str, host: str, port: int) -> None:
    """Send to another node for a fifth of a second, as fast as the network takes it.

    Args:
        source: The address to send from.
        host: The address to send to.
        port: The port on which the receiver listens there.
    """
    piece = bytes(_PIECE)
    end = time.monotonic() + _SECONDS
    # The receiver measures. If this connection fails or breaks, the receiver sees a rate of 0 or a
    # low one.
    with contextlib.suppress(OSError):
        connection = socket.create_connection((host, port), _WITHIN, source_address=(source, 0))
        with connection:
            while (left := end - time.monotonic()) > 0:
                # Without this limit, a send into full buffers would last until the receiver has
                # read them.
                connection.settimeout(left)
                connection.send(piece)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)


def receive(listener: socket.socket) -> float:
    """Receive all that one sender sends; return bytes per second, 0 if no sender connects."""
    count = 0
    buffer = bytearray(_PIECE)
    listener.settimeout(_WITHIN)
    began = time.monotonic()
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_WITHIN)
            # Time counts from the connection on, because the sender, asked at the same moment, may
            # start later.
            began = time.monotonic()
            while (size := connection.recv_into(buffer)) and time.monotonic() - began < _WITHIN:
                count += size
    return count / max(time.monotonic() - began, 1e-6)


def _usual(rates: Mapping[Way, float]) -> float:
    return statistics.median(rates.values()) if rates else 0.0


def _slow(rates: Mapping[Way, float]) -> dict[Way, float]:
    limit = _SLOW * _usual(rates)
    return {way: rate for way, rate in rates.items() if rate < limit}


def rounds(names: Sequence[str]) -> list[list[Way]]:
    """Plan which nodes measure with each other in which round, each node at most once a round. The
    rounds cover all pairs, or for many nodes only the first ``_MOST_ROUNDS`` rounds.
    """
    players: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    # The circle method: the first player keeps its seat, and all others move on by one seat in each
    # round. With an odd number of players one seat is empty, and the player opposite rests.
    plan = []
    for _ in range(min(len(players) - 1, _MOST_ROUNDS)):
        plan.append(
            [
                (a, b)
                for a, b in zip(players[: len(players) // 2], reversed(players), strict=False)
                if a and b
            ]
        )
        players = [players[0], players[-1], *players[1:-1]]
    return plan


def survey(session: CheckSession, ends: Mapping[str, Endpoint]) -> dict[Way, float]:
    """Measure each pair of the plan in both directions, then the slowest ways again, one at a time.

    Args:
        session: The connections from rank 0 to all ranks that have connected.
        ends: The endpoints by name; a rank has to listen on each.

    Returns:
        Bytes per second of each way; 0 if no connection was made.
    """
    ways: dict[Way, float] = {}
    for pairs in rounds(list(ends)):
        ways |= _measure(session, ends, pairs)
        ways |= _measure(session, ends, [(b, a) for a, b in pairs])
    for _ in range(_TRIES):
        slow = sorted(_slow(ways).items(), key=lambda item: item[1])[:_AGAIN]
        # The best attempt counts, because other traffic can only slow an attempt down.
        ways |= {way: max(rate, _measure(session, ends, [way])[way]) for way, rate in slow}
    return ways


def _measure(
    session: CheckSession, ends: Mapping[str, Endpoint], ways: Sequence[Way]
) -> dict[Way, float]:
    questions: dict[int, CheckMessage] = {}
    for a, b in ways:
        questions[ends[a].rank] = SendBytes(
            source=ends[a].host, host=ends[b].host, port=ends[b].port
        )
        questions[ends[b].rank] = ReceiveBytes(ends[b].host)
    answers = session.ask(questions, _SLACK, CheckMessage)
    rates = {rank: answer.rate for rank, answer in answers.items() if isinstance(answer, Received)}
    return {(a, b): rates.get(ends[b].rank, 0.0) for a, b in ways}


def evaluate(rates: Mapping[Way, float]) -> Iterator[Finding]:
    """Warn of a node once if most of its ways out or in are slow, and of every other slow way."""
    left = _slow(rates)
    expected = f"half of the usual {_shown(_usual(rates))} or more"
    hint = (
        "see this node's cable, its switch port and other traffic; `srun --exclude` leaves it out"
    )
    met: dict[str, tuple[list[Way], list[Way]]] = {}
    for way in rates:
        for side, name in enumerate(way):
            met.setdefault(name, ([], []))[side].append(way)
    for name in sorted(met):
        for own, verb, other in zip(met[name], ("sends", "receives"), ("to", "from"), strict=True):
            slow = [way for way in own if way in left]
            # Skip a node with only one way, because the node at either end may be the cause.
            if len(own) > 1 and 2 * len(slow) > len(own):
                # Remove the slow ways from `left`, because this node explains them, and they do not
                # show a fault of the nodes at their other ends.
                fastest = max(left.pop(way) for way in slow)
                found = (
                    f"it {verb} at most {_shown(fastest)} {other} {len(slow)} of {len(own)} nodes"
                )
                yield Finding(WARN, found, expected, hint, nodes=(name,))
    ways = [
        Finding(WARN, _shown(rate), expected, hint, between=f"{a} -> {b}")
        for (a, b), rate in left.items()
    ]
    yield from limited_to_rows(ways)


def _shown(rate: float) -> str:
    return f"{rate / 1e6:.1f} MB/s"


def summary(rates: Mapping[Way, float]) -> str:
    """Write the median rate and the lowest rate in one line."""
    if not rates:
        return "not tried: no two nodes with a usable interface"
    least = min(rates.values())
    return (
        f"{_shown(_usual(rates))} over TCP in the median of {len(rates)} ways, {_shown(least)} at"
        " least"
    )


def survey_clocks(session: CheckSession) -> dict[str, float]:
    """Return how many seconds each node's clock is ahead of the clock of rank 0's node.

    The error is about half a network round trip. A node that does not answer is left out.
    """
    offsets = {session.nodes[0]: 0.0}
    for node, rank in session.node_leaders.items():
        if rank == 0:
            continue
        tries = []
        for _ in range(_TRIES):
            # As NTP does, assume that the other clock was read halfway between question and answer.
            asked = time.time()
            answers = session.ask({rank: ReadClock()}, _SLACK, Clock)
            now = time.time()
            if rank in answers:
                tries.append((now - asked, answers[rank].time - (asked + now) / 2))
        if tries:
            offsets[node] = min(tries)[1]  # the quickest answer is the most exact
    return offsets


def evaluate_clocks(offsets: Mapping[str, float]) -> Iterator[Finding]:
    """Name the nodes whose clocks differ from those of most nodes: a warning from 2 s on, a failure
    from 300 s on.
    """
    # The low median is always the offset of a real node. Of two nodes, the one that is behind is
    # taken as the reference, because nothing shows which clock is right.
    usual = statistics.median_low(offsets.values())
    for node, offset in offsets.items():
        off = offset - usual
        if abs(off) >= _OFF:
            found = (
                f"the clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} the other"
                " nodes'"
            )
            level = FAIL if abs(off) >= _REFUSED else WARN
            hint = (
                "start chronyd or ntpd there; until then times in logs are wrong, and from 300 s on"
                " munge refuses"
            )
            yield Finding(level, found, f"less than {_OFF:.0f} s", hint, nodes=(node,))


def summary_of_clocks(offsets: Mapping[str, float]) -> str:
    """Write in one line how much the clocks differ; ``one node`` if there is nothing to compare."""
    if len(offsets) < 2:
        return "one node"
    apart = max(offsets.values()) - min(offsets.values())
    if apart < 1:
        return f"{len(offsets)} nodes within {apart * 1000:.1f} ms"
    return f"{len(offsets)} nodes, {apart:.1f} s"
