"""Shows on any machine what ifaces.conf gives a node, and why.

This module decides nothing itself: it calls the functions by which a rank on the node decides.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network.ifaces_conf import load
from srunddp.bootstrap.network.ifaces_entry import IfacesEntry, entry_for, later_entries
from srunddp.bootstrap.network.interface import (
    SelectedInterface,
    env_sources,
    select_elsewhere,
)
from srunddp.bootstrap.rendezvous.discovery import hostname_of
from srunddp.errors import ConfigError, one_line
from srunddp.explain.explain import Row
from srunddp.util.hostlist import shortened

_COLUMN = 24
_UNSEEN = "not checked, as only a rank on that node can"


@dataclass(frozen=True)
class NodeReport:
    """The settings that ifaces.conf gives a node.

    Attributes:
        node: The name of the node.
        rows: The settings, each with its value and the reason for the value.
        notes: Lines for the user about what may be a mistake.
    """

    node: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The report as text: a line for each value, each alternative that was not chosen, and each
        note.
        """
        width = max(len(row.name) for row in self.rows) + 2
        # A value longer than _COLUMN moves the reason to the right only on its own line, not on all
        # lines.
        values = max(len(row.value) for row in self.rows if len(row.value) <= _COLUMN) + 2
        lines = []
        for row in self.rows:
            value = f"{row.value:<{values}}" if len(row.value) <= _COLUMN else f"{row.value}  "
            lines.append(f"{row.name:<{width}}{value}{row.why}".rstrip())
            lines += [f"{'':<{width}}not chosen: {over}" for over in row.not_chosen]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(map(one_line, lines))


def show(
    node: str, named: str | None, variables: Mapping[str, str], cluster: Sequence[str]
) -> NodeReport:
    """Report what the ranks of a node get in a job of several nodes.

    Args:
        node: The name of the node.
        named: The file that ``--ifaces`` names; None without the option.
        variables: The environment variables of the job, as far as they are known. If they name an
            interface, it takes precedence over the file.
        cluster: Slurm's nodes; empty if they are not known.

    Raises:
        ConfigError: The file is wrong, has no entry for the node, or ``node`` is no name.
    """
    if not re.fullmatch(r"[\w.:-]+", node):
        raise ConfigError(
            f"NODE {shortened(node)!r}",
            expected="the name of one node",
            hint="write a name as sinfo lists it, such as gpu001",
        )
    config = load(named, variables)
    entry = entry_for(config.entries, node)
    rows = [
        Row("node", node),
        Row("ifaces.conf", config.path or "none", config.source, config.passed_over),
        Row(
            "entry",
            shortened(entry.nodes),
            f"{entry.where}: the first that matches" if config.path else entry.where,
            later_entries(config.entries, entry, node),
        ),
        *_interfaces(entry, node, variables),
        *_env(entry, variables),
        Row("address", hostname_of(entry, node), _address_source(entry)),
        _ports(entry),
        *_metrics(entry),
    ]
    return NodeReport(node, rows, _notes(node, cluster))


def _interfaces(entry: IfacesEntry, node: str, variables: Mapping[str, str]) -> Iterator[Row]:
    """Yield rows for the interface of each local rank, and for the variables that are exported with
    it. Further local ranks, for which the interfaces of the entry repeat, get no rows.
    """
    count = max(1, len(entry.interfaces), len(entry.networks))
    for local_rank in range(count):
        chosen = select_elsewhere(entry, _rank(node, local_rank, count), variables)
        if count > 1:
            before = f"local rank {local_rank}: "
        else:
            before = ""
        if chosen:
            yield from _chosen(chosen, entry, before)
        else:
            rules = entry.networks or entry.interfaces
            why = f"{entry.where}; only the node can choose: srun -w {node} srunddp explain"
            yield Row(
                f"{before}{'network' if entry.networks else 'interface'}",
                rules[local_rank % len(rules)],
                why,
            )


def _chosen(chosen: SelectedInterface, entry: IfacesEntry, before: str) -> Iterator[Row]:
    why = f"{chosen.source}; {_UNSEEN}"
    yield Row(f"{before}interface", chosen.name, why, chosen.passed_over)
    for name, value in chosen.exports.items():
        # The variables under env: in the entry are the same for all local ranks, so `_env` shows
        # them once.
        if name not in entry.env:
            yield Row(f"{before}{name}", value, chosen.export_sources[name])


def _rank(node: str, local_rank: int, count: int) -> Environment:
    """Return the environment of a rank on the node, in an assumed job of two nodes with ``count``
    ranks on each.
    """
    return Environment(
        launcher="",
        rank=local_rank,
        local_rank=local_rank,
        world_size=2 * count,
        local_world_size=count,
        node=node,
        sources={},
    )


def _env(entry: IfacesEntry, variables: Mapping[str, str]) -> Iterator[Row]:
    for name, source in env_sources(entry, variables).items():
        yield Row(name, variables.get(name) or entry.env[name], source)


def _address_source(entry: IfacesEntry) -> str:
    if entry.address:
        return f"address: of {entry.where}; for channel slurm alone"
    return "the node's name; for channel slurm alone"


def _ports(entry: IfacesEntry) -> Row:
    if entry.ports:
        return Row("ports", f"{entry.ports[0]}-{entry.ports[-1]}", f"ports: of {entry.where}")
    return Row("ports", "any", "no ports: in the entry")


def _metrics(entry: IfacesEntry) -> Iterator[Row]:
    if entry.metrics:
        yield Row("metrics", entry.metrics, f"metrics: of {entry.where}")


def _notes(node: str, cluster: Sequence[str]) -> list[str]:
    known = {*cluster, *(each.split(".")[0] for each in cluster)}
    if cluster and not known & {node, node.split(".")[0]}:
        return [f"sinfo lists no node {node}"]
    return []
