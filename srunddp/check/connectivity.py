"""Which node reaches which, over the interfaces of the training: TCP between them, on ports of no rule.

NCCL and Gloo connect all ranks on ports that the kernel chooses, so that an open MASTER_PORT alone is not enough. Where
a connection is not answered, the listener's kernel knows more: one that it has half open came through, and its answer
got lost; of one that it does not know, the first packet did.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from srunddp.bootstrap.rendezvous.protocol import Address, listen
from srunddp.check.comparison import shortened
from srunddp.check.coordinator import Coordinator
from srunddp.check.finding import Finding, Severity
from srunddp.errors import SrunddpError

NAME = "reach"
_WITHIN = 2.0
_SLACK = 15.0  # for a node that is busy; a rank that answers later is taken for lost
_AT_ONCE = 64
_ALL_PAIRS = 64
_NEIGHBOURS = 32
_ROWS = 20
_SILENT = "no answer"


@dataclass
class Prober:
    """A rank's side: listens on its interface's address, and connects to the others'."""

    address: str
    listener: socket.socket | None = None
    _taking: threading.Thread | None = None

    def listen(self) -> int:
        """Listen anew; the port that the kernel chose, 0 where the address cannot be bound."""
        self.close()
        try:
            self.listener = listen(self.address, [0])
        except SrunddpError:
            return 0
        return int(self.listener.getsockname()[1])

    def connect(self, targets: Mapping[str, Sequence[Any]]) -> dict[str, str]:
        """Connect to each host and port; why it is not reached, empty where it is.

        From then on all who connect here are taken in: a kernel refuses to hold many (128, before Linux 5.4).
        """
        if self.listener and not self._taking:
            self._taking = threading.Thread(target=_take_in, args=(self.listener,), daemon=True)
            self._taking.start()
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
            with contextlib.suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)  # what wakes accept()
            if self._taking:
                self._taking.join()
            self.listener.close()
        self.listener = self._taking = None


def _take_in(listener: socket.socket) -> None:
    """Accept and hang up, until the listener is shut down."""
    while True:
        try:
            listener.accept()[0].close()
        except ConnectionError:  # it has gone already
            continue
        except OSError:
            return


@dataclass(frozen=True)
class ConnectivityMatrix:
    """Between endpoints, each named by its node and, where a node has several, its interface.

    Attributes:
        endpoints: the address of each; ranks: its rank; tried: the ways.
        broken: the ways on which packets get lost, and how that shows.
        interfaces: their names; mute: endpoints that could not listen.
    """

    endpoints: Mapping[str, Address]
    ranks: Mapping[str, int]
    tried: Collection[tuple[str, str]]
    broken: Mapping[tuple[str, str], str] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    mute: tuple[str, ...] = ()


def survey(hub: Coordinator, addresses: Mapping[int, tuple[str, str]]) -> ConnectivityMatrix:
    """Try the ways between nodes, and those that fail once more.

    Args:
        addresses: the interface's name and address of each rank that has one.
    """
    nodes = hub.nodes
    ranks = endpoints(nodes, addresses)
    open_at = listening(hub, ranks, {name: addresses[rank][1] for name, rank in ranks.items()})
    pairs = plan({name: nodes[ranks[name]] for name in open_at})
    failing = _try(hub, ranks, open_at, pairs)
    again = _try(hub, ranks, open_at, list(failing))
    interfaces = tuple(sorted({addresses[ranks[name]][0] for name in open_at}))
    mute = tuple(name for name, rank in ranks.items() if name not in open_at and rank not in hub.trouble)
    return ConnectivityMatrix(open_at, ranks, pairs, _directed(hub, ranks, open_at, again), interfaces, mute)


def plan(nodes: Mapping[str, str]) -> list[tuple[str, str]]:
    """All ways between two nodes; of more than 64 endpoints, from each to the next 32 of other nodes in a ring.

    Args:
        nodes: of each endpoint.
    """
    names = list(nodes)
    most = len(names) if len(names) <= _ALL_PAIRS else _NEIGHBOURS
    pairs = []
    for index, a in enumerate(names):
        ring = (names[(index + step) % len(names)] for step in range(1, len(names)))
        pairs += [(a, b) for b, _ in zip((b for b in ring if nodes[b] != nodes[a]), range(most), strict=False)]
    return pairs


def listening(hub: Coordinator, ranks: Mapping[str, int], hosts: Mapping[str, str]) -> dict[str, Address]:
    """Have the endpoints listen, on ports that their kernels choose; those that cannot are left out."""
    ports = hub.ask({rank: {"do": "listen"} for rank in ranks.values()}, _SLACK)
    return {name: Address(hosts[name], ports[rank]) for name, rank in ranks.items() if ports.get(rank)}


def endpoints(nodes: Mapping[int, str], addresses: Mapping[int, tuple[str, str]]) -> dict[str, int]:
    """The first rank of each address, by the endpoint's name."""
    first: dict[tuple[str, str], int] = {}
    for rank, (interface, _) in sorted(addresses.items()):
        first.setdefault((nodes[rank], interface), rank)
    count = Counter(node for node, _ in first)
    return {f"{node}:{name}" if count[node] > 1 else node: rank for (node, name), rank in first.items()}


def _try(
    hub: Coordinator, ranks: Mapping[str, int], open_at: Mapping[str, Address], pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], str]:
    """The pairs that do not connect, and why."""
    targets: dict[int, dict[str, list[Any]]] = {}
    for a, b in pairs:
        targets.setdefault(ranks[a], {})[b] = [open_at[b].host, open_at[b].port]
    rounds = 1 + max(map(len, targets.values()), default=0) // _AT_ONCE
    asked = {rank: {"do": "connect", "targets": theirs} for rank, theirs in targets.items()}
    answers = hub.ask(asked, rounds * _WITHIN + _SLACK)
    # A rank that is lost meanwhile is named as such, and says nothing of the network.
    known = ((a, b) for a, b in pairs if ranks[a] in answers and ranks[b] not in hub.trouble)
    found = {(a, b): answers[ranks[a]].get(b, "") for a, b in known}
    return {pair: why for pair, why in found.items() if why}


def _directed(
    hub: Coordinator, ranks: Mapping[str, int], open_at: Mapping[str, Address], failing: Mapping[tuple[str, str], str]
) -> dict[tuple[str, str], str]:
    """On which way the packets get lost, by what the listeners' kernels hold half open."""
    listeners = {ranks[b] for _, b in failing}
    told = hub.ask({rank: {"do": "half open"} for rank in listeners}, _SLACK)
    waiting = {rank: set(hosts or ()) for rank, hosts in told.items()}
    broken: dict[tuple[str, str], str] = {}
    for (a, b), why in failing.items():
        answer_lost = why == _SILENT and open_at[a].host in waiting.get(ranks[b], ())
        broken.setdefault((b, a) if answer_lost else (a, b), why)
    return broken


def judge(ways: ConnectivityMatrix) -> Iterator[Finding]:
    """A node that reaches no other, or none of them it, is named alone; else each way that is broken."""
    for name in ways.mute:
        yield _finding("no port on the interface's address can be listened on", nodes=(name.partition(":")[0],))
    left = dict(ways.broken)
    if len(ways.endpoints) > 2 and left and all({(a, b), (b, a)} & left.keys() for a, b in ways.tried):
        over = f" over {', '.join(ways.interfaces)}" if ways.interfaces else ""
        found = f"no TCP between any two nodes{over}: {next(iter(left.values()))}"
        yield _finding(found, nodes=tuple(dict.fromkeys(name.partition(":")[0] for name in ways.endpoints)))
        return
    alone = list(_cut_off(ways, left))
    for name, words, why in alone:
        # In a multitude of addresses the nodes would be rows of their own.
        at = ways.endpoints[name].host if len(alone) <= _ROWS else "its address"
        yield _finding(f"{words.format(at)}: {why}", nodes=(name,))
    yield from shortened([_broken(ways, pair, why) for pair, why in left.items()], _ROWS)


def _cut_off(ways: ConnectivityMatrix, left: dict[tuple[str, str], str]) -> Iterator[tuple[str, str, str]]:
    """The endpoints all of whose ways are broken, how and why; their ways are taken out of ``left``."""
    tried: dict[str, list[tuple[str, str]]] = {name: [] for name in ways.endpoints}
    for pair in ways.tried:
        for name in pair:
            tried[name].append(pair)
    count = Counter(name for pair in left for name in pair)
    named: set[str] = set()
    for name in sorted((name for name in ways.endpoints if count[name]), key=lambda name: -count[name]):
        own = [pair for pair in tried[name] if named.isdisjoint(pair)]
        words = _how(name, own, left)
        if words and len({end for pair in own for end in pair}) > 2:
            named.add(name)
            both = [way for a, b in tried[name] for way in ((a, b), (b, a)) if way in left]
            yield name, words, next(left[way] for way in both)
            for way in both:
                left.pop(way, None)


def _how(name: str, own: Sequence[tuple[str, str]], left: Mapping[tuple[str, str], str]) -> str:
    """In which direction all ways of an endpoint are broken; empty where one is whole."""
    out, back = [pair for pair in own if pair[0] == name], [pair for pair in own if pair[1] == name]
    sends = bool(out) and all(pair in left for pair in out)
    hears = bool(back) and all(pair in left for pair in back)
    if sends and not hears:
        return "nothing that it sends from {} reaches another node"
    if hears and not sends:
        return "nothing that others send to {} reaches it"
    return "no TCP between {} and any other node" if all({(a, b), (b, a)} & left.keys() for a, b in own) else ""


def _broken(ways: ConnectivityMatrix, pair: tuple[str, str], why: str) -> Finding:
    a, b = pair
    found = f"no TCP from {ways.endpoints[a].host} to {ways.endpoints[b].host}: {why}"
    return _finding(found, between=f"{a} -> {b}")


def _finding(found: str, nodes: tuple[str, ...] = (), between: str = "") -> Finding:
    expected = "TCP on any port between all nodes, as NCCL and Gloo use random ones"
    hint = "open the firewall for this network on both nodes, or name another interface in ifaces.conf"
    return Finding(Severity.FAIL, NAME, found, expected, hint, nodes, between=between)


def summary(ways: ConnectivityMatrix) -> str:
    """How many ways were tried."""
    if not ways.tried:
        return "all ranks share one node"
    lost = f", {len(ways.broken)} broken" if ways.broken else ""
    ring = f" (each to the next {_NEIGHBOURS})" if len(ways.endpoints) > _ALL_PAIRS else ""
    return f"TCP between {len(ways.endpoints)} endpoints, {len(ways.tried)} ways{ring}, on random ports{lost}"
