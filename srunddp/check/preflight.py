"""Runs the check before a job: rank 0 asks all ranks for facts, has them test the network between
them, and judges the answers.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from srunddp._version import __version__
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network.probe import Prober
from srunddp.bootstrap.process_group.store import ProcessGroupContext
from srunddp.bootstrap.rendezvous import discovery
from srunddp.bootstrap.rendezvous.protocol import Address, listen
from srunddp.bootstrap.rendezvous.server import infos_of
from srunddp.check import allreduce, bandwidth, connectivity, fewer_nodes
from srunddp.check.checks import CHECKS, WITH_SPARES, interface, launch
from srunddp.check.finding import (
    FAIL,
    WARN,
    Check,
    CheckContext,
    Finding,
    call_in_daemon_thread,
    split_message,
)
from srunddp.check.messages import (
    AllReduce,
    CheckMessage,
    Clock,
    CollectedFacts,
    CollectFacts,
    ReadClock,
    ReceiveBytes,
    Received,
    SendBytes,
    Sent,
)
from srunddp.check.render import Report
from srunddp.check.session import CheckSession
from srunddp.util.hostlist import group_by_key

_FACTS_WITHIN = 30.0  # extra seconds, in addition to the time of the slowest check
_COLLECTIVE_WITHIN = 60.0  # seconds, including the import of torch and the start of NCCL


@dataclass
class Responder:
    """Answers rank 0's questions on each rank: it collects facts, connects, sends, receives, and
    takes part in the all-reduce.

    Attributes:
        context: What the checks know about this rank.
        backend: The backend of the all-reduce, one of
            :data:`srunddp.bootstrap.process_group.device.BACKENDS`.
        store_fd: On rank 0, the descriptor of the socket on which the store will listen, set just
            before the all-reduce; None on other ranks.
        prober: Listens and connects for the checks of the network.
    """

    context: CheckContext
    backend: str = "auto"
    store_fd: int | None = None
    prober: Prober = field(default_factory=Prober)

    def handle(self, question: CheckMessage) -> CheckMessage:
        """Carry out a question of rank 0, and return the answer.

        Raises:
            UnknownQuestionError: This version of srunddp does not know the question.
        """
        match question:
            case CollectFacts():
                return collect_facts(self.context, question.checks)
            case ReadClock():
                return Clock(time.time())
            case SendBytes():
                bandwidth.send(question.source, question.host, question.port)
                return Sent()
            case ReceiveBytes():
                return Received(bandwidth.receive(self.prober.listeners[question.address]))
            case AllReduce():
                return self._all_reduce(question)
        return connectivity.answer(self.prober, question)

    def _all_reduce(self, question: AllReduce) -> allreduce.AllReduceFacts:
        here = self.context
        # A rank without an interface is a failure of the interface check, and after a failure
        # nothing is measured.
        assert here.interface is not None
        environment = replace(here.environment, world_size=question.world_size)
        within = question.within
        own = ProcessGroupContext(
            environment, here.interface, question.info, self.store_fd, within, self.backend
        )
        return allreduce.run(own, within)


def collect_facts(context: CheckContext, names: Sequence[str]) -> CollectedFacts:
    """Collect facts for the named checks, all at once, each within its own time limit.

    Each check runs in a thread of its own, so that a hanging file system or driver does not hide
    what the other checks see.

    Args:
        context: What the checks know about this rank.
        names: The names of the checks; a name that this version does not have is ignored.

    Returns:
        The facts of each check that answered, and the reason for each that failed or was late.
    """
    # Only another version of srunddp sends a name that is unknown here, and `Report.take` reports
    # another version.
    checks = [check for check in WITH_SPARES if check.name in names]
    asked = [(check, call_in_daemon_thread(partial(check.collect, context))) for check in checks]
    began = time.monotonic()
    facts: dict[str, object] = {}
    failed: dict[str, str] = {}
    for check, answer in asked:
        # All checks began together, so waiting for one also uses up the time of the others.
        left = max(0.0, began + check.within - time.monotonic())
        try:
            facts[check.name] = asdict(answer.result(left))
        except TimeoutError:
            failed[check.name] = (
                f"no answer within {check.within:g} s: a file system, a look-up or a driver hangs"
            )
        except Exception as error:  # one failing check must not hide what the others see
            failed[check.name] = f"{type(error).__name__}: {error}"
    return CollectedFacts(version=__version__, facts=facts, failed=failed)


def examine(
    session: CheckSession, own: Responder, timeout: float, *, with_collective: bool
) -> Report:
    """Have all ranks collect facts and test the network, and judge the result.

    Args:
        session: The connections from rank 0 to all ranks that have connected.
        own: Rank 0's responder.
        timeout: The seconds that the ranks had to connect, for the message.
        with_collective: Also measure the rates between nodes and an all-reduce, which uses GPUs.
    """
    may_lose_nodes = own.context.spare_nodes or own.context.min_nodes
    checks = WITH_SPARES if may_lose_nodes else CHECKS
    report = look(session, own.context.environment, timeout, checks)
    offsets = bandwidth.survey_clocks(session)
    report.add(
        bandwidth.CLOCK, bandwidth.evaluate_clocks(offsets), bandwidth.summary_of_clocks(offsets)
    )
    ways = reached(session, report)
    fewer = fewer_nodes.fewer_nodes(own.context)
    if fewer:
        report.add(fewer_nodes.NAME, (), fewer.summary())
    if with_collective:
        _measure(session, own, report, ways)
        if fewer:
            _measure_fewer_nodes(session, own, report, fewer)
    # Report lost ranks last, because a rank may be lost during any question.
    report.add(launch.NAME, lost(session))
    return report


def look(
    session: CheckSession, environment: Environment, timeout: float, checks: Sequence[Check[Any]]
) -> Report:
    """Have all ranks collect facts, and return a report that judges the facts.

    Args:
        session: The connections from rank 0 to all ranks that have connected.
        environment: Rank 0's environment.
        timeout: The seconds that the ranks had to connect, for the message.
        checks: The checks to make.
    """
    report = Report(dict(sorted(session.here.items())))
    report.add(launch.NAME, missing(session, environment, timeout))
    question = CollectFacts(tuple(check.name for check in checks))
    within = max(check.within for check in checks) + _FACTS_WITHIN
    report.take(session.broadcast(question, within, CollectedFacts))
    report.evaluate(checks)
    return report


def reached(session: CheckSession, report: Report) -> connectivity.ConnectivityMatrix:
    """Have the nodes that have a usable interface try to reach each other.

    Args:
        session: The connections from rank 0 to all ranks that have connected.
        report: Has the facts of the interface check, and gets the findings.
    """
    # Leave out ranks without an interface: the interface check reports them already, and failed
    # connections to them would repeat that report.
    fit = [one for one in report.seen(interface.CHECK) if one.facts.name]
    ways = connectivity.survey(
        session, {one.rank: (one.facts.name, one.facts.address) for one in fit}
    )
    report.add(connectivity.NAME, connectivity.evaluate(ways), connectivity.summary(ways))
    return ways


def alone(context: CheckContext, *findings: Finding) -> Report:
    """Report what this rank sees by itself, after it could not reach the other ranks.

    Args:
        context: What the checks know about this rank.
        findings: Why the rank could not reach the others.
    """
    # The hello needs no token of the run, because it goes into the report and to no other rank.
    own = discovery.hello(context.environment, "")
    report = Report({own.rank: own})
    report.add(launch.NAME, findings)
    report.take({own.rank: collect_facts(context, [check.name for check in CHECKS])})
    report.evaluate(CHECKS)
    return report


def missing(session: CheckSession, environment: Environment, timeout: float) -> Iterator[Finding]:
    """Yield findings about ranks that did not connect, about strangers that were refused
    meanwhile, and about ranks that connected but were refused.

    Args:
        session: Has the hello of each rank that connected, and a text on each refusal.
        environment: Rank 0's environment.
        timeout: The seconds that the ranks had to connect, for the message.
    """
    # A rank that never came cannot name its node; only Slurm's layout does.
    layout = environment.step.layout() if environment.step else {}
    unseen = sorted(set(range(environment.world_size)) - session.here.keys())
    for node, ranks in group_by_key((layout.get(rank, ""), rank) for rank in unseen).items():
        found = f"no word within {timeout:g} s"
        hint = "see its own lines, and whether srun started srunddp there"
        yield Finding(
            FAIL, found, "all ranks", hint, nodes=(node,) if node else (), ranks=tuple(ranks)
        )
    # Mention refused strangers only if a rank is missing: otherwise no stranger can be a rank, but
    # only something like a port scanner.
    if unseen:
        for line in session.refused:
            yield Finding(WARN, *split_message(line))
    for line in session.objections:
        yield Finding(
            FAIL, line, "each rank once", "start all ranks with one srun, and one srunddp per task"
        )


def lost(session: CheckSession) -> Iterator[Finding]:
    """Yield a finding for each rank that connected, but later failed to answer or was lost."""
    hint = "see what ended it there, or that node's load and file systems"
    for rank, why in sorted(session.errors.items()):
        where = (session.here[rank].node,)
        yield Finding(FAIL, f"during the check: {why}", "answers", hint, nodes=where, ranks=(rank,))


def _measure(
    session: CheckSession, own: Responder, report: Report, ways: connectivity.ConnectivityMatrix
) -> None:
    """Measure the rates between the nodes and an all-reduce. Skip both if there is a failure
    already, or only one rank.
    """
    why = ""
    if report.failed:
        why = "something is wrong"
    elif len(session.here) == 1:
        why = "there is one rank"
    if why:
        report.skipped |= dict.fromkeys((bandwidth.NAME, allreduce.NAME), f"not run, as {why}")
        return
    measured = bandwidth.survey(session, connectivity.listening(session, ways.endpoints))
    report.add(bandwidth.NAME, bandwidth.evaluate(measured), bandwidth.summary(measured))
    shown = _measure_all_reduce(session, own, report, sorted(session.here))
    report.add(allreduce.NAME, shown.findings, shown.summary)


def _measure_fewer_nodes(
    session: CheckSession, own: Responder, report: Report, fewer: fewer_nodes.FewerNodes
) -> None:
    """Measure an all-reduce over only the first nodes, as many as the run needs to go on. Skip it
    if there is a failure already, for example of the all-reduce over all ranks.
    """
    if report.failed:
        return
    shown = _measure_all_reduce(session, own, report, range(fewer.first_ranks))
    nodes = (
        f"over the first {fewer.min_nodes} nodes" if fewer.min_nodes > 1 else "on the first node"
    )
    report.add(fewer_nodes.NAME, shown.findings, f"{fewer.summary()}; {nodes}: {shown.summary}")


@dataclass(frozen=True)
class _AllReduceResult:
    """What an all-reduce over some ranks has shown.

    Attributes:
        findings: What is wrong or slow; empty if nothing is.
        summary: One line about the measurements.
    """

    findings: tuple[Finding, ...]
    summary: str


def _measure_all_reduce(
    session: CheckSession, own: Responder, report: Report, ranks: Collection[int]
) -> _AllReduceResult:
    """Measure an all-reduce, and judge it.

    Args:
        session: The connections from rank 0 to all ranks that have connected.
        own: Rank 0's responder.
        report: Has the facts of the interface check.
        ranks: The ranks that take part, from 0 on without a gap.
    """
    facts = dict.fromkeys(ranks, allreduce.AllReduceFacts(wrong="no answer"))
    facts |= _all_reduce(session, own, ranks)
    link = slowest_link(report, facts[0].backend, ranks)
    nodes = {rank: report.here[rank].node for rank in ranks}
    return _AllReduceResult(
        findings=tuple(allreduce.evaluate(facts, nodes, link)),
        summary=allreduce.summary(facts, link),
    )


def _all_reduce(
    session: CheckSession, own: Responder, ranks: Collection[int]
) -> dict[int, allreduce.AllReduceFacts]:
    interface = own.context.interface
    assert interface is not None
    with listen(interface.address, [0]) as store:
        own.store_fd = store.fileno()
        address = Address(*store.getsockname()[:2])
        infos = infos_of([session.here[rank] for rank in ranks], address, "")
        questions = {
            rank: AllReduce(len(ranks), info, _COLLECTIVE_WITHIN)
            for rank, info in zip(ranks, infos, strict=True)
        }
        # A rank ends its own attempt after `_COLLECTIVE_WITHIN` and says so in its answer. Rank 0
        # must wait longer than that, to receive this answer.
        within = _COLLECTIVE_WITHIN + 10.0
        return session.ask(questions, within, allreduce.AllReduceFacts)


def slowest_link(report: Report, backend: str, ranks: Collection[int]) -> float:
    """Return how many bytes per second the slowest node's network can carry.

    With NCCL and RDMA devices (InfiniBand, RoCE), the speed of a node is the sum over as many of
    its devices as it has ranks, or over all its devices if it has more ranks than devices.
    Otherwise it is the speed of the node's interface.

    Args:
        report: Has the facts of the interface check.
        backend: ``nccl`` or ``gloo``.
        ranks: The ranks that use the network. Nodes without any of them do not count.

    Returns:
        0 if there is only one node, or if the speed of some node is not known.
    """
    on_node = Counter(report.here[rank].node for rank in ranks)
    if len(on_node) <= 1:
        return 0.0
    speeds = [
        _carried(one.facts, on_node[one.node], backend)
        for one in report.seen(interface.CHECK)
        if one.rank in ranks
    ]
    # The kernel reports speeds in Mbit/s.
    return min(speeds, default=0.0) * 1e6 / 8


def _carried(facts: interface.InterfaceFacts, ranks: int, backend: str) -> float:
    if backend == "nccl" and facts.devices:
        return facts.rdma_rate / len(facts.devices) * min(len(facts.devices), ranks)
    return facts.speed if facts.physical else 0
