"""The check before a job: rank 0 asks what all ranks see and what shows between them, and judges
it.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from srunddp._version import __version__
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network.probe import Prober
from srunddp.bootstrap.process_group.store import ProcessGroupContext
from srunddp.bootstrap.rendezvous import discovery
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.bootstrap.rendezvous.protocol import Address, listen
from srunddp.bootstrap.rendezvous.server import infos_of
from srunddp.check import allreduce, bandwidth, connectivity
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

_FACTS_WITHIN = 30.0  # beside what the slowest check may take
_COLLECTIVE_WITHIN = 60.0  # seconds, with the import of torch and the start of NCCL


@dataclass
class Responder:
    """What each rank does when rank 0 asks: look at itself, connect, send, receive, and add up with
    the others.

    Attributes:
        context: this rank.
        backend: for the collective, see :data:`srunddp.bootstrap.process_group.device.BACKENDS`.
        store_fd: the descriptor of the socket on which the store is to listen; on rank 0, before
            the collective. None elsewhere.
        prober: which listens and connects for the checks of the network.
    """

    context: CheckContext
    backend: str = "auto"
    store_fd: int | None = None
    prober: Prober = field(default_factory=Prober)

    def handle(self, question: CheckMessage) -> CheckMessage:
        """Answer one of rank 0's questions."""
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
                return self._all_reduce(question.info, question.within)
        return connectivity.answer(self.prober, question)

    def _all_reduce(self, info: RendezvousInfo, within: float) -> allreduce.AllReduceFacts:
        here = self.context
        # A rank without an interface is a failure of the check of interfaces, after which nothing
        # is measured.
        assert here.interface is not None
        own = ProcessGroupContext(
            here.environment, here.interface, info, self.store_fd, within, self.backend
        )
        return allreduce.run(own, within)


def collect_facts(context: CheckContext, names: Sequence[str]) -> CollectedFacts:
    """Collect for the checks of these names, for all at once, and for each within its time.

    Each has a thread of its own: a file system or a driver that hangs must not hide what the others
    see.

    Args:
        context: this rank.
        names: of the checks; those that this version does not have are left out.

    Returns:
        What was collected; of each check that failed or was late, why.
    """
    # Only another version of srunddp sends a name that is unknown here; `Report.take` reports that.
    checks = [check for check in WITH_SPARES if check.name in names]
    asked = [(check, call_in_daemon_thread(partial(check.collect, context))) for check in checks]
    began = time.monotonic()
    facts: dict[str, object] = {}
    failed: dict[str, str] = {}
    for check, answer in asked:
        # All checks began at once: while one is waited for, the time of the others runs as well.
        left = max(0.0, began + check.within - time.monotonic())
        try:
            facts[check.name] = asdict(answer.result(left))
        except TimeoutError:
            failed[check.name] = (
                f"no answer within {check.within:g} s: a file system, a look-up or a driver hangs"
            )
        except Exception as error:  # one check that fails must not hide what the others see
            failed[check.name] = f"{type(error).__name__}: {error}"
    return CollectedFacts(version=__version__, facts=facts, failed=failed)


def examine(
    session: CheckSession, own: Responder, timeout: float, *, with_collective: bool
) -> Report:
    """Ask everything, and judge it.

    Args:
        session: with all ranks that came.
        own: what rank 0 does itself.
        timeout: the seconds that the ranks had to come, for the message.
        with_collective: measure, too, which uses GPUs.
    """
    checks = WITH_SPARES if own.context.spare_nodes else CHECKS
    report = look(session, own.context.environment, timeout, checks)
    offsets = bandwidth.survey_clocks(session)
    report.add(
        bandwidth.CLOCK, bandwidth.evaluate_clocks(offsets), bandwidth.summary_of_clocks(offsets)
    )
    ways = reached(session, report)
    if with_collective:
        _measure(session, own, report, ways)
    # Last, as a rank may be lost during any of the questions.
    report.add(launch.NAME, lost(session))
    return report


def look(
    session: CheckSession, environment: Environment, timeout: float, checks: Sequence[Check[Any]]
) -> Report:
    """Have all ranks look at themselves.

    Args:
        session: with all ranks that came.
        environment: of rank 0.
        timeout: the seconds that the ranks had to come, for the message.
        checks: what they look for.
    """
    report = Report(dict(sorted(session.here.items())))
    report.add(launch.NAME, missing(session, environment, timeout))
    question = CollectFacts(tuple(check.name for check in checks))
    within = max(check.within for check in checks) + _FACTS_WITHIN
    report.take(session.broadcast(question, within, CollectedFacts))
    report.evaluate(checks)
    return report


def reached(session: CheckSession, report: Report) -> connectivity.ConnectivityMatrix:
    """Have the nodes whose interface is fit try to reach each other.

    Args:
        session: with all ranks.
        report: with what the check of interfaces collected; takes in the findings.
    """
    # Where the interface is wrong, that is a finding already: its ways would only repeat it.
    fit = [one for one in report.seen(interface.CHECK) if one.facts.name]
    ways = connectivity.survey(
        session, {one.rank: (one.facts.name, one.facts.address) for one in fit}
    )
    report.add(connectivity.NAME, connectivity.evaluate(ways), connectivity.summary(ways))
    return ways


def alone(context: CheckContext, *findings: Finding) -> Report:
    """Report what this rank sees by itself, where it did not come together with the others.

    Args:
        context: this rank.
        findings: on why it is alone.
    """
    # Without the run's token, because this hello goes into the report alone, and to no other rank.
    own = discovery.hello(context.environment, "")
    report = Report({own.rank: own})
    report.add(launch.NAME, findings)
    report.take({own.rank: collect_facts(context, [check.name for check in CHECKS])})
    report.evaluate(CHECKS)
    return report


def missing(session: CheckSession, environment: Environment, timeout: float) -> Iterator[Finding]:
    """Name the ranks that did not come, with who was refused meanwhile; and what is wrong with
    those that did.

    Args:
        session: with those that came.
        environment: of rank 0.
        timeout: the seconds that the ranks had to come, for the message.
    """
    # Of a rank that never came only Slurm tells the node.
    layout = environment.step.layout() if environment.step else {}
    unseen = sorted(set(range(environment.world_size)) - session.here.keys())
    for node, ranks in group_by_key((layout.get(rank, ""), rank) for rank in unseen).items():
        found = f"no word within {timeout:g} s"
        hint = "see its own lines, and whether srun started srunddp there"
        yield Finding(
            FAIL, found, "all ranks", hint, nodes=(node,) if node else (), ranks=tuple(ranks)
        )
    # If all have come, whoever was refused was no rank, but a port scanner or the like.
    if unseen:
        for line in session.refused:
            yield Finding(WARN, *split_message(line))
    for line in session.objections:
        yield Finding(
            FAIL, line, "each rank once", "start all ranks with one srun, and one srunddp per task"
        )


def lost(session: CheckSession) -> Iterator[Finding]:
    """Name the ranks that came, and then could not answer or were lost."""
    hint = "see what ended it there, or that node's load and file systems"
    for rank, why in sorted(session.errors.items()):
        where = (session.here[rank].node,)
        yield Finding(FAIL, f"during the check: {why}", "answers", hint, nodes=where, ranks=(rank,))


def _measure(
    session: CheckSession, own: Responder, report: Report, ways: connectivity.ConnectivityMatrix
) -> None:
    """Measure the rates between the nodes, and an all-reduce; not where something would stop the
    job anyway.
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
    facts = dict.fromkeys(report.here, allreduce.AllReduceFacts(wrong="no answer"))
    facts |= _all_reduce(session, own)
    link = slowest_link(report, facts[0].backend)
    nodes = {rank: hello.node for rank, hello in report.here.items()}
    report.add(
        allreduce.NAME, allreduce.evaluate(facts, nodes, link), allreduce.summary(facts, link)
    )


def _all_reduce(session: CheckSession, own: Responder) -> dict[int, allreduce.AllReduceFacts]:
    interface = own.context.interface
    assert interface is not None
    with listen(interface.address, [0]) as store:
        own.store_fd = store.fileno()
        address = Address(*store.getsockname()[:2])
        ranks = sorted(session.here)
        infos = infos_of([session.here[rank] for rank in ranks], address, "")
        questions = {
            rank: AllReduce(info, _COLLECTIVE_WITHIN)
            for rank, info in zip(ranks, infos, strict=True)
        }
        # A rank ends its own attempt after `_COLLECTIVE_WITHIN`, and its answer then says so. It
        # must still find rank 0 waiting.
        within = _COLLECTIVE_WITHIN + 10.0
        return session.ask(questions, within, allreduce.AllReduceFacts)


def slowest_link(report: Report, backend: str) -> float:
    """Find how many bytes per second the slowest node's network can carry.

    With NCCL it is that of its InfiniBand and RoCE devices, of as many as the node has ranks; else
    its interface's.

    Args:
        report: with what the check of interfaces collected.
        backend: ``nccl`` or ``gloo``.

    Returns:
        0 where that of some node is not known, and on one node.
    """
    ranks = Counter(hello.node for hello in report.here.values())
    if len(ranks) <= 1:
        return 0.0
    speeds = [_carried(one.facts, ranks[one.node], backend) for one in report.seen(interface.CHECK)]
    # Speeds are in Mbit/s, as the kernel tells them.
    return min(speeds, default=0.0) * 1e6 / 8


def _carried(facts: interface.InterfaceFacts, ranks: int, backend: str) -> float:
    if backend == "nccl" and facts.devices:
        return facts.rdma_rate / len(facts.devices) * min(len(facts.devices), ranks)
    return facts.speed if facts.physical else 0
