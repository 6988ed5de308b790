"""Finds out which nodes reach each other by TCP, over the interfaces that the training will use.

NCCL and Gloo connect all ranks on ports that the kernel chooses, so an open MASTER_PORT alone is
not enough. If a connection is not answered, the kernel of the listening node shows in which
direction packets get lost: if it holds the connection half open, the SYN has arrived and the answer
got lost; if it does not know the connection, the SYN got lost.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from srunddp.bootstrap.network import probe
from srunddp.bootstrap.network.probe import AT_ONCE, NO_ANSWER, WITHIN, Probe, Prober
from srunddp.check.finding import FAIL, ROWS, Finding, limited_to_rows
from srunddp.check.messages import (
    CheckMessage,
    Connect,
    Connected,
    FindHalfOpen,
    HalfOpen,
    Listen,
    Listening,
)
from srunddp.check.session import CheckSession, UnknownQuestionError
from srunddp.util.hostlist import group_by_key

NAME = "reach"
_SLACK = 15.0  # extra seconds for a busy node; after that its rank counts as lost
# Up to _ALL_PAIRS endpoints try all ways. With more, each tries only its next _NEIGHBOURS in a
# ring, because all ways of thousands of endpoints would be millions of connections.
_ALL_PAIRS = 64
_NEIGHBOURS = 32

Way = tuple[str, str]  # the names of the two endpoints, source first
_finding = partial(
    Finding,
    FAIL,
    expected="TCP on any port between all nodes, as NCCL and Gloo use random ones",
    hint=(
        "open the firewall for this network on both nodes, or name another interface in ifaces.conf"
    ),
)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An address of a node, at which one rank listens.

    Attributes:
        rank: The lowest rank that uses the address.
        host: The address.
        port: The port on which ``rank`` listens; 0 until it listens, and if the address cannot be
            bound.
    """

    rank: int
    interface: str
    host: str
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class ConnectivityMatrix:
    """The ways between endpoints that were tried, and those that are broken. An endpoint has the
    name of its node, with ``:INTERFACE`` if the node has several endpoints.

    Attributes:
        endpoints: The endpoints by name.
        tried: The ways on which the first end was asked to connect to the second; a connection
            needs packets in both directions.
        broken: The ways on which packets get lost, each with the error of the connection.
    """

    endpoints: Mapping[str, Endpoint]
    tried: Sequence[Way]
    broken: Mapping[Way, str] = field(default_factory=dict)


def answer(prober: Prober, question: CheckMessage) -> CheckMessage:
    """Answer a question of rank 0 about the network; runs on each rank.

    Args:
        prober: This rank's prober, whose sockets continue to listen between questions.
        question: What rank 0 asks.

    Raises:
        UnknownQuestionError: The question is not about the network.
    """
    match question:
        case Listen():
            return Listening({address: prober.listen(address) for address in question.addresses})
        case Connect():
            return Connected(tuple(probe.connect_all(question.probes)))
        case FindHalfOpen():
            return HalfOpen(tuple(probe.half_open(prober.listeners.values())))
    raise UnknownQuestionError(question.kind)


def survey(session: CheckSession, addresses: Mapping[int, tuple[str, str]]) -> ConnectivityMatrix:
    """Try the connections between nodes, and retry once each one that fails.

    Args:
        session: The connections from rank 0 to all ranks that have connected.
        addresses: Interface and address of each rank that has one.
    """
    nodes = session.nodes
    ends = listening(session, endpoints_of(nodes, addresses))
    pairs = plan({name: nodes[end.rank] for name, end in ends.items()})
    # Try twice, so that a few lost packets do not count as a broken way: Linux sends a lost SYN
    # again after 1 s, and an attempt lasts 2 s, so three packets in a row may get lost.
    failing = attempt(session, ends, pairs)
    failing = attempt(session, ends, failing)
    return ConnectivityMatrix(endpoints=ends, tried=pairs, broken=_directed(session, ends, failing))


def endpoints_of(
    nodes: Mapping[int, str], addresses: Mapping[int, tuple[str, str]]
) -> dict[str, Endpoint]:
    """Name the endpoints. Their ports are 0, because no rank listens yet.

    Args:
        nodes: The node of each rank.
        addresses: Interface and address of each rank that has one. Ranks of one node with the same
            interface share one endpoint, whose rank is the lowest of them.
    """
    first: dict[tuple[str, str], Endpoint] = {}
    for rank, (interface, host) in sorted(addresses.items()):
        place = (nodes[rank], interface)
        first.setdefault(place, Endpoint(rank=rank, interface=interface, host=host))
    count = Counter(node for node, _ in first)
    return {
        f"{node}:{interface}" if count[node] > 1 else node: end
        for (node, interface), end in first.items()
    }


def listening(session: CheckSession, ends: Mapping[K, Endpoint]) -> dict[K, Endpoint]:
    """Have each endpoint's rank listen, with an empty queue, on a port that its kernel chooses.

    Args:
        session: The connections from rank 0 to all ranks that have connected.
        ends: The endpoints; their ports are ignored.

    Returns:
        The endpoints with their ports, 0 for an address that cannot be bound. Endpoints of ranks
        that did not answer are left out.
    """
    hosts = group_by_key((end.rank, end.host) for end in ends.values())
    questions = {rank: Listen(tuple(theirs)) for rank, theirs in hosts.items()}
    answers = session.ask(questions, _SLACK, Listening)
    # Keep an address that cannot be bound, with port 0: connections to it are then refused.
    return {
        name: replace(end, port=answers[end.rank].ports.get(end.host, 0))
        for name, end in ends.items()
        if end.rank in answers
    }


def plan(nodes: Mapping[K, str]) -> list[tuple[K, K]]:
    """Choose the ways to try: all ways between two nodes, or with many endpoints only the ways to
    the next ``_NEIGHBOURS`` in a ring.

    Args:
        nodes: The node of each endpoint.
    """
    names = list(nodes)
    most = len(names) if len(names) <= _ALL_PAIRS else _NEIGHBOURS
    pairs = []
    for index, source in enumerate(names):
        ring = names[index + 1 :] + names[:index]
        # Packets to another address of the same node go over the loopback and do not test the
        # network.
        others = (target for target in ring if nodes[target] != nodes[source])
        pairs += [(source, target) for target in islice(others, most)]
    return pairs


def attempt(
    session: CheckSession,
    ends: Mapping[K, Endpoint],
    pairs: Iterable[tuple[K, K]],
    *,
    bound: bool = False,
    brief: bool = False,
) -> dict[tuple[K, K], str]:
    """Have the first endpoint of each pair connect to the second.

    Args:
        session: The connections from rank 0 to all ranks that have connected.
        ends: The endpoints, which listen.
        pairs: Pairs of names of endpoints.
        bound: Whether to bind each connection to the interface of the first endpoint. If not, the
            kernel may route the connection over another interface.
        brief: Whether to send without waiting for an answer, because the packets only have to
            arrive.

    Returns:
        The pairs that did not connect, each with the reason. Pairs with a rank that was lost
        meanwhile are left out, because they say nothing about the network.
    """
    probes: dict[int, dict[tuple[K, K], Probe]] = {}
    for source, target in pairs:
        way = Probe(
            source=ends[source].host,
            host=ends[target].host,
            port=ends[target].port,
            interface=ends[source].interface if bound else "",
            brief=brief,
        )
        probes.setdefault(ends[source].rank, {})[source, target] = way
    most = max((len(own) for own in probes.values()), default=0)
    # A rank tries AT_ONCE connections at a time, and each of them may take its whole limit.
    within = (1 + most // AT_ONCE) * WITHIN + _SLACK
    questions = {rank: Connect(tuple(own.values())) for rank, own in probes.items()}
    answers = session.ask(questions, within, Connected)
    failing: dict[tuple[K, K], str] = {}
    for rank, answer in answers.items():
        for (source, target), why in zip(probes[rank], answer.failures, strict=False):
            if why and ends[target].rank not in session.errors:
                failing[source, target] = why
    return failing


def _directed(
    session: CheckSession, ends: Mapping[str, Endpoint], failing: Mapping[Way, str]
) -> dict[Way, str]:
    """Find in which direction packets get lost, by the connections that the listeners' kernels hold
    half open.

    Each connection is tried again just before, because a kernel whose own firewall drops its
    answers forgets a half-open connection after a second.
    """
    attempt(session, ends, failing, brief=True)
    asked = {ends[target].rank for _, target in failing}
    answers = session.broadcast(FindHalfOpen(), _SLACK, HalfOpen, asked)
    broken: dict[Way, str] = {}
    for (source, target), why in failing.items():
        half_open = answers.get(ends[target].rank, HalfOpen(()))
        # A half-open connection has received its SYN, so the SYN-ACK got lost.
        answer_lost = why == NO_ANSWER and ends[source].host in half_open.addresses
        way = (target, source) if answer_lost else (source, target)
        # Keep the first reason: a pair may be tried from both ends and give the same way twice.
        broken.setdefault(way, why)
    return broken


def evaluate(ways: ConnectivityMatrix) -> Iterator[Finding]:
    """Report the broken ways in as few findings as possible.

    If all tried ways are broken, there is one finding. Otherwise there is one for each node that
    cannot send to any other node, or cannot receive from any, and one for each other broken way.
    """
    left = dict(ways.broken)
    # With two endpoints, the single way gets its own finding, which also names the direction.
    if len(ways.endpoints) > 2 and left and all(_either(way, left) for way in ways.tried):
        yield _all_broken(ways)
        return
    alone = list(_isolated(ways, left))
    for name, words, why in alone:
        # With many isolated nodes, leave out the address: then equal findings become one row.
        at = ways.endpoints[name].host if len(alone) <= ROWS else "its address"
        yield _finding(f"{words.format(at)}: {why}", nodes=(name,))
    hosts = {name: end.host for name, end in ways.endpoints.items()}
    findings = [
        _finding(
            f"no TCP from {hosts[source]} to {hosts[target]}: {why}",
            between=f"{source} -> {target}",
        )
        for (source, target), why in left.items()
    ]
    yield from limited_to_rows(findings)


def _all_broken(ways: ConnectivityMatrix) -> Finding:
    over = ", ".join(sorted({end.interface for end in ways.endpoints.values()}))
    why = next(iter(ways.broken.values()))
    nodes = dict.fromkeys(name.partition(":")[0] for name in ways.endpoints)
    return _finding(f"no TCP between any two nodes over {over}: {why}", nodes=tuple(nodes))


def _either(way: Way, broken: Mapping[Way, str]) -> bool:
    """Tell whether a way is broken in at least one direction."""
    return way in broken or way[::-1] in broken


def _isolated(ways: ConnectivityMatrix, left: dict[Way, str]) -> Iterator[tuple[str, str, str]]:
    """Find the endpoints whose ways are all broken, and remove these ways from ``left``.

    The endpoints with the most broken ways come first. Once an endpoint is named, its ways are not
    counted for the endpoints at their other ends, because those may work.

    Yields:
        The endpoint's name, what is broken as a text with ``{}`` for the address, and the reason of
        one way.
    """
    tried = group_by_key((name, way) for way in ways.tried for name in way)
    named: set[str] = set()
    for name, _ in Counter(chain(*left)).most_common():
        own = [way for way in tried[name] if named.isdisjoint(way)]
        words = _how(name, own, left)
        reached = {*chain(*own)}
        if not words or len(reached) <= 2:  # if there is only one way, either end may be the cause
            continue
        named.add(name)
        directions = [each for way in tried[name] for each in (way, way[::-1])]
        gone = [left.pop(way) for way in directions if way in left]
        yield name, words, gone[0]


def _how(name: str, own: Sequence[Way], left: Mapping[Way, str]) -> str:
    """Describe in which direction all ways of an endpoint are broken, with ``{}`` for the address;
    empty if at least one way works in both directions.
    """
    out = [way for way in own if way[0] == name]
    back = [way for way in own if way[1] == name]
    sends_nothing = bool(out) and all(way in left for way in out)
    receives_nothing = bool(back) and all(way in left for way in back)
    if sends_nothing and not receives_nothing:
        return "nothing that it sends from {} reaches another node"
    if receives_nothing and not sends_nothing:
        return "nothing that others send to {} reaches it"
    if all(_either(way, left) for way in own):
        return "no TCP between {} and any other node"
    return ""


def summary(ways: ConnectivityMatrix) -> str:
    """Write how many ways were tried and how many are broken."""
    if not ways.tried:
        return "not tried: no two nodes with a usable interface"
    lost = f", {len(ways.broken)} broken" if ways.broken else ""
    ring = f" (each to the next {_NEIGHBOURS})" if len(ways.endpoints) > _ALL_PAIRS else ""
    return (
        f"TCP between {len(ways.endpoints)} endpoints, {len(ways.tried)} ways{ring}, on random"
        f" ports{lost}"
    )
