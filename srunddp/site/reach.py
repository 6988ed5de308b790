"""Which node reaches which, over the interfaces of the training: TCP between every two of them, on ports of no rule.

NCCL and Gloo connect all ranks on ports that the kernel chooses, so that an open MASTER_PORT alone is not enough. Where
a connection is not answered, the listener's kernel knows more: one that it has half open came through, and its answer
got lost; of one that it does not know, the first packet did.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from srunddp.bootstrap.line import Address, listen
from srunddp.errors import SrunddpError
from srunddp.site.finding import Finding, Level
from srunddp.site.hub import Hub

NAME = "reach"
_WITHIN = 2.0
_AT_ONCE = 64
_SILENT = "no answer"


@dataclass
class Prober:
    """A rank's side: listens on its interface's address, and connects to the others'."""

    address: str
    listener: socket.socket | None = None

    def listen(self) -> int:
        """Listen anew; the port that the kernel chose, 0 where the address cannot be bound."""
        self.close()
        try:
            self.listener = listen(self.address, [0])
        except SrunddpError:
            return 0
        return int(self.listener.getsockname()[1])

    def connect(self, targets: Mapping[str, Sequence[Any]]) -> dict[str, str]:
        """Connect to each host and port; why it is not reached, empty where it is."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return dict(zip(targets, pool.map(self._try, targets.values()), strict=True))

    def _try(self, target: Sequence[Any]) -> str:
        try:
            socket.create_connection((target[0], target[1]), _WITHIN, source_address=(self.address, 0)).close()
        except TimeoutError:
            return _SILENT
        except OSError as error:
            return os.strerror(error.errno).lower() if error.errno else str(error)
        return ""

    def close(self) -> None:
        """Listen no longer."""
        if self.listener:
            self.listener.close()


@dataclass(frozen=True)
class Ways:
    """Between endpoints, each named by its node and, where a node has several, its interface.

    Attributes:
        endpoints: the address of each; ranks: its rank; tried: how many ways.
        broken: the ways on which packets get lost, and how that shows.
    """

    endpoints: Mapping[str, Address]
    ranks: Mapping[str, int]
    tried: int
    broken: Mapping[tuple[str, str], str] = field(default_factory=dict)


def survey(hub: Hub, addresses: Mapping[int, tuple[str, str]]) -> Ways:
    """Try every way between two nodes, and those that fail once more.

    Args:
        addresses: the interface's name and address of each rank that has one.
    """
    ranks = endpoints(hub, addresses)
    open_at = listening(hub, ranks, {name: addresses[rank][1] for name, rank in ranks.items()})
    pairs = [(a, b) for a in open_at for b in open_at if hub.nodes[ranks[a]] != hub.nodes[ranks[b]]]
    failing = _try(hub, ranks, open_at, pairs)
    again = _try(hub, ranks, open_at, list(failing))
    return Ways(open_at, ranks, len(pairs), _directed(hub, ranks, open_at, again))


def listening(hub: Hub, ranks: Mapping[str, int], hosts: Mapping[str, str]) -> dict[str, Address]:
    """Have the endpoints listen, on ports that their kernels choose; those that cannot are left out."""
    ports = hub.ask({rank: {"do": "listen"} for rank in ranks.values()}, 2 * _WITHIN)
    return {name: Address(hosts[name], ports[rank]) for name, rank in ranks.items() if ports.get(rank)}


def endpoints(hub: Hub, addresses: Mapping[int, tuple[str, str]]) -> dict[str, int]:
    """The first rank of each address, by the endpoint's name."""
    first: dict[tuple[str, str], int] = {}
    for rank, (interface, _) in sorted(addresses.items()):
        first.setdefault((hub.nodes[rank], interface), rank)
    several = {node for node, _ in first if sum(node == other for other, _ in first) > 1}
    return {f"{node}:{name}" if node in several else node: rank for (node, name), rank in first.items()}


def _try(
    hub: Hub, ranks: Mapping[str, int], open_at: Mapping[str, Address], pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], str]:
    """The pairs that do not connect, and why."""
    targets: dict[int, dict[str, list[Any]]] = {}
    for a, b in pairs:
        targets.setdefault(ranks[a], {})[b] = [open_at[b].host, open_at[b].port]
    rounds = 1 + max(map(len, targets.values()), default=0) // _AT_ONCE
    asked = {rank: {"do": "connect", "targets": theirs} for rank, theirs in targets.items()}
    answers = hub.ask(asked, rounds * _WITHIN + _WITHIN)
    found = {(a, b): (answers.get(ranks[a]) or {}).get(b, "it did not say") for a, b in pairs}
    return {pair: why for pair, why in found.items() if why}


def _directed(
    hub: Hub, ranks: Mapping[str, int], open_at: Mapping[str, Address], failing: Mapping[tuple[str, str], str]
) -> dict[tuple[str, str], str]:
    """On which way the packets get lost, by what the listeners' kernels hold half open."""
    listeners = {ranks[b] for _, b in failing}
    waiting = hub.ask({rank: {"do": "half open"} for rank in listeners}, 2 * _WITHIN)
    broken: dict[tuple[str, str], str] = {}
    for (a, b), why in failing.items():
        answer_lost = why == _SILENT and open_at[a].host in (waiting.get(ranks[b]) or ())
        broken.setdefault((b, a) if answer_lost else (a, b), why)
    return broken


def judge(ways: Ways) -> Iterator[Finding]:
    """A node that reaches no other, or none of them it, is named alone; else each way that is broken."""
    left = dict(ways.broken)
    for name in sorted(ways.endpoints, key=lambda name: -sum(name in pair for pair in left)):
        others = [other for other in ways.endpoints if other.partition(":")[0] != name.partition(":")[0]]
        sends = len(others) > 1 and all((name, other) in left for other in others)
        hears = len(others) > 1 and all((other, name) in left for other in others)
        if sends or hears:
            why = next(why for pair, why in left.items() if name in pair)
            yield _alone(name, ways.endpoints[name], why, sends=sends, hears=hears)
            left = {pair: why for pair, why in left.items() if name not in pair}
    for (a, b), why in left.items():
        found = f"no TCP from {ways.endpoints[a].host} to {ways.endpoints[b].host}: {why}"
        yield _finding(found, between=f"{a} -> {b}")


def _alone(name: str, at: Address, why: str, *, sends: bool, hears: bool) -> Finding:
    found = {
        (True, True): f"no TCP between {at.host} and any other node: {why}",
        (True, False): f"nothing that it sends from {at.host} reaches another node: {why}",
        (False, True): f"nothing that others send to {at.host} reaches it: {why}",
    }[sends, hears]
    return _finding(found, nodes=(name,))


def _finding(found: str, nodes: tuple[str, ...] = (), between: str = "") -> Finding:
    expected = "TCP on any port between all nodes, as NCCL and Gloo use random ones"
    cure = "open the firewall for this network on both nodes, or name another interface in ifaces.conf"
    return Finding(Level.FAIL, NAME, found, expected, cure, nodes, between=between)


def summary(ways: Ways) -> str:
    """How many ways were tried."""
    if not ways.tried:
        return "all ranks share one node"
    lost = f", {len(ways.broken)} broken" if ways.broken else ""
    return f"TCP between {len(ways.endpoints)} endpoints, {ways.tried} ways, on random ports{lost}"
