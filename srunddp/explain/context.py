"""What an explanation starts from: the decisions of a run's steps, as far as they can be taken."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from srunddp.bootstrap.environment import slurm
from srunddp.bootstrap.environment.detect import Environment, detect, identify
from srunddp.bootstrap.environment.rank_zero_discovery import discovery_named
from srunddp.bootstrap.network import ifaces_conf, interface
from srunddp.bootstrap.network.ifaces_conf import AUTO, IfacesConfig, IfacesEntry
from srunddp.bootstrap.network.interface import GLOO, NCCL, NetworkInterface, SelectedInterface
from srunddp.bootstrap.rendezvous import auth
from srunddp.errors import ConfigError, one_line
from srunddp.stage.paths import StagedPaths, contradictions

UNKNOWN = "?"
LATER = "told when the ranks meet"
SEE_ERROR = "see the error"
_PTY = "SLURM_PTY_PORT"


@dataclass(frozen=True)
class Row:
    """One value.

    Attributes:
        name, value: as text; the value is ``?`` where nothing decides it yet.
        why: the variable, line or rule that decided it.
        passed_over: what else names this value, ``NAME=value: why not``.
    """

    name: str
    value: str
    why: str = ""
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExplainOptions:
    """What the command line says; None where it does not.

    Attributes:
        limits: seconds of each time limit, and whether that is the default.
        offline: whether ``--offline`` was given; staged: what this node has copies of.
    """

    backend: str | None = None
    ifaces: str | None = None
    channel: str | None = None
    ports: range | None = None
    limits: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    offline: bool = False
    staged: StagedPaths | None = None


@dataclass(frozen=True)
class NodeFacts:
    """What is seen on the node that is explained.

    Attributes:
        links: its interfaces; hostname: its own name for itself; proof: the kind of proof that it has.
    """

    links: tuple[NetworkInterface, ...]
    hostname: str
    proof: Callable[[], str]


@dataclass
class ExplainContext:
    """One rank, as far as it could be found out.

    Attributes:
        variables: its environment; here: None where this is not its node.
        environment: who it is; None where that could not be decided.
        config: ifaces.conf, entry: of it for this node; None where the file is wrong or no entry matches.
        interface: None where it could not be selected; on another node its address is ``?``.
        errors: that would end the run; notes: what is no error, but worth a line.
    """

    variables: Mapping[str, str]
    asked: ExplainOptions
    here: NodeFacts | None
    environment: Environment | None = None
    config: IfacesConfig | None = None
    entry: IfacesEntry | None = None
    interface: SelectedInterface | None = None
    errors: list[ConfigError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        """Whether this is a single process."""
        return self.environment is not None and self.environment.world_size == 1

    def shown(self, name: str) -> str:
        """A variable with its value."""
        return f"{name}={self.variables[name]}"

    def there(self, *names: str) -> list[str]:
        """Those of these variables that are set, with their values."""
        return [self.shown(name) for name in names if name in self.variables]


@dataclass(frozen=True)
class Explanation:
    """One rank's.

    Attributes:
        rank: as far as it is known; rows: all values; notes, errors: see :class:`ExplainContext`.
    """

    rank: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    errors: tuple[ConfigError, ...]

    @property
    def exit_code(self) -> int:
        """That of the first error, 0 without one."""
        return self.errors[0].exit_code if self.errors else 0

    @property
    def text(self) -> str:
        """For people: a line for each value and for each thing that was passed over, each with the rank."""
        lines = []
        for row in self.rows:
            lines.append(f"{row.name:<20} {row.value:<18} {row.why}".rstrip())
            lines += [f"{'':<20} passed over: {over}" for over in row.passed_over]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"error: {error} (exit code {error.exit_code})" for error in self.errors]
        return "".join(f"[rank {self.rank}] {one_line(line)}\n" for line in lines)


def this_node() -> NodeFacts:
    """What is seen on this node."""
    return NodeFacts(interface.list_interfaces(), socket.gethostname(), lambda: auth.choose_authenticator().kind)


def context_of(variables: Mapping[str, str], asked: ExplainOptions, here: NodeFacts | None) -> ExplainContext:
    """Find out as much of a rank as can be; for the arguments see :func:`srunddp.explain.explain.explain`."""
    case = ExplainContext(variables, asked, here)
    case.environment = _environment(case)
    try:
        case.config = ifaces_conf.load(asked.ifaces, variables)
    except ConfigError as error:
        case.errors.append(error)
    if case.config and case.environment:
        case.entry = _entry(case, case.config.entries, case.environment)
        case.interface = _interface(case, case.config.entries, case.environment)
    case.notes += contradictions(variables) if asked.offline else ()
    return case


def _environment(case: ExplainContext) -> Environment | None:
    """Who it is; where the run would be refused, as far as a launcher tells."""
    # Process 0 is nobody's: of another machine's process it is not known whether srun itself started it, and a
    # terminal would be this machine's.
    known, pid, asked = dict(case.variables), None, case.asked.channel
    if case.here is None:
        pid = 0
        if _PTY in known:
            case.notes.append(f"{_PTY}={known.pop(_PTY)}: taken for a step, not for a shell of srun --pty")
    found: Environment | None = None
    try:
        found = detect(known, channel=asked, pid=pid)
        case.notes += found.notes
    except ConfigError as error:
        case.errors.append(error)
        # With explicit variables it would be another world.
        if not discovery_named(asked).overrides_launcher:
            found = _unchecked(known, pid)
            # A channel that was asked for in vain leaves none.
            found = replace(found, discoveries=()) if found and asked else found
    if found and case.here is None:
        found = replace(found, node=case.variables.get(slurm.NODE_NAME, ""))
    return found


def _unchecked(known: Mapping[str, str], pid: int | None) -> Environment | None:
    try:
        return identify(known, pid=pid)
    except ConfigError:
        return None


def _entry(case: ExplainContext, entries: tuple[IfacesEntry, ...], environment: Environment) -> IfacesEntry | None:
    """This node's; where the node is not known, the first if it is for all."""
    if not environment.node and not case.alone:
        return entries[0] if entries[0].nodes == "*" else None
    try:
        return ifaces_conf.entry_for(entries, environment.node, alone=case.alone)
    except ConfigError as error:
        case.errors.append(error)
        return None


def _interface(
    case: ExplainContext, entries: tuple[IfacesEntry, ...], environment: Environment
) -> SelectedInterface | None:
    """The choice; where it is wrong, or the node another one, the name that would be taken if it were there."""
    if case.entry is None:
        return None
    if case.here:
        try:
            return interface.select_interface(entries, environment, case.variables, case.here.links)
        except ConfigError as error:
            case.errors.append(error)
    named = tuple(NetworkInterface(name, True, 0, (UNKNOWN,), ()) for name in _names(case.variables, case.entry))
    try:
        return interface.select_interface((case.entry,), environment, case.variables, named)
    except ConfigError:
        return None  # auto, which only the node itself can decide


def _names(variables: Mapping[str, str], entry: IfacesEntry) -> Iterator[str]:
    """The names of interfaces that an entry or the user gives."""
    given = [*entry.interfaces, *(name for each in (GLOO, NCCL) for name in variables.get(each, "").split(","))]
    return (name for name in dict.fromkeys(each.lstrip("=^") for each in given) if name and name != AUTO)
