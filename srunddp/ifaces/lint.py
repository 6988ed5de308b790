"""Finds mistakes in an ifaces.conf on a login node: in the file itself, and by comparing it with
Slurm's nodes.
"""

import fnmatch
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from srunddp.bootstrap.network.ifaces_conf import load
from srunddp.bootstrap.network.ifaces_entry import AUTO, NEAREST, EntryIndex, IfacesEntry
from srunddp.check.finding import FAIL, WARN, Finding
from srunddp.check.nccl_names import misspelt
from srunddp.errors import did_you_mean
from srunddp.util.hostlist import fold, shortened
from srunddp.util.infiniband import no_interface
from srunddp.util.slurm_command import output

NAME = "ifaces"
SINFO = ("sinfo", "--noheader", "--Node", "--format=%N")
_WITHIN = 10.0
_HCA = "NCCL_IB_HCA"
# Names that only an interface has. Names such as ibp65s0 are left out, because a device may have
# them too.
_INTERFACE = re.compile(r"(ib|eth|bond|hsn)\d+|en[op]\w+")


@dataclass(frozen=True)
class EntryNodes:
    """The nodes to which an entry applies.

    Attributes:
        where: File, line and column of the entry.
        rule: The part of the entry that decides the interface.
        nodes: The names of the nodes. If Slurm's nodes are not known, the names and patterns in the
            entry, without those that an earlier entry matches.
    """

    where: str
    rule: str
    nodes: tuple[str, ...]

    def __str__(self) -> str:
        if any("*" in node or "?" in node for node in self.nodes):
            return f"{self.where}: {self.rule}: {shortened(fold(self.nodes))}"
        count = len(self.nodes)
        noun = "node" if count == 1 else "nodes"
        names = f" ({shortened(fold(self.nodes))})" if count else ""
        return f"{self.where}: {self.rule}: {count} {noun}{names}"


@dataclass(frozen=True)
class LintReport:
    """The result of a check.

    Attributes:
        summary: One line for the user: how many entries the file has, and how many nodes Slurm has.
        findings: What is wrong, or likely a mistake.
        notes: Lines for the user about what may be intended.
        entries: The entries of the file, with their nodes.
    """

    summary: str
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    entries: Sequence[EntryNodes] = ()


def check_file(named: str | None, variables: Mapping[str, str]) -> LintReport:
    """Check the ifaces.conf in effect.

    Args:
        named: The file that the user names; None for the file that the environment or the cluster
            names.
        variables: The environment variables, which may name a file too.

    Raises:
        ConfigError: The file is missing, cannot be parsed, or may have been written by another
            user.
    """
    loaded = load(named, variables, "FILE")
    if not loaded.path:
        return LintReport("no ifaces.conf has entries: each node chooses by itself")
    cluster = slurm_nodes(variables)
    findings, notes = evaluate(loaded.entries, cluster, socket.gethostname())
    known = f"{len(cluster)} nodes in the cluster"
    if not cluster:
        known = "the node list of the cluster is not available (sinfo)"
        notes.insert(
            0, "nodes are not compared with the cluster's: sinfo is not there or lists none"
        )
    if named and loaded.path != named:
        notes.insert(0, f"{named} has no entries")
    count = len(loaded.entries)
    return LintReport(
        f"{count} {'entry' if count == 1 else 'entries'} in {loaded.path}, {known}",
        findings,
        notes,
        nodes_of(loaded.entries, cluster),
    )


def slurm_nodes(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Ask sinfo for the names of Slurm's nodes. The result is empty if sinfo is missing or lists no
    nodes.
    """
    # sinfo also takes options from variables. With SINFO_PARTITION it would leave out nodes, and
    # their names in the file would then count as misspelt.
    plain = {name: value for name, value in variables.items() if not name.startswith("SINFO_")}
    # sinfo lists a node once for each of its partitions.
    return tuple(dict.fromkeys(output(*SINFO, environ=plain, timeout=_WITHIN).split()))


def evaluate(
    entries: Sequence[IfacesEntry], cluster: Sequence[str], here: str
) -> tuple[list[Finding], list[str]]:
    """Find mistakes in the entries of a file.

    Args:
        entries: The entries, in the order of the file.
        cluster: Slurm's nodes; empty if they are not known.
        here: The name of this node, which may be a login node that is not in ``cluster``.

    Returns:
        The mistakes, and notes about what may be intended.
    """
    findings = [finding for one in entries for finding in _devices(one)]
    index = EntryIndex()
    for one in entries:
        # Only the first entry that matches a node applies to it.
        taken = {item: first for item in one.items if (first := index.first(item))}
        findings += _overlaps(one, taken)
        index.add(one)
    if cluster:
        findings += [*_unknown(entries, {*cluster, here}), *_without(entries, index, cluster)]
    return findings, [note for one in entries for note in _remarks(one)]


def nodes_of(entries: Sequence[IfacesEntry], cluster: Sequence[str]) -> list[EntryNodes]:
    """Return for each entry the nodes to which it applies.

    Args:
        entries: The entries, in the order of the file.
        cluster: Slurm's nodes; if they are not known, the names and patterns of the file take their
            place.
    """
    index = EntryIndex()
    theirs: dict[int, list[str]] = {}
    for one in entries:
        own = [item for item in one.items if not index.first(item)]
        theirs[id(one)] = [] if cluster else own
        index.add(one)
    for node in cluster:
        if first := index.first(node):
            theirs[id(first)].append(node)
    return [EntryNodes(one.where, one.rule, tuple(theirs[id(one)])) for one in entries]


def _overlaps(entry: IfacesEntry, taken: Mapping[str, IfacesEntry]) -> Iterator[Finding]:
    """Report an entry if earlier entries match all of its nodes, or match some of them by mistake.

    An earlier entry counts as an intended exception, and not as a mistake, if the entry to check
    matches all nodes of the earlier one: for example an entry for one node before the entry for its
    rack.

    Args:
        entry: The entry to check.
        taken: For each name or pattern of the entry that earlier entries match, the first of these
            entries.
    """
    whole = len(taken) == len(entry.items)
    if whole:
        mistaken = taken
    else:
        within = {
            id(first): all(entry.matches(item) for item in first.items)
            for first in {id(first): first for first in taken.values()}.values()
        }
        mistaken = {item: first for item, first in taken.items() if not within[id(first)]}
    if not mistaken:
        return
    lines = (f"line {first.where.rsplit(':', 2)[1]}" for first in mistaken.values())
    by = " and ".join(dict.fromkeys(lines))
    if whole:
        found = f"{entry.where}: the entry never applies: all of its nodes are taken by {by}"
        hint = f"remove it, or move it before {by}"
        yield Finding(WARN, found, "an entry that applies to a node", hint)
    else:
        found = f"{entry.where}: the entry does not apply to nodes that are taken by {by}"
        hint = f"remove them here or in {by}"
        yield Finding(WARN, found, "each node in one entry", hint, nodes=tuple(mistaken))


def _devices(entry: IfacesEntry) -> Iterator[Finding]:
    """Yield a finding for each name of an interface that looks like a device, and for each name of
    a device that looks like an interface. The findings are warnings, because any name is allowed,
    and only the node itself could tell what has this name.
    """
    for name in entry.interfaces:
        if hint := no_interface(name):
            found = f"{entry.where}: interface {name}, which looks like the name of a device"
            yield Finding(WARN, found, "a name as `ip link` shows it", hint)
    # If NCCL_IB_HCA names an interface, NCCL finds no device of this name, and goes on without
    # InfiniBand and without a message.
    for part in re.split("[,:=^]+", entry.env.get(_HCA, "")):
        if _INTERFACE.fullmatch(part):
            found = f"{entry.where}: env {_HCA}: {part}, which looks like the name of an interface"
            hint = f"write the device, such as mlx5_0, that `ibdev2netdev` shows for {part}"
            yield Finding(WARN, found, "a name in /sys/class/infiniband", hint)


def _unknown(entries: Sequence[IfacesEntry], nodes: set[str]) -> Iterator[Finding]:
    # An entry for node7 also matches node7.cluster.local.
    known = {*nodes, *(node.split(".")[0] for node in nodes)}
    hint = "correct it, or leave it if it is not one of Slurm's nodes"
    for one in entries:
        if missing := [
            item for item in one.items if item not in known and item not in one.patterns
        ]:
            found = f"{one.where}: names that are not nodes of the cluster"
            yield Finding(WARN, found, "nodes that sinfo lists", hint, nodes=tuple(missing))
        for pattern in one.patterns:
            if not fnmatch.filter(known, pattern):
                found = f"{one.where}: no node of the cluster fits {pattern!r}"
                yield Finding(WARN, found, "a pattern that fits nodes which sinfo lists", hint)


def _without(
    entries: Sequence[IfacesEntry], index: EntryIndex, cluster: Sequence[str]
) -> Iterator[Finding]:
    if left := tuple(node for node in cluster if not index.first(node)):
        found = f"{entries[0].file} has no entry"
        hint = 'add one for each, or a last entry `- nodes: "*"` with `interface: auto`'
        yield Finding(FAIL, found, "an entry for every node", hint, nodes=left)


def _remarks(entry: IfacesEntry) -> Iterator[str]:
    """Yield a note for each variable or keyword that seems misspelt, and one for an interface that
    only the node itself can choose. The choice by ``auto`` gets no note, because it is common.
    """
    for name in entry.env:
        if meant := misspelt(name):
            yield (
                f"{entry.where}: env {name} is not a variable that NCCL documents; did you mean"
                f" {meant}?"
            )
    for name in entry.interfaces:
        if name not in (AUTO, NEAREST) and (hint := did_you_mean(name, (AUTO, NEAREST))):
            yield f"{entry.where}: interface {name} is read as the name of an interface; {hint}"
    if not entry.exact and entry.interfaces != (AUTO,):
        yield (
            f"{entry.where}: {entry.rule}: each node finds its own; on the nodes `srunddp explain`"
            " shows which"
        )
