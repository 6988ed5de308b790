"""An ifaces.conf from what a scan found: the network that reaches the most nodes, and why it was
chosen.
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
    """Interfaces that all reach each other.

    Attributes:
        links: by node, the fastest ones of each.
        broken: how many of the ways between them that were tried did not work.
    """

    links: Mapping[str, tuple[ScannedInterface, ...]]
    broken: int = 0

    @property
    def every(self) -> list[ScannedInterface]:
        """The interfaces of all nodes."""
        return [link for links in self.links.values() for link in links]

    @property
    def rank(self) -> tuple[object, ...]:
        """Sorts the best first: the most nodes, nothing broken, InfiniBand, speed, IPv4, the nodes'
        own names.
        """
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
    """The groups of interfaces that reach each other, the best first; an interface that reaches
    none is no group.
    """
    near = group_by_key(
        way for (a, b), worked in scan.reached.items() if worked for way in ((a, b), (b, a))
    )
    return sorted(
        (_network(scan, ends) for ends in _groups(near)), key=lambda network: network.rank
    )


def _groups(near: Mapping[End, Sequence[End]]) -> list[list[End]]:
    """The ends that are connected, if only by way of others."""
    groups = []
    seen = set[End]()
    for start in near:
        if start in seen:
            group = []
        else:
            group = [start]
        seen.add(start)
        for end in group:  # which grows
            new = [other for other in dict.fromkeys(near[end]) if other not in seen]
            seen.update(new)
            group += new
        if group:
            groups.append(group)
    return groups


def _network(scan: ScanResult, ends: Iterable[End]) -> ReachableGroup:
    by_node = group_by_key((end[0], scan.ends[end]) for end in sorted(ends))
    links = {
        node: tuple(link for link in theirs if link.speed == max(each.speed for each in theirs))
        for node, theirs in by_node.items()
    }
    chosen = {(node, link.name) for node, theirs in links.items() for link in theirs}
    broken = sum(
        not worked for (a, b), worked in scan.reached.items() if a in chosen and b in chosen
    )
    return ReachableGroup(links, broken)


def draft(
    scan: ScanResult, today: datetime.date, entries: Sequence[IfacesEntry] = ()
) -> tuple[str, tuple[str, ...]]:
    """The file with the entries of the best network, written ``today``, and the nodes that have no
    entry.

    Nodes that one of ``entries`` matches have theirs already. Where all have, the text is empty.
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
    leads = cache(lambda template: all(_leads(scan, best, template, node) for node in best.links))
    entries_of = group_by_key(
        (_entry(best, node, leads), node) for node in sorted(new & {*best.links})
    )
    for entry, theirs in entries_of.items():
        folded = fold(theirs)
        # Names that are numbers would be a list.
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
    """The lines of a node's entry below its name."""
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
        unsure = (
            f"without it NCCL uses {', '.join(others)} as well: which of them are this network's?"
        )
        if others:
            doubt = "# "
            why = unsure
        else:
            doubt = ""
            why = "active InfiniBand or RoCE"
        lines.append(f'  {doubt}env: {{NCCL_IB_HCA: "={",".join(sorted(devices))}"}}  # {why}')
    return tuple(lines)


def _address(link: ScannedInterface, node: str, leads: Callable[[str], bool]) -> str:
    """How others find the node: by its own name, a name with it inside that all nodes know, or the
    bare address.
    """
    templates = [name.replace(node, "{node}") for name in link.names if node in name]
    if link.named:
        return ""
    return next(filter(leads, templates), link.address)


def _leads(scan: ScanResult, best: ReachableGroup, template: str, node: str) -> bool:
    """Whether a node's name by this template leads to its interface, on all nodes."""
    seen = scan.resolved.get(template.replace("{node}", node), ())
    own = {link.address for link in best.links[node]}
    return bool(seen) and all(own & set(addresses) for addresses in seen)
