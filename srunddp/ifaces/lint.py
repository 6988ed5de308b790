"""What is wrong with an ifaces.conf, seen from a login node: against itself, Slurm's nodes and the names here."""

from __future__ import annotations

import fnmatch
import itertools
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from srunddp.bootstrap.network.ifaces_conf import IfacesConfig, IfacesEntry, load
from srunddp.bootstrap.network.interface import addresses_of, is_loopback
from srunddp.bootstrap.rendezvous.discovery import hostname_of
from srunddp.check.finding import Finding, Severity
from srunddp.util.hostlist import expand

NAME = "ifaces"
SINFO = ("sinfo", "--noheader", "--Node", "--format=%N")
_WITHIN = 10.0

Run = Callable[[Sequence[str], Mapping[str, str]], str]


@dataclass(frozen=True)
class Report:
    """What came of a check.

    Attributes:
        loaded: the entries that were checked, and their file.
        cluster: Slurm's nodes; empty where sinfo does not tell.
        findings: what is wrong; notes: lines on what may be meant so.
    """

    loaded: IfacesConfig
    cluster: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def summary(self) -> str:
        """One line for people."""
        if not self.loaded.path:
            return "no ifaces.conf has entries: each node chooses by itself"
        count = len(self.loaded.entries)
        entries = f"{count} {'entry' if count == 1 else 'entries'} in {self.loaded.path}"
        return f"{entries}, {len(self.cluster) or 'unknown'} nodes in the cluster"


def ask(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """What a command prints, within 10 s.

    Raises:
        OSError: it is not there. SubprocessError: it failed, or took longer.
    """
    return subprocess.run(
        command,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_WITHIN,
        check=True,
    ).stdout


def check_file(named: str | None, variables: Mapping[str, str], run: Run = ask) -> Report:
    """Check the file that would count.

    Args:
        named: as with ``--ifaces``.
        variables: the process's environment.
        run: asks a command.

    Raises:
        ConfigError: the file is not there, is wrong in itself, or is not to be trusted.
    """
    loaded = load(named, variables)
    if not loaded.path:
        return Report(loaded, (), (), ())
    cluster, unasked = nodes_of_cluster(variables, run)
    findings, notes = judge(loaded.entries, cluster, socket.gethostname())
    passed_over = [f"{named} has no entries"] if named and loaded.path != named else []
    notes = (*passed_over, *unasked, *notes)
    return Report(loaded, cluster, (*findings, *_unresolved(loaded.entries, cluster)), notes)


def nodes_of_cluster(variables: Mapping[str, str], run: Run = ask) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Slurm's nodes in the order of sinfo, and a line on why there are none."""
    # SINFO_PARTITION would leave nodes out.
    plain = {name: value for name, value in variables.items() if not name.startswith("SINFO_")}
    try:
        nodes = tuple(dict.fromkeys(run(SINFO, plain).split()))
    except FileNotFoundError:
        return (), ("sinfo is not there: the nodes of the cluster are not known",)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return (), (f"sinfo failed, and the nodes of the cluster are not known: {' '.join(str(said).split())}",)
    return nodes, () if nodes else ("sinfo names no nodes",)


@dataclass(frozen=True)
class _Named:
    """The nodes that an entry names, unfolded once: names in order, and patterns with ``*`` or ``?``."""

    entry: IfacesEntry
    names: dict[str, None]
    patterns: tuple[str, ...]

    @classmethod
    def by(cls, entry: IfacesEntry) -> _Named:
        items = expand(entry.nodes, where=entry.where)
        patterns = tuple(item for item in items if "*" in item or "?" in item)
        return cls(entry, dict.fromkeys(item for item in items if item not in patterns), patterns)

    @property
    def items(self) -> tuple[str, ...]:
        return (*self.names, *self.patterns)

    @property
    def line(self) -> str:
        return f"line {self.entry.where.rsplit(':', 2)[1]}"

    def covers(self, item: str) -> bool:
        """Whether all nodes that a name or pattern stands for match the entry."""
        if "*" in item or "?" in item:
            return any(_within(item, pattern) for pattern in self.patterns)
        names = {item, item.split(".")[0]}
        return any(
            name in self.names or any(fnmatch.fnmatchcase(name, each) for each in self.patterns) for name in names
        )


def _within(inner: str, outer: str) -> bool:
    """Whether all that fits a pattern fits another: each ``*`` is tried as nothing, and as more than ``?`` can take."""
    first, *others = inner.replace("?", "\0").split("*")
    fillings = itertools.product(("", "\0" * (len(outer) + 1)), repeat=len(others))
    texts = (first + "".join(map("".join, zip(filling, others, strict=True))) for filling in fillings)
    return len(others) < 9 and all(fnmatch.fnmatchcase(text, outer) for text in texts)


def judge(
    entries: Sequence[IfacesEntry], cluster: Sequence[str], here: str
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """What is wrong with entries, and what is to be noted of them.

    Args:
        entries: of one file.
        cluster: Slurm's nodes; empty where they are not known.
        here: this node, which need be none of them.
    """
    named = [_Named.by(entry) for entry in entries]
    findings, notes = [], []
    for position, one in enumerate(named):
        taken = {item: first for item in one.items if (first := _first(named[:position], item))}
        by = " and ".join(dict.fromkeys(first.line for first in taken.values()))
        if len(taken) == len(one.items):
            findings.append(_never(one, by))
        elif taken:
            notes.append(f"{one.entry.where}: for {_few(list(taken))} {by} counts, as it comes first")
        notes += _prefixes(one.entry)
    if cluster:
        findings += _unknown(named, set(cluster), here)
        findings += _without(named, cluster)
    return tuple(findings), tuple(notes)


def _first(named: Sequence[_Named], item: str) -> _Named | None:
    return next((one for one in named if one.covers(item)), None)


def _never(one: _Named, by: str) -> Finding:
    found = f"{one.entry.where}: the entry never counts: all of its nodes are taken by {by}"
    return Finding(Severity.WARN, NAME, found, "an entry that counts for a node", f"remove it, or move it before {by}")


def _unknown(named: Sequence[_Named], cluster: set[str], here: str) -> Iterator[Finding]:
    known = {*cluster, *(node.split(".")[0] for node in cluster), here, here.split(".")[0]}
    hint = "correct it, or let it be if it is not a node of Slurm's"
    for one in named:
        if missing := tuple(name for name in one.names if name not in known):
            found = f"{one.entry.where}: names that are not nodes of the cluster"
            yield Finding(Severity.WARN, NAME, found, "nodes that sinfo lists", hint, missing)
        for pattern in one.patterns:
            if not fnmatch.filter(known, pattern):
                found = f"{one.entry.where}: no node of the cluster fits {pattern!r}"
                yield Finding(Severity.WARN, NAME, found, "a pattern that fits nodes which sinfo lists", hint)


def _without(named: Sequence[_Named], cluster: Sequence[str]) -> Iterator[Finding]:
    if left := tuple(node for node in cluster if not _first(named, node)):
        path = named[0].entry.file
        hint = 'add one for each, or a last entry `- nodes: "*"` with `interface: auto`'
        yield Finding(Severity.FAIL, NAME, f"{path} has no entry", "an entry for every node", hint, left)


def _unresolved(entries: Sequence[IfacesEntry], cluster: Sequence[str]) -> Iterator[Finding]:
    """Of each entry with an address, whether that of its first node leads somewhere from here."""
    named = [_Named.by(entry) for entry in entries]
    for one in named:
        nodes = (node for node in (cluster or one.names) if _first(named, node) is one)
        if not one.entry.address or not (node := next(nodes, "")):
            continue
        name = hostname_of(one.entry, node)
        found = addresses_of(name)
        if found and not all(map(is_loopback, found)):
            continue
        where = f"to {', '.join(sorted(found))}, which is loopback" if found else "nowhere"
        yield Finding(
            Severity.WARN,
            NAME,
            f"{one.entry.where}: the address {name} leads {where} on this login node",
            "a name of that node on the data network",
            "correct the address, or see on a compute node whether it knows the name",
            (node,),
        )


def _prefixes(entry: IfacesEntry) -> Iterator[str]:
    """NCCL takes a device's name for a prefix: ``mlx5_1`` fits ``mlx5_10``; no number goes on after a 0."""
    setting = entry.env.get("NCCL_IB_HCA", "").removeprefix("^")
    names = [] if setting.startswith("=") else [name.partition(":")[0] for name in setting.split(",")]
    longer = [name for name in names if name[-1:] in set("123456789")]
    if longer:
        yield (
            f"{entry.where}: NCCL_IB_HCA={entry.env['NCCL_IB_HCA']} fits {longer[0]}0 as well, as NCCL takes names for "
            "prefixes; `=` before the first name makes them exact"
        )


def _few(items: Sequence[str]) -> str:
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")
