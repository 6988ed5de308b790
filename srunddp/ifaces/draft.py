"""Drafts an ifaces.conf from the results of a scan: the network that reaches the most nodes, with
comments on why it was chosen.
"""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from srunddp.bootstrap.network.ifaces_entry import IfacesEntry
from srunddp.bootstrap.network.interface import shown_speed
from srunddp.ifaces.scan import End, ScannedInterface, ScanResult
from srunddp.util.hostlist import fold, group_by_key


@dataclass(frozen=True)
class ReachableGroup:
    """Interfaces that reach each other, directly or through other interfaces of the group.

    Attributes:
        links: By node, the node's interfaces in the group; only the fastest, if they differ in
            speed.
        broken: How many connections that were tried between these interfaces failed.
    """

    links: Mapping[str, tuple[ScannedInterface, ...]]
    broken: int = 0

    @property
    def every(self) -> list[ScannedInterface]:
        """The interfaces of all nodes."""
        return [link for links in self.links.values() for link in links]

    @property
    def rank(self) -> tuple[object, ...]:
        """A sort key that puts the best group first.

        The best group has the most nodes. Among groups with equally many nodes, these properties
        decide, in this order: the fewest failed connections, InfiniBand or RoCE, the highest speed,
        IPv4, and addresses to which the nodes' own names resolve.
        """
        # The speed of a group is that of its slowest interface, which limits the speed of an
        # all-reduce in a ring. The names of the interfaces come last, so that two scans of the same
        # network give the same file.
        return (
            -len(self.links),
            self.broken,
            not all(link.layer for link in self.every),
            -min(link.speed for link in self.every),
            any(":" in link.address for link in self.every),
            not all(link.named for link in self.every),
            sorted({link.name for link in self.every}),
        )

    def __str__(self) -> str:
        names = ", ".join(sorted({link.name for link in self.every}))
        rate = shown_speed(min(link.speed for link in self.every))
        if any(":" in link.address for link in self.every):
            family = ", IPv6"
        else:
            family = ""
        return f"{names} on {fold(self.links)}, which reach each other ({rate}{family})"


def networks(scan: ScanResult) -> list[ReachableGroup]:
    """Return the groups of interfaces that reach each other, with the best group first.

    An interface that reaches no other is in no group.

    Args:
        scan: The results of the scan.
    """
    # Two interfaces are in the same group even if a connection works in only one direction. A
    # firewall may block the other direction; `ReachableGroup.broken` counts such failures.
    near = group_by_key(
        way for (a, b), worked in scan.reached.items() if worked for way in ((a, b), (b, a))
    )
    return sorted(
        (_network(scan, ends) for ends in _groups(near)), key=lambda network: network.rank
    )


def _groups(near: Mapping[End, Sequence[End]]) -> list[list[End]]:
    """Return the groups of interfaces that are connected, directly or through other interfaces.

    Connections through others count because with many nodes not all pairs are tried, so that two
    interfaces of one network may never have been tried with each other.

    Args:
        near: By interface, the other interfaces with which a connection worked in at least one
            direction. Interfaces without such a connection are missing.
    """
    groups = []
    seen = set[End]()
    for start in near:
        if start in seen:
            continue
        seen.add(start)
        group = [start]
        # The list grows while the loop reads it, so that the loop also visits each interface that
        # it adds.
        for end in group:
            new = [other for other in dict.fromkeys(near[end]) if other not in seen]
            seen.update(new)
            group += new
        groups.append(group)
    return groups


def _network(scan: ScanResult, ends: Iterable[End]) -> ReachableGroup:
    by_node = group_by_key((end[0], scan.ends[end]) for end in sorted(ends))
    # A slow interface of a node may reach the fast network through a router. The training has to
    # use the fast interfaces. If a node has several of the same speed, they are rails of one
    # network.
    links = {
        node: tuple(link for link in theirs if link.speed == max(each.speed for each in theirs))
        for node, theirs in by_node.items()
    }
    chosen = {(node, link.name) for node, theirs in links.items() for link in theirs}
    failed = [
        pair
        for pair, worked in scan.reached.items()
        if not worked and pair[0] in chosen and pair[1] in chosen
    ]
    return ReachableGroup(links, broken=len(failed))


def draft(
    scan: ScanResult, today: datetime.date, entries: Sequence[IfacesEntry] = ()
) -> tuple[str, tuple[str, ...]]:
    """Return the text of an ifaces.conf with entries for the best network.

    Args:
        scan: The results of the scan.
        today: The date to write into the file.
        entries: The entries of the file to which the text will be added. A node that one of them
            matches gets no new entry. If this is true of all nodes, the text is empty.

    Returns:
        The text, and the nodes for which it has no entry, because they have no interface in the
        best network.
    """
    nodes = sorted({node for node, _ in scan.ends})
    new = {node for node in nodes if not any(entry.matches(node) for entry in entries)}
    best, *others = networks(scan) or [ReachableGroup({})]
    missing = tuple(node for node in nodes if node in new and node not in best.links)
    if entries and not new:
        return "", ()
    lines = [
        (
            f"# By `srunddp ifaces scan` on {today.isoformat()}: TCP was tried between all"
            f" interfaces of {fold(nodes)}."
        ),
        *(f"# Not chosen: {network}." for network in others),
        *(f"# Not chosen: {text}." for text in _passed_over(scan)),
    ]
    if best.broken:
        lines.append(f"# {best.broken} ways within this network did not work: see `srunddp check`.")
    if missing:
        lines.append(
            f"# {fold(missing)}: no interface reaches the others; there is no entry for it."
        )
    # Cache the results, because the entries of all nodes ask about the same few templates.
    leads = cache(lambda template: all(_leads(scan, best, template, node) for node in best.links))
    entries_of = group_by_key(
        (_entry(best, node, leads), node) for node in sorted(new & {*best.links})
    )
    for entry, theirs in entries_of.items():
        folded = fold(theirs)
        # Nodes with the names 1, 2 and 3 fold to [1-3]. Without quotes YAML would read a list.
        folded = f'"{folded}"' if folded.startswith("[") else folded
        lines += ["", f"- nodes: {folded}", *entry]
    return "\n".join(lines) + "\n", missing


def _passed_over(scan: ScanResult) -> list[str]:
    reaching = {end for pair, worked in scan.reached.items() if worked for end in pair}
    why = group_by_key(
        ((name, link.passed_over or "reaches no other node"), node)
        for (node, name), link in sorted(scan.ends.items())
        if (node, name) not in reaching
    )
    return [f"{name} on {fold(nodes)}, {reason}" for (name, reason), nodes in why.items()]


def _entry(best: ReachableGroup, node: str, leads: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the lines of a node's entry that follow the line ``nodes:``.

    Args:
        best: The network that the node uses.
        node: The node's name.
        leads: Returns whether a template such as ``{node}-ib`` gives a name of this network on all
            nodes.
    """
    links = best.links[node]
    count = len(best.links)
    if len(links) == 1:
        names = links[0].name
    else:
        names = f"[{', '.join(link.name for link in links)}]"
    rates = " and ".join(map(shown_speed, sorted({link.speed for link in links})))
    if count == 2:
        reached = "reaches the other node"
    else:
        reached = f"reaches all {count - 1} other nodes"
    lines = [f"  interface: {names}  # up, {rates}, {reached}"]
    if address := _address(links[0], node, leads):
        if "{node}" in address:
            why = "a name of this address"
        else:
            why = "no name leads to it"
        lines.append(f'  address: "{address}"  # {why}; the plain hostname leads elsewhere')
    devices = {device for link in links for device in link.devices}
    others = sorted({device for link in links for device in link.others} - devices)
    if devices:
        # The devices in `others` may be further rails of this network, or belong to a different
        # network. A wrong choice costs half of the bandwidth, or makes jobs hang. So the line is
        # written as a comment, and a person has to decide.
        if others:
            doubt = "# "
            why = (
                f"without it NCCL uses {', '.join(others)} as well: which of them are this"
                " network's?"
            )
        else:
            doubt = ""
            why = "active InfiniBand or RoCE"
        # With "=" NCCL takes the names as they are. Without "=", mlx5_1 would also match mlx5_10.
        lines.append(f'  {doubt}env: {{NCCL_IB_HCA: "={",".join(sorted(devices))}"}}  # {why}')
    return tuple(lines)


def _address(link: ScannedInterface, node: str, leads: Callable[[str], bool]) -> str:
    """Return the value of ``address:`` in a node's entry; empty if the node's own name resolves to
    the interface.

    The result is a template such as ``{node}-ib`` if one gives a name of this network on all nodes,
    or else the numeric address.
    """
    if link.named:
        return ""
    # Make {node}-ib from node7-ib, so that all nodes can have the same entry.
    templates = [name.replace(node, "{node}") for name in link.names if node in name]
    return next(filter(leads, templates), link.address)


def _leads(scan: ScanResult, best: ReachableGroup, template: str, node: str) -> bool:
    """Return whether a template such as ``{node}-ib`` gives a name that all nodes resolve to the
    interface of ``node`` in the best network.
    """
    seen = scan.resolved.get(template.replace("{node}", node), ())
    own = {link.address for link in best.links[node]}
    return bool(seen) and all(own & set(addresses) for addresses in seen)
