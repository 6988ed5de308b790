"""What an explanation starts from, and the rows that it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from srunddp.bootstrap.environment.detect import Environment
from srunddp.bootstrap.network.ifaces_conf import IfacesEntry
from srunddp.bootstrap.network.interface import NetworkInterface, SelectedInterface
from srunddp.stage.paths import StagedPaths

UNKNOWN = "?"
LATER = "told when the ranks meet"
ELSEWHERE = "not checked, as this is not that node"


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


@dataclass(frozen=True)
class ExplainContext:
    """One rank, as far as it could be found out.

    Attributes:
        variables: its environment; here: None where this is not its node.
        environment: who it is; None where that could not be decided.
        offered: the channels that are there, whichever was asked for.
        entries: of ifaces.conf, entry: of them for this node; None where the file is wrong or no entry matches.
        interface: None where it could not be chosen; on another node its address is ``?``.
    """

    variables: Mapping[str, str]
    asked: ExplainOptions
    here: NodeFacts | None
    environment: Environment | None
    offered: tuple[str, ...]
    entries: tuple[IfacesEntry, ...] | None
    entry: IfacesEntry | None
    interface: SelectedInterface | None

    @property
    def alone(self) -> bool:
        """Whether this is a world of one."""
        return self.environment is not None and self.environment.world_size == 1

    def shown(self, name: str) -> str:
        """A variable with its value."""
        return f"{name}={self.variables[name]}"

    def there(self, *names: str) -> list[str]:
        """Those of these variables that are set, with their values."""
        return [self.shown(name) for name in names if name in self.variables]
