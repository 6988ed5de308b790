"""Which node reaches which, over the interfaces of the training: TCP between them, on ports of no
rule.

NCCL and Gloo connect all ranks on ports that the kernel chooses, so that an open MASTER_PORT alone
is not enough. Where a connection is not answered, the listener's kernel knows more: one that it has
half open came through, and its answer got lost; of one that it does not know, the first packet did.
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
_SLACK = 15.0  # seconds for a node that is busy; a rank that answers later is taken for lost
# Of up to so many endpoints all ways are tried, of more those to the next ones in a ring: all ways
# of thousands would be millions of connections.
_ALL_PAIRS = 64
_NEIGHBOURS = 32

Way = tuple[str, str]  # from one endpoint to another, by their names
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
    """An address of a node, the first rank that has it, and the port on which that rank listens
    there.
    """

    rank: int
    interface: str
    host: str
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class ConnectivityMatrix:
    """Between endpoints, each named by its node and, where a node has several, its interface.

    Attributes:
        endpoints: by name.
        tried: the ways between them, each in one direction, though packets go in both.
        broken: the ways on which packets get lost, and how that shows.
    """

    endpoints: Mapping[str, Endpoint]
    tried: Sequence[Way]
    broken: Mapping[Way, str] = field(default_factory=dict)


def answer(prober: Prober, question: CheckMessage) -> CheckMessage:
    """Answer one of rank 0's questions about the network, on each rank.

    Args:
        prober: of this rank; listens from one question to the next.
        question: of rank 0.

    Raises:
        UnknownQuestionError: It is about something else.
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
    """Try the ways between nodes, and those that fail once more.

    Args:
        session: with all ranks.
        addresses: interface and address of each rank that has one.
    """
    nodes = session.nodes
    ends = listening(session, endpoints_of(nodes, addresses))
    pairs = plan({name: nodes[end.rank] for name, end in ends.items()})
    # Linux sends a lost SYN again after 1 s, and a connection has 2 s. With a second attempt a way
    # may lose three packets in a row and still count as whole.
    failing = attempt(session, ends, pairs)
    failing = attempt(session, ends, failing)
    return ConnectivityMatrix(endpoints=ends, tried=pairs, broken=_directed(session, ends, failing))


def endpoints_of(
    nodes: Mapping[int, str], addresses: Mapping[int, tuple[str, str]]
) -> dict[str, Endpoint]:
    """Name the endpoints; nobody listens there yet.

    Args:
        nodes: the node of each rank.
        addresses: interface and address of each rank that has one. Ranks of a node with the same
            interface are one endpoint, of the first of them.
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
    """Have the endpoints listen, each with an empty queue, on ports that their kernels choose.

    Args:
        session: with all ranks.
        ends: the endpoints; their ports do not count.

    Returns:
        The endpoints with their ports, without those of lost ranks.
    """
    hosts = group_by_key((end.rank, end.host) for end in ends.values())
    questions = {rank: Listen(tuple(theirs)) for rank, theirs in hosts.items()}
    answers = session.ask(questions, _SLACK, Listening)
    # Who tries port 0, of an address that cannot be listened on, is refused.
    return {
        name: replace(end, port=answers[end.rank].ports.get(end.host, 0))
        for name, end in ends.items()
        if end.rank in answers
    }


def plan(nodes: Mapping[K, str]) -> list[tuple[K, K]]:
    """Choose the ways to try: all between two nodes, of many endpoints those to the next in a ring.

    Args:
        nodes: the node of each endpoint.
    """
    names = list(nodes)
    most = len(names) if len(names) <= _ALL_PAIRS else _NEIGHBOURS
    pairs = []
    for index, source in enumerate(names):
        ring = names[index + 1 :] + names[:index]
        # Packets to another address of the same node go over the loopback, and say nothing of the
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
    """Have the first of each pair connect to the second.

    Args:
        session: with all ranks.
        ends: the endpoints, which listen.
        pairs: of their names.
        bound: to its interface; else the kernel may choose another one.
        brief: only for the packets to be there, as no answer is expected.

    Returns:
        The pairs that did not connect, and why; without those of ranks that are lost meanwhile,
        which say nothing of the network.
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
    """Find on which way packets get lost, by what the listeners' kernels hold half open.

    A kernel whose own firewall drops its answers forgets such a connection after a second: each is
    tried anew.
    """
    attempt(session, ends, failing, brief=True)
    asked = {ends[target].rank for _, target in failing}
    answers = session.broadcast(FindHalfOpen(), _SLACK, HalfOpen, asked)
    broken: dict[Way, str] = {}
    for (source, target), why in failing.items():
        half_open = answers.get(ends[target].rank, HalfOpen(()))
        # A half-open connection is one whose SYN has arrived: it was the SYN-ACK that got lost.
        answer_lost = why == NO_ANSWER and ends[source].host in half_open.addresses
        way = (target, source) if answer_lost else (source, target)
        # Each pair is tried from both ends, so a way may show twice.
        broken.setdefault(way, why)
    return broken


def evaluate(ways: ConnectivityMatrix) -> Iterator[Finding]:
    """Name what is broken: nothing but broken ways in one row; else a node that reaches no other,
    or none of them it, alone; else each way.
    """
    left = dict(ways.broken)
    # Between two endpoints there is one way: its own row tells the direction, too.
    if len(ways.endpoints) > 2 and left and all(_either(way, left) for way in ways.tried):
        yield _all_broken(ways)
        return
    alone = list(_isolated(ways, left))
    for name, words, why in alone:
        # In a multitude of addresses the nodes would be rows of their own.
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
    """Whether a way is broken in one of its directions."""
    return way in broken or way[::-1] in broken


def _isolated(ways: ConnectivityMatrix, left: dict[Way, str]) -> Iterator[tuple[str, str, str]]:
    """Find the endpoints all of whose ways are broken, how and why, and take their ways out of
    ``left``.

    Those with most broken ways come first. The ways to one that is named already say nothing of the
    others.
    """
    tried = group_by_key((name, way) for way in ways.tried for name in way)
    named: set[str] = set()
    for name, _ in Counter(chain(*left)).most_common():
        own = [way for way in tried[name] if named.isdisjoint(way)]
        words = _how(name, own, left)
        reached = {*chain(*own)}
        if not words or len(reached) <= 2:  # of one way alone either end may be the cause
            continue
        named.add(name)
        directions = [each for way in tried[name] for each in (way, way[::-1])]
        gone = [left.pop(way) for way in directions if way in left]
        yield name, words, gone[0]


def _how(name: str, own: Sequence[Way], left: Mapping[Way, str]) -> str:
    """Say in which direction all ways of an endpoint are broken; empty where one is whole."""
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
    """Count the ways that were tried, and those that are broken."""
    if not ways.tried:
        return "not tried: no two nodes with an interface that is fit"
    lost = f", {len(ways.broken)} broken" if ways.broken else ""
    ring = f" (each to the next {_NEIGHBOURS})" if len(ways.endpoints) > _ALL_PAIRS else ""
    return (
        f"TCP between {len(ways.endpoints)} endpoints, {len(ways.tried)} ways{ring}, on random"
        f" ports{lost}"
    )
