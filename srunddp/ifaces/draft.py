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
    """Interfaces that reach each other, directly or through others of the group.

    Attributes:
        links: The fastest interfaces of each node, by node.
        broken: How many of the tried ways between these interfaces did not work.
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

        The best group has the most nodes; then the fewest broken ways, InfiniBand or RoCE, the
        highest speed, IPv4, and addresses to which the nodes' own names resolve.
        """
        # The slowest interface counts, because it limits the speed of an all-reduce in a ring.
        # Names come last, so that two scans of the same network give the same file.
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
    # A way that works in one direction is enough to be in a group. A firewall may block the other
    # direction, which `broken` counts.
    near = group_by_key(
        way for (a, b), worked in scan.reached.items() if worked for way in ((a, b), (b, a))
    )
    return sorted(
        (_network(scan, ends) for ends in _groups(near)), key=lambda network: network.rank
    )


def _groups(near: Mapping[End, Sequence[End]]) -> list[list[End]]:
    """Group the interfaces that are connected, directly or through others.

    With many nodes, not all pairs are tried, so two interfaces of one network may not have been
    tried with each other.
    """
    groups = []
    seen = set[End]()
    for start in near:
        if start in seen:
            continue
        seen.add(start)
        group = [start]
        # The list grows while the loop reads it, so that each new end is visited in turn.
        for end in group:
            new = [other for other in dict.fromkeys(near[end]) if other not in seen]
            seen.update(new)
            group += new
        groups.append(group)
    return groups


def _network(scan: ScanResult, ends: Iterable[End]) -> ReachableGroup:
    by_node = group_by_key((end[0], scan.ends[end]) for end in sorted(ends))
    # A node's slow interface may reach the fast network through a router. The training has to use
    # the fast one. Several interfaces of one speed are rails of one network.
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
    """Return the text of a file with entries for the best network.

    Args:
        scan: The results of the scan.
        today: The date to write into the file.
        entries: The entries of the file to which the text will be added. Nodes that one of these
            matches get no further entry; if that is so for all nodes, the text is empty.

    Returns:
        The text, and the nodes for which it has no entry, because they reach no other node.
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
    # Cache the answers: the entries of all nodes ask about the same few templates.
    leads = cache(lambda template: all(_leads(scan, best, template, node) for node in best.links))
    entries_of = group_by_key(
        (_entry(best, node, leads), node) for node in sorted(new & {*best.links})
    )
    for entry, theirs in entries_of.items():
        folded = fold(theirs)
        # Nodes with the names 1, 2 and 3 fold to [1-3], which YAML would read as a list.
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
    """Return the lines of a node's entry that follow the line `nodes:`."""
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
        # Devices without an address of their own may be other rails of this network, or another
        # network. A wrong choice costs half of the bandwidth, or makes jobs hang. So the line is a
        # comment, and a person has to decide.
        if others:
            doubt = "# "
            why = (
                f"without it NCCL uses {', '.join(others)} as well: which of them are this"
                " network's?"
            )
        else:
            doubt = ""
            why = "active InfiniBand or RoCE"
        # With "=" NCCL takes the names as they are. Without it, mlx5_1 would also match mlx5_10.
        lines.append(f'  {doubt}env: {{NCCL_IB_HCA: "={",".join(sorted(devices))}"}}  # {why}')
    return tuple(lines)


def _address(link: ScannedInterface, node: str, leads: Callable[[str], bool]) -> str:
    """Return the `address` of a node's entry; empty if the node's own name resolves to its
    interface.

    The result is a template with the node's name that resolves to the interface on all nodes, or
    else the numeric address.
    """
    if link.named:
        return ""
    # From node7-ib make {node}-ib, so that one entry serves all nodes.
    templates = [name.replace(node, "{node}") for name in link.names if node in name]
    return next(filter(leads, templates), link.address)


def _leads(scan: ScanResult, best: ReachableGroup, template: str, node: str) -> bool:
    """Return whether the name that a template gives for a node resolves to the node's interface, on
    all nodes.
    """
    seen = scan.resolved.get(template.replace("{node}", node), ())
    own = {link.address for link in best.links[node]}
    return bool(seen) and all(own & set(addresses) for addresses in seen)
