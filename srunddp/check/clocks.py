"""How far the nodes' clocks are apart, by rank 0's questions and the time that the answers took."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping

from srunddp.check.coordinator import Coordinator
from srunddp.check.finding import Finding, Severity

NAME = "clock"
_TRIES = 3
_WITHIN = 15.0
_OFF = 2.0
_REFUSED = 300.0  # munge's credentials expire then, and with them all that Slurm says between nodes


def survey(hub: Coordinator) -> dict[str, float]:
    """Seconds by which each node's clock is ahead of rank 0's node's, to about half a network round trip."""
    offsets = {node: _offset(hub, rank) for node, rank in hub.leaders.items() if rank}
    return {hub.nodes[0]: 0.0} | {node: offset for node, offset in offsets.items() if offset is not None}


def _offset(hub: Coordinator, rank: int) -> float | None:
    tries = []
    for _ in range(_TRIES):
        asked = time.time()
        theirs = hub.ask({rank: {"do": "clock"}}, _WITHIN).get(rank)
        now = time.time()
        if isinstance(theirs, float):
            tries.append((now - asked, theirs - (asked + now) / 2))
    return min(tries)[1] if tries else None


def judge(offsets: Mapping[str, float]) -> Iterator[Finding]:
    """The clocks that are not as most are."""
    usual = statistics.median_low(offsets.values())
    for node, offset in offsets.items():
        off = offset - usual
        if abs(off) >= _OFF:
            found = f"the clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} the other nodes'"
            level = Severity.FAIL if abs(off) >= _REFUSED else Severity.WARN
            hint = "start chronyd or ntpd there; until then times in logs are wrong, and from 300 s on munge refuses"
            yield Finding(level, NAME, found, f"less than {_OFF:.0f} s", hint, (node,))


def summary(offsets: Mapping[str, float]) -> str:
    """How far they are apart."""
    if len(offsets) < 2:
        return "one node"
    apart = max(offsets.values()) - min(offsets.values())
    return f"{len(offsets)} nodes within {apart * 1000:.1f} ms" if apart < 1 else f"{len(offsets)} nodes, {apart:.1f} s"
