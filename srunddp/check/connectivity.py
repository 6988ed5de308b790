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
from itertools import chain
from typing import TypeVar

from srunddp.bootstrap.network import probe
from srunddp.bootstrap.network.probe import AT_ONCE, NO_ANSWER, WITHIN, Probe, Prober
from srunddp.check.coordinator import Coordinator, UnknownQuestionError
from srunddp.check.finding import FAIL, ROWS, Finding, shortened
from srunddp.check.messages import (
    CheckMessage,
    Connect,
    Connected,
    FindHalfOpen,
    HalfOpen,
    Listen,
    Listening,
)
from srunddp.util.hostlist import group_by_key

NAME = "reach"
_SLACK = 15.0  # seconds for a node that is busy; a rank that answers later is taken for lost
_ALL_PAIRS = 64
_NEIGHBOURS = 32

Way = tuple[str, str]
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
        endpoints: by name; tried: the ways between them.
        broken: the ways on which packets get lost, and how that shows.
    """

    endpoints: Mapping[str, Endpoint]
    tried: Sequence[Way]
    broken: Mapping[Way, str] = field(default_factory=dict)


def answer(prober: Prober, question: CheckMessage) -> CheckMessage:
    """On each rank: answer a question about the network.

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


def survey(
    coordinator: Coordinator, addresses: Mapping[int, tuple[str, str]]
) -> ConnectivityMatrix:
    """Try the ways between nodes, and those that fail once more; ``addresses``: interface and
    address of each rank.
    """
    nodes = coordinator.nodes
    ends = listening(coordinator, endpoints_of(nodes, addresses))
    pairs = plan({name: nodes[end.rank] for name, end in ends.items()})
    failing = attempt(coordinator, ends, attempt(coordinator, ends, pairs))
    return ConnectivityMatrix(
        endpoints=ends, tried=pairs, broken=_directed(coordinator, ends, failing)
    )


def endpoints_of(
    nodes: Mapping[int, str], addresses: Mapping[int, tuple[str, str]]
) -> dict[str, Endpoint]:
    """The endpoints by name; nobody listens there yet."""
    first: dict[tuple[str, str], Endpoint] = {}
    for rank, (interface, host) in sorted(addresses.items()):
        first.setdefault(
            (nodes[rank], interface), Endpoint(rank=rank, interface=interface, host=host)
        )
    count = Counter(node for node, _ in first)
    return {
        f"{node}:{name}" if count[node] > 1 else node: end for (node, name), end in first.items()
    }


def listening(coordinator: Coordinator, ends: Mapping[K, Endpoint]) -> dict[K, Endpoint]:
    """Have the endpoints listen, on ports that their kernels choose; those of lost ranks are left
    out.
    """
    hosts = group_by_key((end.rank, end.host) for end in ends.values())
    questions = {rank: Listen(tuple(theirs)) for rank, theirs in hosts.items()}
    answers = coordinator.ask(questions, _SLACK, Listening)
    # Who tries port 0, of an address that cannot be listened on, is refused.
    return {
        name: replace(end, port=answers[end.rank].ports.get(end.host, 0))
        for name, end in ends.items()
        if end.rank in answers
    }


def plan(nodes: Mapping[K, str]) -> list[tuple[K, K]]:
    """All ways between two nodes of these endpoints; of more than 64, from each to the next 32 of
    others in a ring.
    """
    names = list(nodes)
    most = len(names) if len(names) <= _ALL_PAIRS else _NEIGHBOURS
    pairs = []
    for index, a in enumerate(names):
        ring = (names[(index + step) % len(names)] for step in range(1, len(names)))
        pairs += [
            (a, b)
            for b, _ in zip((b for b in ring if nodes[b] != nodes[a]), range(most), strict=False)
        ]
    return pairs


def attempt(
    coordinator: Coordinator,
    ends: Mapping[K, Endpoint],
    pairs: Iterable[tuple[K, K]],
    *,
    bound: bool = False,
    brief: bool = False,
) -> dict[tuple[K, K], str]:
    """Have the first of each pair connect to the second, ``bound`` to its interface; those that do
    not, and why.

    ``brief``: only for the packets to be there, as no answer is expected.
    Ranks that are lost meanwhile say nothing of the network.
    """
    probes: dict[int, dict[tuple[K, K], Probe]] = {}
    for a, b in pairs:
        if bound:
            interface = ends[a].interface
        else:
            interface = ""
        way = Probe(
            source=ends[a].host,
            host=ends[b].host,
            port=ends[b].port,
            interface=interface,
            brief=brief,
        )
        probes.setdefault(ends[a].rank, {})[a, b] = way
    most = max(map(len, probes.values()), default=0)
    questions = {rank: Connect(tuple(own.values())) for rank, own in probes.items()}
    answers = coordinator.ask(questions, (1 + most // AT_ONCE) * WITHIN + _SLACK, Connected)
    found = {
        pair: why
        for rank, answer in answers.items()
        for pair, why in zip(probes[rank], answer.failures, strict=False)
    }
    return {
        (a, b): why
        for (a, b), why in found.items()
        if why and ends[b].rank not in coordinator.errors
    }


def _directed(
    coordinator: Coordinator, ends: Mapping[str, Endpoint], failing: Mapping[Way, str]
) -> dict[Way, str]:
    """On which way the packets get lost, by what the listeners' kernels hold half open.

    A kernel whose own firewall drops its answers forgets such a connection after a second: each is
    tried anew.
    """
    attempt(coordinator, ends, failing, brief=True)
    asked = {ends[b].rank for _, b in failing}
    answers = coordinator.broadcast(FindHalfOpen(), _SLACK, HalfOpen, asked)
    broken: dict[Way, str] = {}
    for (a, b), why in failing.items():
        half_open = answers.get(ends[b].rank, HalfOpen(()))
        answer_lost = why == NO_ANSWER and ends[a].host in half_open.addresses
        broken.setdefault((b, a) if answer_lost else (a, b), why)
    return broken


def evaluate(ways: ConnectivityMatrix) -> Iterator[Finding]:
    """A node that reaches no other, or none of them it, is named alone; else each way that is
    broken.
    """
    left = dict(ways.broken)
    if (
        len(ways.endpoints) > 2
        and left
        and all({(a, b), (b, a)} & left.keys() for a, b in ways.tried)
    ):
        over = ", ".join(sorted({end.interface for end in ways.endpoints.values()}))
        found = f"no TCP between any two nodes over {over}: {next(iter(left.values()))}"
        yield _finding(
            found, nodes=tuple(dict.fromkeys(name.partition(":")[0] for name in ways.endpoints))
        )
        return
    alone = list(_isolated(ways, left))
    for name, words, why in alone:
        # In a multitude of addresses the nodes would be rows of their own.
        at = ways.endpoints[name].host if len(alone) <= ROWS else "its address"
        yield _finding(f"{words.format(at)}: {why}", nodes=(name,))
    hosts = {name: end.host for name, end in ways.endpoints.items()}
    texts = {
        way: f"no TCP from {hosts[way[0]]} to {hosts[way[1]]}: {why}" for way, why in left.items()
    }
    yield from shortened([_finding(texts[a, b], between=f"{a} -> {b}") for a, b in left])


def _isolated(ways: ConnectivityMatrix, left: dict[Way, str]) -> Iterator[tuple[str, str, str]]:
    """The endpoints all of whose ways are broken, how and why; their ways are taken out of
    ``left``.
    """
    tried = group_by_key((name, pair) for pair in ways.tried for name in pair)
    named: set[str] = set()
    for name, _ in Counter(chain(*left)).most_common():
        own = [pair for pair in tried[name] if named.isdisjoint(pair)]
        words = _how(name, own, left)
        if words and len({*chain(*own)}) > 2:
            named.add(name)
            gone = [
                left.pop(way) for a, b in tried[name] for way in ((a, b), (b, a)) if way in left
            ]
            yield name, words, gone[0]


def _how(name: str, own: Sequence[Way], left: Mapping[Way, str]) -> str:
    """In which direction all ways of an endpoint are broken; empty where one is whole."""
    out = [pair for pair in own if pair[0] == name]
    back = [pair for pair in own if pair[1] == name]
    sends = bool(out) and all(pair in left for pair in out)
    receives = bool(back) and all(pair in left for pair in back)
    if sends and not receives:
        return "nothing that it sends from {} reaches another node"
    if receives and not sends:
        return "nothing that others send to {} reaches it"
    if all({(a, b), (b, a)} & left.keys() for a, b in own):
        return "no TCP between {} and any other node"
    return ""


def summary(ways: ConnectivityMatrix) -> str:
    """How many ways were tried."""
    if not ways.tried:
        return "not tried: no two nodes with an interface that is fit"
    if ways.broken:
        lost = f", {len(ways.broken)} broken"
    else:
        lost = ""
    if len(ways.endpoints) > _ALL_PAIRS:
        ring = f" (each to the next {_NEIGHBOURS})"
    else:
        ring = ""
    return (
        f"TCP between {len(ways.endpoints)} endpoints, {len(ways.tried)} ways{ring}, on random"
        f" ports{lost}"
    )
