"""What an explanation starts from, and the rows that it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from srunddp.bootstrap.environment.detect import Environment
from srunddp.bootstrap.network.ifaces_conf import Entry
from srunddp.bootstrap.network.interface import Interface, Link
from srunddp.stage.paths import Staged

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
class Asked:
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
    staged: Staged | None = None


@dataclass(frozen=True)
class Here:
    """What is seen on the node that is explained.

    Attributes:
        links: its interfaces; hostname: its own name for itself; proof: the kind of proof that it has.
    """

    links: tuple[Link, ...]
    hostname: str
    proof: Callable[[], str]


@dataclass(frozen=True)
class Case:
    """One rank, as far as it could be found out.

    Attributes:
        variables: its environment; here: None where this is not its node.
        environment: who it is; None where that could not be decided.
        offered: the channels that are there, whichever was asked for.
        entries: of ifaces.conf, entry: of them for this node; None where the file is wrong or no entry matches.
        interface: None where it could not be chosen; on another node its address is ``?``.
    """

    variables: Mapping[str, str]
    asked: Asked
    here: Here | None
    environment: Environment | None
    offered: tuple[str, ...]
    entries: tuple[Entry, ...] | None
    entry: Entry | None
    interface: Interface | None

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
