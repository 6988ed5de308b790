"""How fast TCP is between two nodes, each busy with one other at a time; a slow node is told by all that it meets."""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from srunddp.bootstrap.rendezvous.protocol import Address
from srunddp.check.comparison import shortened
from srunddp.check.coordinator import Coordinator
from srunddp.check.finding import Finding, Severity

NAME = "rate"
_SECONDS = 0.2
_WITHIN = 3.0
_SLACK = 15.0
_MOST_ROUNDS = 8
_TRIES = 3
_AGAIN = 64
_ROWS = 20
_SLOW = 0.5
_PIECE = 1 << 20
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: what is still to be sent is dropped upon close()


def send(source: str, target: Sequence[Any]) -> None:
    """Send as much as goes for a short time."""
    piece, end = bytes(_PIECE), time.monotonic() + _SECONDS
    with contextlib.suppress(OSError):
        line = socket.create_connection((target[0], target[1]), _WITHIN, source_address=(source, 0))
        with line:
            while (left := end - time.monotonic()) > 0:
                line.settimeout(left)
                line.send(piece)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)


def receive(listener: socket.socket) -> float:
    """Take in what one sender sends; bytes per second, 0 where nobody came."""
    count, buffer = 0, bytearray(_PIECE)
    listener.settimeout(_WITHIN)
    began = time.monotonic()
    with contextlib.suppress(OSError):
        line, _ = listener.accept()
        with line:
            line.settimeout(_WITHIN)
            began = time.monotonic()
            while (size := line.recv_into(buffer)) and time.monotonic() - began < _WITHIN:
                count += size
    return count / max(time.monotonic() - began, 1e-6)


@dataclass(frozen=True)
class BandwidthMatrix:
    """Bytes per second of each way that was measured."""

    ways: Mapping[tuple[str, str], float]

    @cached_property
    def usual(self) -> float:
        """The median."""
        return statistics.median(self.ways.values()) if self.ways else 0.0

    def slow(self) -> dict[tuple[str, str], float]:
        """The ways below half of the median."""
        limit = _SLOW * self.usual
        return {way: rate for way, rate in self.ways.items() if rate < limit}


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Who meets whom in which round, each at most once in one: all pairs, or the first few rounds of many nodes."""
    players: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    count = len(players) - 1
    plan = []
    for _ in range(min(count, _MOST_ROUNDS)):
        pairs = zip(players[: len(players) // 2], reversed(players), strict=False)
        plan.append([(a, b) for a, b in pairs if a and b])
        players = [players[0], players[-1], *players[1:-1]]
    return plan


def survey(hub: Coordinator, at: Mapping[str, tuple[int, Address]]) -> BandwidthMatrix:
    """Measure each pair of the plan in both directions; the slowest again, with nothing else going on.

    Args:
        at: for each endpoint its rank, and where that listens.
    """
    ways: dict[tuple[str, str], float] = {}
    for pairs in rounds(list(at)):
        for way in (pairs, [(b, a) for a, b in pairs]):
            ways |= _measure(hub, at, way)
    for _ in range(_TRIES):
        slow = sorted(BandwidthMatrix(ways).slow().items(), key=lambda item: item[1])[:_AGAIN]
        ways |= {way: max(rate, _measure(hub, at, [way])[way]) for way, rate in slow}
    return BandwidthMatrix(ways)


def _measure(
    hub: Coordinator, at: Mapping[str, tuple[int, Address]], ways: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], float]:
    questions: dict[int, dict[str, Any]] = {}
    for a, b in ways:
        (sender, _), (receiver, where) = at[a], at[b]
        questions[sender] = {"do": "send", "to": [where.host, where.port]}
        questions[receiver] = {"do": "receive"}
    answers = hub.ask(questions, _SLACK)
    return {(a, b): float(answers.get(at[b][0]) or 0.0) for a, b in ways}


def judge(rates: BandwidthMatrix) -> Iterator[Finding]:
    """A node of which most ways out or in are slow is named alone; else each slow way."""
    left = rates.slow()
    met: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {}
    for way in rates.ways:
        for side, name in enumerate(way):
            met.setdefault(name, ([], []))[side].append(way)
    for name in sorted(met):
        for own, verb, other in zip(met[name], ("sends", "receives"), ("to", "from"), strict=True):
            slow = [way for way in own if way in left]
            if len(own) > 1 and 2 * len(slow) > len(own):
                fastest = max(left[way] for way in slow)
                found = f"it {verb} at most {_shown(fastest)} {other} {len(slow)} of {len(own)} nodes"
                yield _finding(found, rates, nodes=(name,))
                for way in slow:
                    del left[way]
    yield from shortened([_finding(_shown(rate), rates, between=f"{a} -> {b}") for (a, b), rate in left.items()], _ROWS)


def _finding(found: str, rates: BandwidthMatrix, nodes: tuple[str, ...] = (), between: str = "") -> Finding:
    expected = f"half of the usual {_shown(rates.usual)} or more"
    hint = "see this node's cable, its switch port and other traffic; `srun --exclude` leaves it out"
    return Finding(Severity.WARN, NAME, found, expected, hint, nodes, between=between)


def _shown(rate: float) -> str:
    return f"{rate / 1e6:.1f} MB/s"


def summary(rates: BandwidthMatrix) -> str:
    """The median and the slowest."""
    if not rates.ways:
        return "all ranks share one node"
    least = min(rates.ways.values())
    return f"{_shown(rates.usual)} over TCP in the median of {len(rates.ways)} ways, {_shown(least)} at least"
