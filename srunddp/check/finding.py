"""Defines a finding of a check before a job, and the form of every check: it collects facts on each
rank, and rank 0 judges them.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import IntEnum
from typing import Generic, TypeVar

from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network.ifaces_conf import IfacesConfig, load
from srunddp.bootstrap.network.interface import SelectedInterface, list_interfaces, select_interface
from srunddp.errors import SrunddpError
from srunddp.stage.paths import StagedPaths
from srunddp.util.hostlist import group_by_key

ROWS = 20  # rows of one kind in a report: a screenful
TOO_LONG = "it took more than"
F = TypeVar("F")
T = TypeVar("T")


class Severity(IntEnum):
    """How bad a finding is. A lower number is worse, so sorting puts failures first."""

    FAIL = 0  # the job would stop
    WARN = 1


FAIL = Severity.FAIL
WARN = Severity.WARN


@dataclass(frozen=True)
class Finding:
    """A problem, with a hint how to correct it. The report shows equal findings of several ranks or
    nodes as one row.

    Attributes:
        found, expected, hint: As in an error of srunddp, but without the node's name.
        check: The name of the check that found it; the report fills it in.
        nodes: The nodes that the finding is about.
        ranks: The ranks that the finding is about; empty for all ranks of ``nodes``.
        between: ``node01 -> node02`` if the finding is about a way between two nodes; else empty.
    """

    level: Severity
    found: str
    expected: str
    hint: str
    _: KW_ONLY
    check: str = ""
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    between: str = ""

    @property
    def hosts(self) -> list[str]:
        """The nodes that the finding is about; both ends if it is about a way between two nodes."""
        ends = self.between.split(" -> ") if self.between else self.nodes
        return [end.partition(":")[0] for end in ends]


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """What the checks know about the rank on which they run.

    Attributes:
        environment: The rank's number and place, and how it finds rank 0.
        variables: The environment variables of the process.
        loaded: The entries of ifaces.conf.
        interface: The rank's interface; None if none could be selected.
        interface_error: Why no interface could be selected: what was found, what was expected, and
            the hint; empty if one was.
        script: Path of the training script; None if none was given.
        paths: The paths given with ``--path``.
        packages: The names given with ``--package``.
        spare_nodes: The number given with ``--spare-nodes``; 0 for none.
        min_nodes: The number given with ``--min-nodes``; 0 for none.
        staged: This node's copies of paths that it does not see; None without ``--staged``.
    """

    environment: Environment
    variables: Mapping[str, str] = field(default_factory=dict)
    loaded: IfacesConfig = field(default_factory=IfacesConfig)
    interface: SelectedInterface | None = None
    interface_error: tuple[str, ...] = ()
    script: str | None = None
    paths: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    spare_nodes: int = 0
    min_nodes: int = 0
    staged: StagedPaths | None = None


def context_of(
    environment: Environment,
    named: str | None,
    variables: Mapping[str, str],
    option: str = "--ifaces",
) -> CheckContext:
    """Describe this rank, with the interface that it would use in a run.

    Args:
        environment: Where this rank is in the world.
        named: The interfaces file given with ``option``; None if the option is not given.
        variables: The environment variables of the process.
        option: The option's name, for an error's message.
    """
    context = CheckContext(environment=environment, variables=dict(variables))
    try:
        context = replace(context, loaded=load(named, variables, option))
        chosen = select_interface(context.loaded.entries, environment, variables, list_interfaces())
    except SrunddpError as error:
        # A wrong ifaces.conf does not end the check, but is one of its findings.
        return replace(context, interface_error=(error.found, error.expected, error.hint))
    return replace(context, interface=chosen)


@dataclass(frozen=True, kw_only=True)
class Observation(Generic[F]):
    """The facts that one check collected on one rank."""

    rank: int
    local_rank: int
    node: str
    facts: F

    def finding(
        self, level: Severity, found: str, expected: str, hint: str, *, rank: bool = False
    ) -> Finding:
        """Make a finding about this rank's node, or about this rank alone.

        Args:
            level: How bad it is.
            found: What is wrong, as in an error.
            expected: What would be right.
            hint: What to do.
            rank: Name this rank; without it the finding is about the whole node.
        """
        return Ranks([self]).finding(level, found, expected, hint, ranks=rank)


class Ranks(list[Observation[F]]):
    """The facts that one check collected on several ranks, in the order of the ranks."""

    def finding(
        self, level: Severity, found: str, expected: str, hint: str, *, ranks: bool = True
    ) -> Finding:
        """Make one finding about these ranks, or about their nodes alone.

        Args:
            level: How bad it is.
            found: What is wrong, as in an error.
            expected: What would be right.
            hint: What to do.
            ranks: Name these ranks; without it the finding is about their whole nodes.
        """
        nodes = tuple(dict.fromkeys(one.node for one in self))
        who = tuple(sorted(one.rank for one in self)) if ranks else ()
        return Finding(level, found, expected, hint, nodes=nodes, ranks=who)

    def where(self, fits: Callable[[Observation[F]], object]) -> Ranks[F]:
        """Return the ranks for which ``fits`` is true."""
        return Ranks(filter(fits, self))

    def grouped(
        self, value: Callable[[Observation[F]], str] = lambda one: one.node
    ) -> dict[str, Ranks[F]]:
        """Group the ranks by node, or by what ``value`` returns for each."""
        return {
            known: Ranks(who)
            for known, who in group_by_key((value(one), one) for one in self).items()
        }

    def minority(self, value: Callable[[Observation[F]], str]) -> tuple[str, dict[str, Ranks[F]]]:
        """Find the ranks that differ from most.

        Returns:
            The most frequent value; if several are equally frequent, the one of the lowest rank.
            And the ranks with another value, by their values.
        """
        ranks = self.grouped(value)
        # max() keeps the first of several equals, and the groups are in the order of their lowest
        # ranks.
        usual = max(ranks, key=lambda known: len(ranks[known]), default="")
        ranks.pop(usual, None)
        return usual, ranks

    def differing(
        self,
        value: Callable[[Observation[F]], str],
        level: Severity,
        title: str,
        hint: str,
        *,
        ranks: bool = True,
    ) -> Generator[Finding, None, Ranks[F]]:
        """Yield a finding for each group of ranks whose value differs from that of most ranks.

        Args:
            value: Returns the value of a rank.
            level: How bad it is to differ.
            title: What the value is, as the finding names it.
            hint: What to do.
            ranks: Name the ranks; without it the findings are about their whole nodes.

        Returns:
            The ranks with the usual value. Compare only these further, because other differences of
            the differing ranks follow from the one already found.
        """
        usual, others = self.minority(value)
        for known, who in others.items():
            expected = f"{usual or 'unknown'}, as on most ranks"
            yield who.finding(level, f"{title} {known or 'unknown'}", expected, hint, ranks=ranks)
        return self.where(lambda one: value(one) == usual)


@dataclass(frozen=True)
class Check(Generic[F]):
    """One check: its name, and the functions that collect, judge and sum up its facts.

    Attributes:
        name: One word, for the table.
        facts: The dataclass of the facts. Its fields are numbers, texts, and lists and dicts of
            these, because facts are sent as JSON.
        collect: Returns the facts of this rank, without touching torch or CUDA in this process.
        evaluate: Returns the findings, given the facts of all ranks. The report merges equal
            findings of several nodes.
        summary: Returns one line that sums up the facts.
        within: Seconds that ``collect`` may take.
    """

    name: str
    facts: Callable[..., F]
    collect: Callable[[CheckContext], F]
    evaluate: Callable[[Ranks[F]], Iterable[Finding]]
    summary: Callable[[Ranks[F]], str]
    within: float = 15.0


def limited_to_rows(ways: Sequence[Finding]) -> list[Finding]:
    """Return the first :data:`ROWS` findings about ways between nodes, with all further ones folded
    into one.
    """
    rest = ways[ROWS:]
    # Do not fold a single finding, because the row in its place would take as much room.
    if len(rest) < 2:
        return list(ways)
    found = f"… and {len(rest)} more ways"
    nodes = {node for each in rest for node in each.hosts}
    return [*ways[:ROWS], replace(rest[0], found=found, between="", nodes=tuple(sorted(nodes)))]


def split_message(message: str) -> tuple[str, str, str]:
    """Split an error's line into what was found, what was expected and the hint. A part that the
    line lacks is empty.
    """
    message, _, hint = message.partition(" -> ")
    found, _, expected = message.partition("; expected ")
    return found, expected, hint


def call_in_daemon_thread(look: Callable[[], T]) -> Future[T]:
    """Call a function that may never return, such as a look at a file server that is gone.

    A thread that hangs does not keep the process from ending.

    Args:
        look: The function to call.

    Returns:
        A future with the function's result or error, once there is one.
    """
    # Do not use an executor: when Python exits it waits for an executor's threads, even if one
    # hangs forever.
    answer: Future[T] = Future()

    def answering() -> None:
        try:
            answer.set_result(look())
        except BaseException as error:
            # Pass on every kind of error. Without an answer the caller would wait for its whole
            # time limit.
            answer.set_exception(error)

    threading.Thread(target=answering, daemon=True).start()
    return answer


def run_python(code: str, *words: str, within: float) -> tuple[str, str]:
    """Run code in another Python process, so that a crash in its imports does not end this one.

    Args:
        code: The code; its standard input is empty.
        words: The code's ``sys.argv[1:]``.
        within: Seconds until the process is killed.

    Returns:
        What the process printed, empty if it was killed; and why it failed, empty if it did not.
        The reason is the last line of its standard error, its exit code, or that it took too long.
    """
    # -P keeps the working directory out of sys.path. Otherwise a file there, such as random.py,
    # would be imported instead of the module of that name.
    command = [sys.executable, "-P", "-c", code, *words]
    try:
        done = subprocess.run(
            command, input="", capture_output=True, text=True, errors="replace", timeout=within
        )
    except subprocess.TimeoutExpired:
        return "", f"{TOO_LONG} {within:g} s"
    # Keep only the last line, because it names the error if the output is a traceback.
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return done.stdout, last if done.returncode else ""
