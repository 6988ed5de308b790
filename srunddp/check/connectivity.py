"""Finds out which nodes reach each other by TCP, over the interfaces that the training will use.

NCCL and Gloo connect all ranks on ports that the kernel chooses, so an open MASTER_PORT alone is
not enough.

A way leads from one endpoint to another, and may be broken in one direction only. If a connection
gets no answer, the kernel of the listening node shows in which direction packets get lost: if it
holds the connection half open, the SYN has arrived and the answer got lost; if it does not know the
connection, the SYN got lost.
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
_SLACK = 15.0  # seconds that a busy node may take longer to answer; then its rank counts as lost
# If there are at most _ALL_PAIRS endpoints, each connects to all others. If there are more, each
# connects only to its next _NEIGHBOURS in a ring, because thousands of endpoints would otherwise
# make millions of connections.
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
        rank: The lowest rank that uses the address; this rank listens.
        interface: The interface that has the address.
        host: The address.
        port: The port on which ``rank`` listens; 0 before it listens, or if the address cannot be
            bound.
    """

    rank: int
    interface: str
    host: str
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class ConnectivityMatrix:
    """The ways between endpoints that were tried, and the ways that are broken.

    Attributes:
        endpoints: The endpoints by name: the name of the node, followed by ``:INTERFACE`` if the
            node has several endpoints.
        tried: The ways that were tried: the first endpoint was asked to connect to the second. A
            connection needs packets in both directions.
        broken: For each way on which packets get lost, the error of the connection.
    """

    endpoints: Mapping[str, Endpoint]
    tried: Sequence[Way]
    broken: Mapping[Way, str] = field(default_factory=dict)


def answer(prober: Prober, question: CheckMessage) -> CheckMessage:
    """Do on this rank what rank 0 asks for (listen, connect, or look for half-open connections),
    and return the answer.

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
        addresses: Interface and address of each rank that has a usable interface.
    """
    nodes = session.nodes
    ends = listening(session, endpoints_of(nodes, addresses))
    pairs = plan({name: nodes[end.rank] for name, end in ends.items()})
    # Try a second time, so that a few lost packets do not count as a broken way. An attempt lasts
    # 2 s, and Linux repeats a lost SYN only once in this time.
    failing = attempt(session, ends, pairs)
    failing = attempt(session, ends, failing)
    return ConnectivityMatrix(endpoints=ends, tried=pairs, broken=_directed(session, ends, failing))


def endpoints_of(
    nodes: Mapping[int, str], addresses: Mapping[int, tuple[str, str]]
) -> dict[str, Endpoint]:
    """Return the endpoints by name, with port 0, because no rank listens yet.

    Ranks of one node with the same interface share one endpoint, whose rank is the lowest of these
    ranks.

    Args:
        nodes: The node of each rank.
        addresses: Interface and address of each rank that has a usable interface.
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
    """Have the rank of each endpoint listen at its address, on a port that the kernel chooses. If
    the rank listens there already, it closes the old socket, which drops the connections in its
    queue.

    Args:
        session: The connections from rank 0 to all ranks that have connected.
        ends: The endpoints; their ports are ignored.

    Returns:
        The endpoints with their ports; the port is 0 if the address cannot be bound. Endpoints of
        ranks that did not answer are left out.
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
    """Return the ways to try, from each endpoint to all endpoints of other nodes. If there are many
    endpoints, these are only the next ``_NEIGHBOURS`` in a ring.

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
        ends: The endpoints, which listen, by name.
        pairs: The names of the first and the second endpoint of each pair.
        bound: Whether to bind each connection to the interface of the first endpoint. If not, the
            kernel may route the connection over a different interface.
        brief: Whether to wait only for a moment for an answer, because the packets only have to
            arrive.

    Returns:
        For each pair that did not connect, the reason. Pairs with a rank that was lost meanwhile
        are left out, because they say nothing about the network.
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
    """Return the direction in which packets get lost, with the error, for each pair that did not
    connect.

    The kernel of the listening node tells the direction by its half-open connections. If its own
    firewall drops its answers, it forgets a half-open connection after a second, so each connection
    is tried once more just before the kernel is asked.
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
        # Keep the first reason: if a pair was tried from both ends, both may lead to the same way.
        broken.setdefault(way, why)
    return broken


def evaluate(ways: ConnectivityMatrix) -> Iterator[Finding]:
    """Report the broken ways in as few findings as possible.

    If all tried ways are broken, there is one finding. Otherwise there is one finding for each
    endpoint that reaches no other node or is reached by none, and one for each further broken way.
    """
    left = dict(ways.broken)
    # With only two endpoints, report the ways themselves, because this also names the direction.
    if len(ways.endpoints) > 2 and left and all(_either(way, left) for way in ways.tried):
        yield _all_broken(ways)
        return
    alone = list(_isolated(ways, left))
    for name, words, why in alone:
        # If many endpoints are isolated, do not name their addresses: their findings are then equal
        # and become one row of the report.
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

    The endpoint with the most broken ways comes first. Once an endpoint was found, its ways are no
    longer counted for the endpoints at their other ends, which may be working well.

    Yields:
        The name of the endpoint; a text on what is broken, with ``{}`` for the address; and why a
        connection on one of its ways failed.
    """
    tried = group_by_key((name, way) for way in ways.tried for name in way)
    named: set[str] = set()
    for name, _ in Counter(chain(*left)).most_common():
        own = [way for way in tried[name] if named.isdisjoint(way)]
        words = _how(name, own, left)
        reached = {*chain(*own)}
        # If the endpoint has ways to one other endpoint only, either of the two may be the cause.
        if not words or len(reached) <= 2:
            continue
        named.add(name)
        directions = [each for way in tried[name] for each in (way, way[::-1])]
        gone = [left.pop(way) for way in directions if way in left]
        yield name, words, gone[0]


def _how(name: str, own: Sequence[Way], left: Mapping[Way, str]) -> str:
    """Return a text on the direction in which all ways of an endpoint are broken, with ``{}`` for
    its address; empty if at least one way works in both directions.

    Args:
        name: The name of the endpoint.
        own: The ways from the endpoint or to it that are counted.
        left: The broken ways that have not been reported yet.
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
    """Return one line on how many ways were tried and how many are broken."""
    if not ways.tried:
        return "not tried: no two nodes with a usable interface"
    lost = f", {len(ways.broken)} broken" if ways.broken else ""
    ring = f" (each to the next {_NEIGHBOURS})" if len(ways.endpoints) > _ALL_PAIRS else ""
    return (
        f"TCP between {len(ways.endpoints)} endpoints, {len(ways.tried)} ways{ring}, on random"
        f" ports{lost}"
    )
