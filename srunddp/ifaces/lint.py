"""What is wrong with an ifaces.conf, seen from a login node: by itself and by Slurm's nodes."""

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
# Not ibp65s0, as a device may have this name, too.
_INTERFACE = re.compile(r"(ib|eth|bond|hsn)\d+|en[op]\w+")


@dataclass(frozen=True)
class EntryNodes:
    """For which nodes an entry counts.

    Attributes:
        where: File, line and column of the entry.
        rule: What decides the interface there.
        nodes: Slurm's nodes; where they are not known, the entry's names and patterns that no
            earlier entry has.
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
    """What came of a check.

    Attributes:
        summary: A line for people.
        findings: What is wrong.
        notes: Lines on what may be meant so.
        entries: The file's, with their nodes.
    """

    summary: str
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    entries: Sequence[EntryNodes] = ()


def check_file(named: str | None, variables: Mapping[str, str]) -> LintReport:
    """Check the file that would count.

    Args:
        named: One that was given as with ``--ifaces``; None for the one of the cluster.
        variables: The environment, which may name one as well.

    Raises:
        ConfigError: The file is not there, is wrong in itself, or is not to be trusted.
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
    """Ask Slurm for its nodes; empty where there is no sinfo, or it lists none."""
    # sinfo takes its options from variables, too: SINFO_PARTITION would leave nodes out, which then
    # count as misspelt in the file.
    plain = {name: value for name, value in variables.items() if not name.startswith("SINFO_")}
    # sinfo lists a node once for each of its partitions.
    return tuple(dict.fromkeys(output(*SINFO, environ=plain, timeout=_WITHIN).split()))


def evaluate(
    entries: Sequence[IfacesEntry], cluster: Sequence[str], here: str
) -> tuple[list[Finding], list[str]]:
    """Judge a file's entries.

    Args:
        entries: In the order of the file.
        cluster: Slurm's nodes; empty where they are not known.
        here: This node, which need be none of them, such as a login node.

    Returns:
        What is wrong, and what is to be noted.
    """
    findings = [finding for one in entries for finding in _devices(one)]
    index = EntryIndex()
    for one in entries:
        # The first entry that matches a node counts, and no later one.
        taken = {item: first for item in one.items if (first := index.first(item))}
        findings += _overlaps(one, taken)
        index.add(one)
    if cluster:
        findings += [*_unknown(entries, {*cluster, here}), *_without(entries, index, cluster)]
    return findings, [note for one in entries for note in _remarks(one)]


def nodes_of(entries: Sequence[IfacesEntry], cluster: Sequence[str]) -> list[EntryNodes]:
    """Return for each entry the nodes for which it counts.

    Args:
        entries: In the order of the file.
        cluster: Slurm's nodes; where they are not known, the names and patterns of the file count.
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
    """Name an entry of whose nodes earlier entries take all, or some by mistake.

    An earlier entry that lies within this one, such as that of one node before that of its rack,
    is an exception that is meant.

    Args:
        entry: It.
        taken: Of its names and patterns, those that an earlier entry has, and this entry.
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
        found = f"{entry.where}: the entry never counts: all of its nodes are taken by {by}"
        hint = f"remove it, or move it before {by}"
        yield Finding(WARN, found, "an entry that counts for a node", hint)
    else:
        found = f"{entry.where}: the entry does not count for nodes that are taken by {by}"
        hint = f"remove them here or in {by}"
        yield Finding(WARN, found, "each node in one entry", hint, nodes=tuple(mistaken))


def _devices(entry: IfacesEntry) -> Iterator[Finding]:
    """Name interfaces that are most likely devices, and the other way round. Each name is allowed,
    so that only the node can tell.
    """
    for name in entry.interfaces:
        if hint := no_interface(name):
            found = f"{entry.where}: interface {name}, which is like the name of a device"
            yield Finding(WARN, found, "a name as `ip link` shows it", hint)
    # NCCL takes no device that has another name, and so goes on without InfiniBand.
    for part in re.split("[,:=^]+", entry.env.get(_HCA, "")):
        if _INTERFACE.fullmatch(part):
            found = f"{entry.where}: env {_HCA}: {part}, which is like the name of an interface"
            hint = f"write the device, such as mlx5_0, that `ibdev2netdev` shows for {part}"
            yield Finding(WARN, found, "a name in /sys/class/infiniband", hint)


def _unknown(entries: Sequence[IfacesEntry], nodes: set[str]) -> Iterator[Finding]:
    # An entry for node7 is also that of node7.cluster.local.
    known = {*nodes, *(node.split(".")[0] for node in nodes)}
    hint = "correct it, or let it be if it is not a node of Slurm's"
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
    """Yield a line for each misspelt variable, and for what only a node itself can decide.

    Not for ``auto``, which every file may have.
    """
    for name in entry.env:
        if meant := misspelt(name):
            yield (
                f"{entry.where}: env {name} is not a variable that NCCL documents; did you mean"
                f" {meant}?"
            )
    for name in entry.interfaces:
        if name not in (AUTO, NEAREST) and (hint := did_you_mean(name, (AUTO, NEAREST))):
            yield f"{entry.where}: interface {name} is taken for a name; {hint}"
    if not entry.exact and entry.interfaces != (AUTO,):
        yield (
            f"{entry.where}: {entry.rule}: each node finds its own; on the nodes `srunddp explain`"
            " shows which"
        )
