"""The site's file: which network interface each node uses. Found, parsed and checked, with file,
line and column.

The file is YAML, a list of entries; the first whose ``nodes`` match a node counts for it.
"""

import fnmatch
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from srunddp.errors import ConfigError, Scope, UsageError, file_errors
from srunddp.util.hostlist import expand
from srunddp.util.yaml_source import compose

VARIABLE = "SRUNDDP_IFACES"
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
    """The first entry that matches the node; if none does, ``DEFAULT`` where that may be, else a
    ConfigError.

    ``interfaces``: those of the node, for the error.
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


@dataclass(frozen=True)
class IfacesConfig:
    """The entries, and why they count.

    Attributes:
        path: the file that they are from; empty for the default.
        source: who named it; passed_over: the other files, and why.
    """

    entries: Entries = (DEFAULT,)
    path: str = ""
    source: str = "no file has entries: interface auto on every node"
    passed_over: tuple[str, ...] = ()


def load(named: str | None, variables: Mapping[str, str], option: str = "--ifaces") -> IfacesConfig:
    """The entries of the first file that has any: ``named`` by ``option``, ``$SRUNDDP_IFACES``, or
    a default one.

    Raises:
        ConfigError: a file that was asked for is not there, or a file is wrong, or somebody else's
            in a default place.
    """
    asked = {
        Path(path): origin
        for path, origin in ((variables.get(VARIABLE), VARIABLE), (named, option))
        if path
    }
    files = list(dict.fromkeys([*reversed(asked), *default_files()]))
    passed_over = []
    for number, path in enumerate(files):
        # os.path says False where Path raises: for a name that is too long, below a folder that is
        # closed.
        if path not in asked and not os.path.lexists(path):
            passed_over.append(f"{path}: not there")
        elif entries := parse(_read(path, asked.get(path, "")), str(path)):
            passed_over += [f"{other}: {path} comes first" for other in files[number + 1 :]]
            source = asked.get(path, "the first that has entries")
            return IfacesConfig(entries, str(path), source, tuple(passed_over))
        else:
            passed_over.append(f"{path}: has no entries")
    return IfacesConfig(passed_over=tuple(passed_over))


def default_files() -> list[Path]:
    """The files that are looked at after ``--ifaces`` and ``$SRUNDDP_IFACES``: the checkout's or
    prefix's, /etc's.
    """
    above = Path(__file__).resolve().parents[3:]  # the checkout, or site-packages
    if os.path.isfile(above[0] / "setup.py"):
        own = [above[0] / "etc"]
    else:
        # PREFIX/lib/python3.11/site-packages; another prefix than Python's after pip install --user
        # or --prefix.
        prefixes = dict.fromkeys((above[min(3, len(above) - 1)], Path(sys.prefix)))
        own = [prefix / "etc" / "srunddp" for prefix in prefixes]
    return [folder / "ifaces.conf" for folder in (*own, Path("/etc/srunddp"))]


def _read(path: Path, origin: str) -> bytes:
    if not os.path.isfile(path):
        if os.path.islink(path):
            missing = "a link that leads nowhere"
        else:
            missing = "not there"
        found = f"{path} is {'not a file' if os.path.exists(path) else missing}"
        hint = f"correct {origin}" if origin else "remove it"
        raise ConfigError(
            found,
            expected="a file of interface entries",
            hint=hint,
            where=origin or str(path),
            scope=Scope.NODE,
        )
    found = f"{path}: cannot be read"
    hint = "correct its permissions"
    with file_errors(found, expected="a readable file", hint=hint, scope=Scope.NODE):
        if not origin:
            _check_owner(path)
        return path.read_bytes()


def _check_owner(path: Path) -> None:
    """Refuse a file that nobody named and somebody else may have written: its ``env`` reaches every
    rank.

    Raises:
        ConfigError: its owner, or its folder's, is neither root, the user nor the owner of srunddp;
            all may write.
        OSError: it cannot be looked at.
    """
    # In a user namespace root appears as another number, the one that the root folder has.
    trusted = {os.geteuid(), *(os.stat(place).st_uid for place in ("/", __file__))}
    for place in (path.resolve(), path.resolve().parent):
        status = place.stat()
        if status.st_uid in trusted and not status.st_mode & stat.S_IWOTH:
            continue
        if status.st_uid in trusted:
            others = "may be changed by every user"
        else:
            others = f"belongs to user id {status.st_uid}"
        raise ConfigError(
            f"{path}: {place} {others}",
            expected="root's, yours, or of the owner of srunddp",
            hint="correct its owner and mode, or name the file with --ifaces",
            scope=Scope.NODE,
        )


def parse(text: bytes, path: str) -> Entries:
    """Parse the text of an ifaces.conf.

    Raises:
        ConfigError: with file, line and column, what was found, what was expected and the hint, for
            all that is wrong.
    """
    root = compose(
        text,
        path,
        expected="YAML",
        hint="see the example in the shipped etc/ifaces.conf",
        scope=Scope.NODE,
    )
    if root is None or root.value == "":
        return ()
    from srunddp.bootstrap.network.ifaces_reader import Reader  # which most ranks do not need

    return Reader(path).entries(root)


def port_range(text: str, *, where: str) -> range:
    """Read ``40000-40100``; a ConfigError where the text is not of that form, or not within 1024 to
    65535.
    """
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text.strip())
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
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
