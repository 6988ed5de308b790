"""Defines one entry of ifaces.conf, and finds the entry that applies to a node."""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property

from srunddp.errors import ConfigError, Scope, UsageError
from srunddp.util.hostlist import expand, shortened
from srunddp.util.quick_dataclass import dataclass

AUTO = "auto"
NEAREST = "nearest"
# Variables that srunddp sets for every rank: torch's, torchrun's, and the interface for Gloo, NCCL
# and TensorPipe. An entry's env must not set them.
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
_TORCHRUNS = (
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_ELASTIC = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
OURS = (*_RANKS, *_TORCHRUNS, *_ELASTIC, *_INTERFACES)


@dataclass(frozen=True)
class IfacesEntry:
    """One entry of ifaces.conf.

    Attributes:
        nodes: a Slurm host list; ``*`` and ``?`` are allowed.
        interfaces: names or shell patterns, which the local ranks use in turn; or only ``auto``, or
            only ``nearest``; empty if the entry has networks.
        networks: networks such as ``10.20.0.0/16``, which the local ranks use in turn; empty if the
            entry has interfaces.
        address: the name by which other nodes reach the node, with ``{node}`` for the node's name;
            empty if it is the node's name.
        env: further variables for the ranks of these nodes.
        ports: the ports that a firewall leaves open, inclusive; None for any.
        metrics: the folder for the metrics of runs, absolute; empty for none.
        where: file, line and column of the entry, for messages; a sentence for ``DEFAULT``.
    """

    nodes: str
    interfaces: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    address: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    ports: range | None = None
    metrics: str = ""
    where: str = "the default, as no ifaces.conf has entries"

    @property
    def exact(self) -> bool:
        """Whether all :attr:`interfaces` are plain names, so that the choice does not depend on
        which interfaces the node has.
        """
        named = not self.networks and self.interfaces[0] not in (AUTO, NEAREST)
        return named and not any(is_pattern(name) for name in self.interfaces)

    @property
    def rule(self) -> str:
        """The part of the entry that decides the interface, for messages."""
        if self.networks:
            return f"network {' '.join(self.networks)}"
        return f"interface {' '.join(self.interfaces)}"

    @property
    def file(self) -> str:
        """The path of the file that has the entry: :attr:`where` without line and column."""
        # `where` is a position such as `/etc/srunddp/ifaces.conf:12:3`.
        return self.where.rsplit(":", 2)[0]

    @cached_property
    def items(self) -> dict[str, None]:
        """The names and patterns (with ``*`` or ``?``) in the host list ``nodes``, in its order."""
        return dict.fromkeys(expand(self.nodes, where=self.where))

    @cached_property
    def patterns(self) -> list[str]:
        """Those of :attr:`items` that are patterns."""
        return [item for item in self.items if "*" in item or "?" in item]

    def matches(self, node: str) -> bool:
        """Whether the entry covers a node, by its whole name or the part before the first dot.

        ``node`` may be a pattern itself, such as ``gpu*``; the entry must then cover every node
        that fits this pattern.
        """
        return any(
            name in self.items or any(_fits(name, each) for each in self.patterns)
            for name in _names_of(node)
        )


Entries = tuple[IfacesEntry, ...]


class EntryIndex:
    """Finds the entry that applies to a node: the first added entry whose
    :meth:`IfacesEntry.matches` is true. For many nodes this is faster than asking each entry.
    """

    def __init__(self) -> None:
        self._entries: list[IfacesEntry] = []
        # By name or pattern, the number of the first entry that has it.
        self._names: dict[str, int] = {}
        self._patterns: dict[str, int] = {}

    def add(self, entry: IfacesEntry) -> None:
        """Add an entry after the others."""
        number = len(self._entries)
        self._entries.append(entry)
        for item in entry.items:
            self._names.setdefault(item, number)
        for pattern in entry.patterns:
            self._patterns.setdefault(pattern, number)

    def first(self, node: str) -> IfacesEntry | None:
        """Return the first entry that matches a node, or a pattern of nodes; None if none does."""
        names = _names_of(node)
        numbers = [self._names[name] for name in names if name in self._names]
        for pattern, number in self._patterns.items():
            if any(_fits(name, pattern) for name in names):
                numbers.append(number)
        return self._entries[min(numbers)] if numbers else None


def _names_of(node: str) -> set[str]:
    """Return the names by which an entry may name a node: its whole name, and the part before the
    first dot.
    """
    return {node, node.split(".")[0]}


def _fits(name: str, pattern: str) -> bool:
    """Whether an entry's pattern covers a name, or all names of another pattern."""
    # A ? of the entry stands for exactly one letter. So it must not match a * in ``name``, which
    # may stand for none or several.
    return fnmatch.fnmatchcase(name, pattern.replace("?", "[!*]"))


def is_pattern(name: str) -> bool:
    """Whether an interface is given by a shell pattern."""
    return any(letter in name for letter in "*?[")


DEFAULT = IfacesEntry(nodes="*", interfaces=(AUTO,))


def entry_for(
    entries: Entries, node: str, *, or_default: bool = False, interfaces: str = ""
) -> IfacesEntry:
    """Return the first entry that matches a node.

    Args:
        entries: the entries of ifaces.conf.
        node: the node's name.
        or_default: return ``DEFAULT`` if no entry matches.
        interfaces: the node's interfaces as text, for the error message.

    Raises:
        ConfigError: no entry matches.
    """
    for entry in (*entries, DEFAULT) if or_default else entries:
        if entry.matches(node):
            return entry
    found = f"no entry matches node {node}" + (f", which has {interfaces}" if interfaces else "")
    raise ConfigError(
        found,
        expected="an entry for every node",
        hint=(
            f"add `- nodes: {node}` with the name of its `interface:`, or a last entry `- nodes:"
            ' "*"` for all others'
        ),
        where=entries[0].file,
        scope=Scope.NODE,
    )


def later_entries(entries: Entries, chosen: IfacesEntry | None, node: str) -> list[str]:
    """Return a line for the user about each further entry that matches a node but does not apply.

    This expands every host list of the file, so the start of a run does not call it.

    Args:
        entries: the entries of ifaces.conf.
        chosen: the entry that applies; None if none does.
        node: the node's name.
    """
    return [
        f"{each.where}: matches too, but the first entry counts"
        for each in entries
        if each is not chosen and each.matches(node)
    ]


def port_range(text: str, *, where: str) -> range:
    """Read a range of ports, such as ``40000-40100``.

    Args:
        text: first and last port, joined by a hyphen.
        where: where the text was found, for messages: ``--port``, or a position in a file.

    Raises:
        ConfigError: the text has another form, or the ports are not within 1024 to 65535; it is a
            UsageError if the text was found in ``--port``.
    """
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text.strip())
    low = 0
    high = 0
    if match:
        low = int(match[1])
        high = int(match[2])
    # At least two ports: rank 0 listens on one for the rendezvous and on another for the store.
    if not 1024 <= low < high <= 65535:
        one = int(text) if re.fullmatch("[0-9]{1,5}", text) else 0
        if 1024 <= one < 65535:
            hint = f"write {one}-{one + 1}"
        else:
            hint = "write a range like 40000-40100"
        kind = UsageError if where == "--port" else ConfigError
        raise kind(
            f"ports {shortened(text)!r}",
            expected="two ports or more, from 1024 to 65535",
            hint=hint,
            where=where,
            scope=Scope.NODE,
        )
    return range(low, high + 1)
