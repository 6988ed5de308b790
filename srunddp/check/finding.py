"""What a check before a job finds, and the form that every check has: it collects on each rank and judges on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

from srunddp.bootstrap.environment.detect import Environment
from srunddp.bootstrap.network.ifaces_conf import IfacesConfig, load
from srunddp.bootstrap.network.interface import SelectedInterface, list_interfaces, select_interface
from srunddp.errors import SrunddpError
from srunddp.stage.paths import StagedPaths

F = TypeVar("F")


class Severity(IntEnum):
    """How bad it is; the worst is the lowest."""

    FAIL = 0  # it would stop the job
    WARN = 1


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, with its hint. Equal ones of several ranks or nodes are shown as one.

    Attributes:
        check: that found it.
        found, expected, hint: without the node's name, in the words of an error.
        nodes: where; ranks: which, where it is not all of these nodes.
        between: ``node01 -> node02``, where it is about a way between two nodes.
    """

    level: Severity
    check: str
    found: str
    expected: str
    hint: str
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    between: str = ""


@dataclass(frozen=True)
class CheckContext:
    """The rank that a check looks at from within it.

    Attributes:
        interface: None where it is wrong; then ``interface_error`` is what was found, expected and is to be done.
        loaded: ifaces.conf.
        script: the training script, None where none was given; paths: of ``--path``; packages: of ``--package``.
        variables: the process's environment.
        staged: the copies that this node has of what it does not see; None without ``--staged``.
    """

    environment: Environment
    loaded: IfacesConfig
    interface: SelectedInterface | None
    interface_error: tuple[str, ...]
    script: str | None
    paths: tuple[str, ...]
    packages: tuple[str, ...]
    variables: Mapping[str, str]
    staged: StagedPaths | None = None


def subject_of(
    environment: Environment,
    named: str | None,
    variables: Mapping[str, str],
    script: str | None = None,
    paths: tuple[str, ...] = (),
    packages: tuple[str, ...] = (),
    staged: StagedPaths | None = None,
) -> CheckContext:
    """This rank, with the interface that it would use in a run.

    Args:
        named: the file given with ``--ifaces``; for the others see :class:`CheckContext`.
    """
    loaded, chosen = IfacesConfig(), None
    wrong: tuple[str, ...] = ()
    try:
        loaded = load(named, variables)
        chosen = select_interface(loaded.entries, environment, variables, list_interfaces())
    except SrunddpError as error:
        wrong = (error.found, error.expected, error.hint)
    return CheckContext(environment, loaded, chosen, wrong, script, paths, packages, dict(variables), staged)


@dataclass(frozen=True)
class Observation(Generic[F]):
    """What one check collected on one rank."""

    rank: int
    local_rank: int
    node: str
    facts: F


@dataclass(frozen=True)
class Check(Generic[F]):
    """One check.

    Attributes:
        name: one word, for the table.
        facts: a dataclass of what is collected, of numbers, texts, and lists and dicts of those: it travels as JSON.
        collect: what this rank sees; quick, and before torch and CUDA are touched.
        judge: what is wrong, given what all ranks saw; of equal findings one for all of their nodes is enough.
        summary: one line for people on what was seen.
        node_lines: one line for each node, of checks that have more to say of it.
        within: seconds that collecting may take.
    """

    name: str
    facts: Callable[..., F]
    collect: Callable[[CheckContext], F]
    judge: Callable[[Sequence[Observation[F]]], Iterable[Finding]]
    summary: Callable[[Sequence[Observation[F]]], str]
    node_lines: Callable[[Sequence[Observation[F]]], Sequence[str]] = lambda _: ()
    within: float = 15.0

    def collected(self, subject: CheckContext) -> dict[str, Any]:
        """The facts as they travel."""
        return asdict(self.collect(subject))  # type: ignore[call-overload, no-any-return]
