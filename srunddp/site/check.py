"""The check before a job, as rank 0 leads it: what all ranks see, then what shows between them, then what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from srunddp.bootstrap import channels
from srunddp.bootstrap.interface import addresses_of
from srunddp.bootstrap.line import Hello, Meeting, listen
from srunddp.site import clocks, collective, joining, rates, reach
from srunddp.site.checks import CHECKS, interface
from srunddp.site.finding import Check, F, Finding, Level, Seen, Subject
from srunddp.site.hub import Hub
from srunddp.site.rank import Rank, facts
from srunddp.site.reach import Ways

FACTS_WITHIN = 300.0  # torch may be imported from a file system that is cold
_COLLECTIVE_WITHIN = 120.0


@dataclass
class Report:
    """What a check has found.

    Attributes:
        here: what each rank that came said of itself; facts: what it collected, by check.
        findings: what is wrong; summaries: for each check one line on what was seen; both in the checks' order.
        skipped: why a check was not made.
    """

    here: Mapping[int, Hello]
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    summaries: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether something would stop the job."""
        return any(finding.level is Level.FAIL for finding in self.findings)

    def add(self, name: str, findings: Iterable[Finding], summary: str) -> None:
        """Take in what one check has found."""
        self.findings += findings
        self.summaries[name] = summary

    def seen(self, check: Check[F]) -> list[Seen[F]]:
        """What a check collected on each rank, where it did."""
        return [
            Seen(rank, self.here[rank].local_rank, self.here[rank].node, check.facts(**told[check.name]["facts"]))
            for rank, told in sorted(self.facts.items())
            if "facts" in told.get(check.name, {})
        ]


def examine(hub: Hub, own: Rank, timeout: float, *, with_collective: bool) -> Report:
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
    return report


def look(hub: Hub, own: Rank, timeout: float, checks: Sequence[Check[Any]]) -> Report:
    """Have all ranks look at themselves, for these checks; for the other arguments see :func:`examine`."""
    report = Report(dict(sorted(hub.here.items())))
    report.findings += absent(hub, own.subject, timeout)
    report.facts = hub.ask_all({"do": "facts", "checks": [check.name for check in checks]}, FACTS_WITHIN)
    report.findings += silent(report)
    for check in checks:
        if seen := report.seen(check):
            report.add(check.name, check.judge(seen), check.summary(seen))
    return report


def reached(hub: Hub, report: Report) -> Ways:
    """Have the nodes whose interface is fit try to reach each other."""
    fit = [one for one in report.seen(interface.CHECK) if one.facts.name]
    ways = reach.survey(hub, {one.rank: (one.facts.name, one.facts.address) for one in fit})
    report.add(reach.NAME, reach.judge(ways), reach.summary(ways))
    return ways


def absent(hub: Hub, subject: Subject, timeout: float) -> list[Finding]:
    """The ranks that did not come, and what is wrong with those that did."""
    environment = subject.environment
    layout = environment.step.layout() if environment.step else {}
    missing: dict[str, list[int]] = {}
    for rank in sorted(set(range(environment.world_size)) - hub.here.keys()):
        missing.setdefault(layout.get(rank, ""), []).append(rank)
    cure = "see its own lines, and whether srun started srunddp there"
    findings = []
    for node, ranks in missing.items():
        known = addresses_of(channels.known_as(joining.entry_of(subject.loaded.entries, node), node)) if node else set()
        came = "; its packets come here, our answers do not reach it" if known & set(hub.unanswered) else ""
        found, nodes = f"no word within {timeout:.0f} s{came}", (node,) if node else ()
        findings.append(Finding(Level.FAIL, "launch", found, "all ranks", cure, nodes, tuple(ranks)))
    cure = "start all ranks with one srun, and one srunddp per task"
    return findings + [Finding(Level.FAIL, "launch", each, "each rank once", cure) for each in hub.objections]


def silent(report: Report) -> list[Finding]:
    """Ranks that came and did not answer, and checks that failed themselves."""
    cure = "see that node's load and its file systems"
    lost = [
        Finding(Level.FAIL, "launch", "no answer to what it sees", "an answer", cure, (hello.node,), (rank,))
        for rank, hello in report.here.items()
        if rank not in report.facts
    ]
    return lost + [
        Finding(Level.FAIL, name, told["failed"], "facts", cure, (report.here[rank].node,), (rank,))
        for rank, checks in report.facts.items()
        for name, told in checks.items()
        if "failed" in told
    ]


def alone(subject: Subject) -> list[Finding]:
    """What this rank sees by itself, where it cannot reach rank 0."""
    told = facts(subject, [check.name for check in CHECKS])
    environment = subject.environment
    found: list[Finding] = []
    for check in CHECKS:
        if "facts" in told[check.name]:
            seen = Seen(
                environment.rank, environment.local_rank, environment.node, check.facts(**told[check.name]["facts"])
            )
            found += check.judge([seen])
    return found


def _measure(hub: Hub, own: Rank, report: Report, ways: Ways) -> None:
    """Rates between the nodes, and an all-reduce; not where something would stop the job anyway."""
    if why := "something is wrong" if report.failed else "there is one rank" if len(hub.here) == 1 else "":
        report.skipped[collective.NAME] = f"not run, as {why}"
        return
    open_at = reach.listening(hub, ways.ranks, {name: at.host for name, at in ways.endpoints.items()})
    measured = rates.survey(hub, {name: (ways.ranks[name], at) for name, at in open_at.items()})
    report.add(rates.NAME, rates.judge(measured), rates.summary(measured))
    told = dict.fromkeys(report.here, collective.Facts("no answer"))
    told |= {rank: collective.Facts(**answer) for rank, answer in _all_reduce(hub, own).items()}
    link = slowest_link(report)
    nodes = {rank: hello.node for rank, hello in report.here.items()}
    report.add(collective.NAME, collective.judge(told, nodes, link), collective.summary(told, link))


def _all_reduce(hub: Hub, own: Rank) -> dict[int, Any]:
    interface = own.subject.interface
    assert interface is not None
    with listen(interface.address, [0]) as store:
        own.store_fd = store.fileno()
        sizes = Counter(hello.node for hello in hub.here.values())
        node_ranks = {node: number for number, node in enumerate(sizes)}
        questions = {}
        for rank, hello in hub.here.items():
            port = store.getsockname()[1]
            meeting = Meeting(
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


def slowest_link(report: Report) -> float:
    """Bytes per second that the slowest node's network can carry: its InfiniBand devices, or else its interface.

    0 where that of some node is not known.
    """
    facts = [one.facts for one in report.seen(interface.CHECK)]
    return min(each.rdma_rate or (each.speed if each.physical else 0) for each in facts) * 1e6 / 8
