"""The check before a job, as rank 0 leads it: what all ranks see, then what shows between them, then what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from srunddp.bootstrap.environment.detect import Environment
from srunddp.bootstrap.network.ifaces_conf import entry_or_default
from srunddp.bootstrap.network.interface import addresses_of
from srunddp.bootstrap.rendezvous import discovery
from srunddp.bootstrap.rendezvous.protocol import RendezvousInfo, listen
from srunddp.check import allreduce, bandwidth, clocks, connectivity
from srunddp.check.checks import CHECKS, interface
from srunddp.check.checks.launch import NAME
from srunddp.check.comparison import split_message
from srunddp.check.connectivity import ConnectivityMatrix
from srunddp.check.coordinator import Coordinator
from srunddp.check.finding import Check, CheckContext, Finding, Severity
from srunddp.check.render import Report
from srunddp.check.responder import Responder, facts
from srunddp.errors import SrunddpError
from srunddp.util.hostlist import group_by_key

_FACTS_WITHIN = 30.0  # beside what the slowest check may take
_COLLECTIVE_WITHIN = 60.0


def examine(hub: Coordinator, own: Responder, timeout: float, *, with_collective: bool) -> Report:
    """Ask everything, and judge it.

    Args:
        hub: with all ranks that came; own: rank 0.
        timeout: seconds that the ranks had to come, for the message.
        with_collective: measure rates and an all-reduce as well.
    """
    report = look(hub, own, timeout, CHECKS)
    offsets = clocks.survey(hub)
    report.add(clocks.NAME, clocks.judge(offsets), clocks.summary(offsets))
    ways = reached(hub, report)
    if with_collective:
        _measure(hub, own, report, ways)
    report.findings += lost(hub)
    return report


def look(hub: Coordinator, own: Responder, timeout: float, checks: Sequence[Check[Any]]) -> Report:
    """Have all ranks look at themselves, for these checks; for the other arguments see :func:`examine`."""
    report = Report(dict(sorted(hub.here.items())))
    report.findings += missing(hub, own.subject, timeout)
    question = {"do": "facts", "checks": [check.name for check in checks]}
    report.take(hub.ask_all(question, max(check.within for check in checks) + _FACTS_WITHIN))
    report.judge(checks)
    return report


def reached(hub: Coordinator, report: Report) -> ConnectivityMatrix:
    """Have the nodes whose interface is fit try to reach each other."""
    fit = [one for one in report.seen(interface.CHECK) if one.facts.name]
    ways = connectivity.survey(hub, {one.rank: (one.facts.name, one.facts.address) for one in fit})
    report.add(connectivity.NAME, connectivity.judge(ways), connectivity.summary(ways))
    return ways


def alone(subject: CheckContext) -> Report:
    """What this rank sees by itself, where it did not come together with the others."""
    environment = subject.environment
    own = discovery.hello(environment, "")
    report = Report({own.rank: own})
    report.take({own.rank: facts(subject, [check.name for check in CHECKS])})
    report.judge(CHECKS)
    return report


def missing(hub: Coordinator, subject: CheckContext, timeout: float) -> list[Finding]:
    """The ranks that did not come, with who was refused meanwhile; and what is wrong with those that did."""
    environment, entries = subject.environment, subject.loaded.entries
    layout = environment.step.layout() if environment.step else {}
    unseen = sorted(set(range(environment.world_size)) - hub.here.keys())
    missing = group_by_key((layout.get(rank, ""), rank) for rank in unseen)
    hint = "see its own lines, and whether srun started srunddp there"
    findings = []
    for node, ranks in missing.items():
        name = discovery.hostname_of(entry_or_default(entries, node), node)
        known = addresses_of(name) & set(hub.unanswered) if node and hub.unanswered else set()
        came = "; its packets come here, our answers do not reach it" if known else ""
        found, nodes = f"no word within {timeout:g} s{came}", (node,) if node else ()
        findings.append(Finding(Severity.FAIL, NAME, found, "all ranks", hint, nodes, tuple(ranks)))
    if missing:
        findings += [Finding(Severity.WARN, NAME, *split_message(line)) for line in hub.refused]
    hint = "start all ranks with one srun, and one srunddp per task"
    return findings + [Finding(Severity.FAIL, NAME, each, "each rank once", hint) for each in hub.objections]


def lost(hub: Coordinator) -> list[Finding]:
    """The ranks that came, and then could not answer or were lost."""
    hint = "see what ended it there, or that node's load and file systems"
    return [
        Finding(Severity.FAIL, NAME, f"during the check: {why}", "answers", hint, (hub.here[rank].node,), (rank,))
        for rank, why in sorted(hub.trouble.items())
    ]


def apart(environment: Environment, error: SrunddpError) -> list[Finding]:
    """Why this rank did not come together with the others."""
    here = (environment.node,), (environment.rank,)
    return [Finding(Severity.FAIL, NAME, error.found, error.expected, error.hint, *here)]


def _measure(hub: Coordinator, own: Responder, report: Report, ways: ConnectivityMatrix) -> None:
    """Rates between the nodes, and an all-reduce; not where something would stop the job anyway."""
    if why := "something is wrong" if report.failed else "there is one rank" if len(hub.here) == 1 else "":
        report.skipped[allreduce.NAME] = f"not run, as {why}"
        return
    open_at = connectivity.listening(hub, ways.ranks, {name: at.host for name, at in ways.endpoints.items()})
    measured = bandwidth.survey(hub, {name: (ways.ranks[name], at) for name, at in open_at.items()})
    report.add(bandwidth.NAME, bandwidth.judge(measured), bandwidth.summary(measured))
    told = dict.fromkeys(report.here, allreduce.AllReduceFacts("no answer"))
    told |= {rank: allreduce.AllReduceFacts(**answer) for rank, answer in _all_reduce(hub, own).items()}
    link = slowest_link(report, told[0].backend)
    nodes = {rank: hello.node for rank, hello in report.here.items()}
    report.add(allreduce.NAME, allreduce.judge(told, nodes, link), allreduce.summary(told, link))


def _all_reduce(hub: Coordinator, own: Responder) -> dict[int, Any]:
    interface = own.subject.interface
    assert interface is not None
    with listen(interface.address, [0]) as store:
        own.store_fd = store.fileno()
        sizes = Counter(hello.node for hello in hub.here.values())
        node_ranks = {node: number for number, node in enumerate(sizes)}
        questions = {}
        for rank, hello in hub.here.items():
            port = store.getsockname()[1]
            meeting = RendezvousInfo(
                master_addr=interface.address,
                master_port=port,
                nnodes=len(sizes),
                node_rank=node_ranks[hello.node],
                local_world_size=sizes[hello.node],
                run=hello.token,
                channel="",
                master_node=hub.here[0].node,
            )
            questions[rank] = {"do": "collective", "meeting": asdict(meeting), "within": _COLLECTIVE_WITHIN}
        return hub.ask(questions, _COLLECTIVE_WITHIN + 10.0)


def slowest_link(report: Report, backend: str) -> float:
    """Bytes per second that the slowest node's network can carry.

    With NCCL it is that of its InfiniBand and RoCE devices, of as many as the node has ranks; else its interface's.
    0 where that of some node is not known, and on one node.
    """
    ranks = Counter(hello.node for hello in report.here.values())
    seen = report.seen(interface.CHECK) if len(ranks) > 1 else []
    return min((_carried(one.facts, ranks[one.node], backend) for one in seen), default=0.0) * 1e6 / 8


def _carried(facts: interface.InterfaceFacts, ranks: int, backend: str) -> float:
    if backend == "nccl" and facts.devices:
        return facts.rdma_rate / len(facts.devices) * min(len(facts.devices), ranks)
    return facts.speed if facts.physical else 0
