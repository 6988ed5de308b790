"""What is wrong with an ifaces.conf, seen from a login node: by itself, by Slurm's nodes and by the names here."""

import fnmatch
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from srunddp.bootstrap.network.ifaces_conf import AUTO, NEAREST, IfacesConfig, IfacesEntry, load
from srunddp.bootstrap.network.interface import addresses_of, is_loopback
from srunddp.bootstrap.rendezvous.discovery import hostname_of
from srunddp.check.finding import FAIL, WARN, Finding
from srunddp.errors import did_you_mean
from srunddp.util.hostlist import fold
from srunddp.util.nccl import misspelt
from srunddp.util.slurm_command import output

NAME = "ifaces"
SINFO = ("sinfo", "--noheader", "--Node", "--format=%N")
_WITHIN = 10.0


@dataclass(frozen=True)
class LintReport:
    """What came of a check.

    Attributes:
        loaded: the entries that were checked, and their file.
        cluster: Slurm's nodes; empty where sinfo does not tell.
        findings: what is wrong; notes: lines on what may be meant so.
    """

    loaded: IfacesConfig
    cluster: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """One line for people."""
        if not self.loaded.path:
            return "no ifaces.conf has entries: each node chooses by itself"
        count = len(self.loaded.entries)
        entries = f"{count} {'entry' if count == 1 else 'entries'} in {self.loaded.path}"
        known = f"{len(self.cluster)} nodes in the cluster"
        return f"{entries}, {known if self.cluster else 'the node list of the cluster is not available (sinfo)'}"


def check_file(named: str | None, variables: Mapping[str, str]) -> LintReport:
    """Check the file that would count; ``named`` is one given as with ``--ifaces``.

    Raises:
        ConfigError: the file is not there, is wrong in itself, or is not to be trusted.
    """
    loaded = load(named, variables, "FILE")
    if not loaded.path:
        return LintReport(loaded)
    # SINFO_PARTITION would leave nodes out.
    plain = {name: value for name, value in variables.items() if not name.startswith("SINFO_")}
    cluster = tuple(dict.fromkeys(output(*SINFO, environ=plain, timeout=_WITHIN).split()))
    findings, notes = evaluate(loaded.entries, cluster, socket.gethostname())
    if not cluster:
        notes.insert(0, "nodes are not compared with the cluster's: sinfo is not there or lists none")
    if named and loaded.path != named:
        notes.insert(0, f"{named} has no entries")
    return LintReport(loaded, cluster, tuple(findings), tuple(notes))


def evaluate(entries: Sequence[IfacesEntry], cluster: Sequence[str], here: str) -> tuple[list[Finding], list[str]]:
    """What is wrong with a file's entries, and what is to be noted of them.

    ``cluster`` are Slurm's nodes, empty where they are not known; ``here`` is this node, which need be none of them.
    """
    findings, notes = [], []
    for position, one in enumerate(entries):
        taken = {item: first for item in one.items if (first := _first(entries[:position], item))}
        by = " and ".join(dict.fromkeys(f"line {first.where.rsplit(':', 2)[1]}" for first in taken.values()))
        if len(taken) == len(one.items):
            found = f"{one.where}: the entry never counts: all of its nodes are taken by {by}"
            hint = f"remove it, or move it before {by}"
            findings.append(Finding(WARN, found, "an entry that counts for a node", hint))
        elif taken:
            notes.append(f"{one.where}: for {fold(taken)} {by} counts, as it comes first")
        notes += [*_prefixes(one), *_remarks(one)]
    if cluster:
        findings += _unknown(entries, {*cluster, here})
        findings += _without(entries, cluster)
    return [*findings, *_unresolved(entries, cluster)], notes


def _first(entries: Sequence[IfacesEntry], item: str) -> IfacesEntry | None:
    return next((entry for entry in entries if entry.matches(item)), None)


def _names(entry: IfacesEntry) -> list[str]:
    return [item for item in entry.items if item not in entry.patterns]


def _unknown(entries: Sequence[IfacesEntry], nodes: set[str]) -> Iterator[Finding]:
    known = {*nodes, *(node.split(".")[0] for node in nodes)}
    hint = "correct it, or let it be if it is not a node of Slurm's"
    for one in entries:
        if missing := [name for name in _names(one) if name not in known]:
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


def _unresolved(entries: Sequence[IfacesEntry], cluster: Sequence[str]) -> Iterator[Finding]:
    """Of each entry with an address, whether that of its first node leads somewhere from here."""
    for one in entries:
        nodes = (node for node in cluster or _names(one) if _first(entries, node) is one)
        node = next(nodes, "") if one.address else ""
        name = hostname_of(one, node)
        found = addresses_of(name) if node else set()
        if node and all(map(is_loopback, found)):
            leads = f"to {', '.join(sorted(found))}, which is loopback" if found else "nowhere"
            words = f"{one.where}: the address {name} leads {leads} on this login node"
            hint = "correct the address, or see on a compute node whether it knows the name"
            yield Finding(WARN, words, "a name of that node on the data network", hint, nodes=(node,))


def _prefixes(entry: IfacesEntry) -> Iterator[str]:
    """NCCL takes a device's name for a prefix: ``mlx5_1`` fits ``mlx5_10``; no number goes on after a 0."""
    setting = entry.env.get("NCCL_IB_HCA", "").removeprefix("^")
    names = [] if setting.startswith("=") else [name.partition(":")[0] for name in setting.split(",")]
    if longer := [name for name in names if name[-1:] in set("123456789")]:
        yield (
            f"{entry.where}: NCCL_IB_HCA={entry.env['NCCL_IB_HCA']} fits {longer[0]}0 as well, as NCCL takes names for "
            "prefixes; `=` before the first name makes them exact"
        )


def _remarks(entry: IfacesEntry) -> Iterator[str]:
    """Misspelt variables; and what only a node itself can decide, other than ``auto``, which every file may have."""
    for name, meant in ((name, misspelt(name)) for name in entry.env):
        if meant:
            yield f"{entry.where}: env {name} is not a variable that NCCL documents; did you mean {meant}?"
    for name in entry.interfaces:
        if name not in (AUTO, NEAREST) and (hint := did_you_mean(name, (AUTO, NEAREST))):
            yield f"{entry.where}: interface {name} is taken for a name; {hint}"
    if not entry.exact and entry.interfaces != (AUTO,):
        yield f"{entry.where}: {entry.rule}: each node finds its own; on the nodes `srunddp explain` shows which"
