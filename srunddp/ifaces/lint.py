"""What is wrong with an ifaces.conf, seen from a login node: by itself and by Slurm's nodes."""

import fnmatch
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from srunddp.bootstrap.network.ifaces_conf import load
from srunddp.bootstrap.network.ifaces_entry import AUTO, NEAREST, IfacesEntry
from srunddp.check.finding import FAIL, WARN, Finding
from srunddp.check.nccl_names import misspelt
from srunddp.errors import did_you_mean
from srunddp.util.infiniband import no_interface
from srunddp.util.slurm_command import output

NAME = "ifaces"
SINFO = ("sinfo", "--noheader", "--Node", "--format=%N")
_WITHIN = 10.0


@dataclass(frozen=True)
class LintReport:
    """What came of a check.

    Attributes:
        summary: A line for people.
        findings: What is wrong.
        notes: Lines on what may be meant so.
    """

    summary: str
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()


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
    # sinfo takes its options from variables, too: SINFO_PARTITION would leave nodes out, which then
    # count as misspelt in the file.
    plain = {name: value for name, value in variables.items() if not name.startswith("SINFO_")}
    # sinfo lists a node once for each of its partitions.
    cluster = tuple(dict.fromkeys(output(*SINFO, environ=plain, timeout=_WITHIN).split()))
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
        f"{count} {'entry' if count == 1 else 'entries'} in {loaded.path}, {known}", findings, notes
    )


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
    for position, one in enumerate(entries):
        # The first entry that matches a node counts, and no later one.
        taken = [_first(entries[:position], item) for item in one.items]
        if all(taken):
            by = " and ".join(
                dict.fromkeys(f"line {first.where.rsplit(':', 2)[1]}" for first in taken if first)
            )
            found = f"{one.where}: the entry never counts: all of its nodes are taken by {by}"
            hint = f"remove it, or move it before {by}"
            findings.append(Finding(WARN, found, "an entry that counts for a node", hint))
    if cluster:
        findings += [*_unknown(entries, {*cluster, here}), *_without(entries, cluster)]
    return findings, [note for one in entries for note in _remarks(one)]


def _first(entries: Sequence[IfacesEntry], item: str) -> IfacesEntry | None:
    return next((entry for entry in entries if entry.matches(item)), None)


def _devices(entry: IfacesEntry) -> Iterator[Finding]:
    """Name interfaces that are most likely devices. Each name is allowed, so that only the node
    can tell.
    """
    for name in entry.interfaces:
        if hint := no_interface(name):
            found = f"{entry.where}: interface {name}, which is like the name of a device"
            yield Finding(WARN, found, "a name as `ip link` shows it", hint)


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


def _without(entries: Sequence[IfacesEntry], cluster: Sequence[str]) -> Iterator[Finding]:
    if left := tuple(node for node in cluster if not _first(entries, node)):
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
