"""One entry of ifaces.conf as data, and which entry counts for a node."""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from srunddp.errors import ConfigError, Scope, UsageError
from srunddp.util.hostlist import expand

AUTO = "auto"
NEAREST = "nearest"
# What every rank is given anyway; torch's names, and the interface in Gloo's and NCCL's spelling.
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
_TORCHRUNS = (
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_ELASTIC = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
OURS = (*_RANKS, *_TORCHRUNS, *_ELASTIC, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class IfacesEntry:
    """One entry of ifaces.conf.

    Attributes:
        nodes: a Slurm host list; ``*`` and ``?`` are allowed.
        interfaces: names or shell patterns, to be used by local rank in turn; or ``auto`` or
            ``nearest`` alone.
        networks: such as ``10.20.0.0/16``, by local rank in turn, instead of interfaces.
        address: how other nodes reach the node, with ``{node}`` for its name; empty for its
            hostname.
        env: further variables for the ranks of these nodes.
        ports: the ports that a firewall leaves open, inclusive; None for any.
        where: file, line and column, for messages.
    """

    nodes: str
    interfaces: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    address: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    ports: range | None = None
    where: str = "the default, as no ifaces.conf has entries"

    @property
    def exact(self) -> bool:
        """Whether the interfaces are names, which say the same on every node."""
        named = not self.networks and self.interfaces[0] not in (AUTO, NEAREST)
        return named and not any(is_pattern(name) for name in self.interfaces)

    @property
    def rule(self) -> str:
        """What decides the interface, for people."""
        if self.networks:
            return f"network {' '.join(self.networks)}"
        return f"interface {' '.join(self.interfaces)}"

    @property
    def file(self) -> str:
        """Where the entry is, without line and column."""
        # A position reads `/etc/srunddp/ifaces.conf:12:3`.
        return self.where.rsplit(":", 2)[0]

    @cached_property
    def items(self) -> dict[str, None]:
        """The names in ``nodes``, and patterns with ``*`` or ``?``, in their order."""
        return dict.fromkeys(expand(self.nodes, where=self.where))

    @cached_property
    def patterns(self) -> list[str]:
        """Those of the items that are patterns."""
        return [item for item in self.items if "*" in item or "?" in item]

    def matches(self, node: str) -> bool:
        """Whether the entry is for this node, by its whole name or the part before the first dot.

        For a pattern: for all nodes that it fits. Its ``*`` may stand for nothing, or for more than
        a ``?`` here can.
        """
        names = {node, node.split(".")[0]}
        # The node may be a pattern itself, such as `gpu*`: a ? stands for one letter of a name, and
        # must not match that *.
        patterns = [pattern.replace("?", "[!*]") for pattern in self.patterns]
        return any(
            name in self.items or any(fnmatch.fnmatchcase(name, each) for each in patterns)
            for name in names
        )


Entries = tuple[IfacesEntry, ...]


def is_pattern(name: str) -> bool:
    """Whether an interface is given by a shell pattern."""
    return any(letter in name for letter in "*?[")


DEFAULT = IfacesEntry(nodes="*", interfaces=(AUTO,))


def entry_for(
    entries: Entries, node: str, *, or_default: bool = False, interfaces: str = ""
) -> IfacesEntry:
    """Return the first entry that matches a node.

    Args:
        entries: of ifaces.conf.
        node: its name.
        or_default: take ``DEFAULT`` where none matches.
        interfaces: those of the node, for the error.

    Raises:
        ConfigError: none matches.
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
    """Return the other entries that match a node, and why they do not count; for people.

    A start does without: it would have to expand every host list of the file.

    Args:
        entries: of ifaces.conf.
        chosen: the one that counts; None where none does.
        node: its name.
    """
    return [
        f"{each.where}: matches too, but the first entry counts"
        for each in entries
        if each is not chosen and each.matches(node)
    ]


def port_range(text: str, *, where: str) -> range:
    """Read ``40000-40100``.

    Args:
        text: of that form.
        where: it stands, for messages.

    Raises:
        ConfigError: the text has another form, or is not within 1024 to 65535; a UsageError where
            it was given by ``--port``.
    """
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text.strip())
    low = 0
    high = 0
    if match:
        low = int(match[1])
        high = int(match[2])
    # Two at least: rank 0 listens on one for the rendezvous and on one for the store.
    if not 1024 <= low < high <= 65535:
        one = int(text) if re.fullmatch("[0-9]{1,5}", text) else 0
        if 1024 <= one < 65535:
            hint = f"write {one}-{one + 1}"
        else:
            hint = "write a range like 40000-40100"
        kind = UsageError if where == "--port" else ConfigError
        raise kind(
            f"ports {text!r}",
            expected="two ports or more, from 1024 to 65535",
            hint=hint,
            where=where,
            scope=Scope.NODE,
        )
    return range(low, high + 1)
