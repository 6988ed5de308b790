"""What a check before a job finds, and the form that every check has: it collects on each rank and
judges on rank 0.
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

ROWS = 20  # a screenful
TOO_LONG = "it took more than"
F = TypeVar("F")
T = TypeVar("T")


class Severity(IntEnum):
    """How bad it is; the worst is the lowest."""

    FAIL = 0  # it would stop the job
    WARN = 1


FAIL = Severity.FAIL
WARN = Severity.WARN


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, with its hint. Equal ones of several ranks or nodes are shown as
    one.

    Attributes:
        found, expected, hint: without the node's name, in the words of an error.
        check: that found it; the report fills it in.
        nodes: where.
        ranks: which, where it is not all of these nodes.
        between: ``node01 -> node02``, where it is about a way between two nodes.
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
        """Name the nodes that it is about, of a way between two nodes both."""
        ends = self.between.split(" -> ") if self.between else self.nodes
        return [end.partition(":")[0] for end in ends]


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """The rank that a check looks at from within it.

    Attributes:
        variables: the process's environment.
        loaded: ifaces.conf.
        interface: None where it is wrong; then ``interface_error`` is what was found, what was
            expected and the hint.
        script: the training script, None where none was given.
        paths: of ``--path``.
        packages: of ``--package``.
        spare_nodes: of ``--spare-nodes``; 0 for none.
        staged: the copies that this node has of what it does not see; None without ``--staged``.
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
    staged: StagedPaths | None = None


def context_of(
    environment: Environment,
    named: str | None,
    variables: Mapping[str, str],
    option: str = "--ifaces",
) -> CheckContext:
    """Describe this rank, with the interface that it would use in a run.

    Args:
        environment: of the rank.
        named: the file of interfaces that ``option`` names; None where it is not given.
        variables: of the process.
        option: for the message.
    """
    context = CheckContext(environment=environment, variables=dict(variables))
    try:
        context = replace(context, loaded=load(named, variables, option))
        chosen = select_interface(context.loaded.entries, environment, variables, list_interfaces())
    except SrunddpError as error:
        # A wrong ifaces.conf does not end the check: it is a finding, beside all else that the rank
        # can see.
        return replace(context, interface_error=(error.found, error.expected, error.hint))
    return replace(context, interface=chosen)


@dataclass(frozen=True, kw_only=True)
class Observation(Generic[F]):
    """What one check collected on one rank."""

    rank: int
    local_rank: int
    node: str
    facts: F

    def finding(
        self, level: Severity, found: str, expected: str, hint: str, *, rank: bool = False
    ) -> Finding:
        """Make a finding about its node; or about this rank alone.

        Args:
            level: how bad it is.
            found: what is wrong, as in an error.
            expected: what would be right.
            hint: what to do.
            rank: it is about the rank.
        """
        return Ranks([self]).finding(level, found, expected, hint, ranks=rank)


class Ranks(list[Observation[F]]):
    """What one check collected on several ranks, in their order."""

    def finding(
        self, level: Severity, found: str, expected: str, hint: str, *, ranks: bool = True
    ) -> Finding:
        """Make a finding about them; or about their nodes alone.

        Args:
            level: how bad it is.
            found: what is wrong, as in an error.
            expected: what would be right.
            hint: what to do.
            ranks: it is about the ranks.
        """
        nodes = tuple(dict.fromkeys(one.node for one in self))
        who = tuple(sorted(one.rank for one in self)) if ranks else ()
        return Finding(level, found, expected, hint, nodes=nodes, ranks=who)

    def where(self, fits: Callable[[Observation[F]], object]) -> Ranks[F]:
        """Choose those that fit."""
        return Ranks(filter(fits, self))

    def grouped(
        self, value: Callable[[Observation[F]], str] = lambda one: one.node
    ) -> dict[str, Ranks[F]]:
        """Group them by node, or by another value."""
        return {
            known: Ranks(who)
            for known, who in group_by_key((value(one), one) for one in self).items()
        }

    def minority(self, value: Callable[[Observation[F]], str]) -> tuple[str, dict[str, Ranks[F]]]:
        """Find the ranks that differ from most.

        Returns:
            What most ranks have, or of equally many the one of the lowest rank; and the others, by
            what they have.
        """
        ranks = self.grouped(value)
        # max() keeps the first of equals, and the groups are in the order of their lowest ranks.
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
        """Find those that have another value than most.

        Args:
            value: of a rank.
            level: how bad it is to differ.
            title: of the value, in what was found.
            hint: what to do.
            ranks: it is about the ranks, and not about their nodes.

        Returns:
            Those that have the usual value: further differences of the others follow from this one.
        """
        usual, others = self.minority(value)
        for known, who in others.items():
            expected = f"{usual or 'unknown'}, as on most ranks"
            yield who.finding(level, f"{title} {known or 'unknown'}", expected, hint, ranks=ranks)
        return self.where(lambda one: value(one) == usual)


@dataclass(frozen=True)
class Check(Generic[F]):
    """One check.

    Attributes:
        name: one word, for the table.
        facts: a dataclass of what is collected, of numbers, texts, and lists and dicts of those: it
            travels as JSON.
        collect: what this rank sees; quick, and before torch and CUDA are touched.
        evaluate: what is wrong, given what all ranks saw; of equal findings one for all of their
            nodes is enough.
        summary: one line for people on what was seen.
        within: seconds that collecting may take.
    """

    name: str
    facts: Callable[..., F]
    collect: Callable[[CheckContext], F]
    evaluate: Callable[[Ranks[F]], Iterable[Finding]]
    summary: Callable[[Ranks[F]], str]
    within: float = 15.0


def limited_to_rows(ways: Sequence[Finding]) -> list[Finding]:
    """Fold findings about ways between nodes, those beyond :data:`ROWS` into one."""
    rest = ways[ROWS:]
    # A row for a single one would take as much room as the one itself.
    if len(rest) < 2:
        return list(ways)
    found = f"… and {len(rest)} more ways"
    nodes = {node for each in rest for node in each.hosts}
    return [*ways[:ROWS], replace(rest[0], found=found, between="", nodes=tuple(sorted(nodes)))]


def split_message(message: str) -> tuple[str, str, str]:
    """Split the one line that an error is into what was found, what was expected, and the hint."""
    message, _, hint = message.partition(" -> ")
    found, _, expected = message.partition("; expected ")
    return found, expected, hint


def call_in_daemon_thread(look: Callable[[], T]) -> Future[T]:
    """Call what may never answer, as a look at a file server that is gone.

    A thread that hangs in it does not keep the process from its end.

    Args:
        look: what is called.

    Returns:
        Its answer or error, once it has one.
    """
    # Not by an executor: at its exit Python waits for the threads of an executor, if one hangs for
    # ever.
    answer: Future[T] = Future()

    def answering() -> None:
        try:
            answer.set_result(look())
        except BaseException as error:
            # Whatever is raised is the answer: without one the caller would wait for its whole
            # limit.
            answer.set_exception(error)

    threading.Thread(target=answering, daemon=True).start()
    return answer


def run_python(code: str, *words: str, within: float) -> tuple[str, str]:
    """Have another Python run some code, so that what it imports or breaks is not this process.

    Args:
        code: to run, with an empty standard input.
        words: its ``sys.argv[1:]``.
        within: seconds, after which it is killed.

    Returns:
        What it prints, empty where it was killed; and why it failed, by the last line of its
        errors, empty where it did not.
    """
    # -P: a file of the working folder, such as a random.py, is not imported in the place of a
    # module.
    command = [sys.executable, "-P", "-c", code, *words]
    try:
        done = subprocess.run(
            command, input="", capture_output=True, text=True, errors="replace", timeout=within
        )
    except subprocess.TimeoutExpired:
        return "", f"{TOO_LONG} {within:g} s"
    # The last line of a traceback is the error itself.
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return done.stdout, last if done.returncode else ""
