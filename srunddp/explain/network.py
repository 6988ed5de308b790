"""The file of interface entries, this node's interface, and the variables that are exported for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from srunddp.bootstrap.environment import mpi
from srunddp.bootstrap.network import ifaces_conf
from srunddp.bootstrap.network.interface import GLOO, NCCL, SelectedInterface
from srunddp.bootstrap.rendezvous.discovery import on_channel
from srunddp.explain.context import ELSEWHERE, LATER, UNKNOWN, ExplainContext, Row

_LOOPBACK = "loopback, as "


def rows(case: ExplainContext) -> list[Row]:
    """The file, the interface, its address, and all that is exported."""
    return [_file(case), *_interface(case), *_ranks(case), *_of_interface(case), *_of_mpi(case)]


def _file(case: ExplainContext) -> Row:
    files = list(dict.fromkeys(ifaces_conf.candidates(case.asked.ifaces, case.variables)))
    if case.entries is None:
        missing = tuple(f"{path}: not there" for path in files if not os.path.isfile(path))
        return Row("ifaces.conf", UNKNOWN, "see the error", missing)
    taken = Path(case.entries[0].file) if case.entries != (ifaces_conf.DEFAULT,) else None
    passed_over, state = [], ""
    for path in files:
        if path == taken:
            state = f"{taken} comes first"
        else:
            there = os.path.isfile(path)
            passed_over.append(f"{path}: {state or 'has no entries' if there else 'not there'}")
    if taken is None:
        return Row("ifaces.conf", "none", "no file has entries: interface auto on every node", tuple(passed_over))
    return Row("ifaces.conf", str(taken), _origin(case, taken), tuple(passed_over))


def _origin(case: ExplainContext, taken: Path) -> str:
    if case.asked.ifaces and taken == Path(case.asked.ifaces):
        return "--ifaces"
    named = case.variables.get(ifaces_conf.VARIABLE)
    return case.shown(ifaces_conf.VARIABLE) if named and taken == Path(named) else "the first that has entries"


def _interface(case: ExplainContext) -> list[Row]:
    chosen, passed_over = case.interface, tuple(_not_chosen(case))
    if chosen is None:
        return [Row("interface", *_undecided(case), passed_over), Row("address", UNKNOWN, "that interface's")]
    if chosen.address == UNKNOWN:
        # On that node it may be down, or not be there; here it is.
        unsure = "see the error" if case.here else ELSEWHERE
        return [
            Row("interface", chosen.name, f"{chosen.source}; {unsure}", passed_over),
            Row("address", UNKNOWN, unsure),
        ]
    address = Row("address", chosen.address, f"of {chosen.name}", tuple(_other_addresses(case)))
    return [Row("interface", chosen.name, chosen.source, passed_over), address]


def _undecided(case: ExplainContext) -> tuple[str, str]:
    if case.environment and case.entry and case.entry.interfaces == (ifaces_conf.AUTO,):
        return ifaces_conf.AUTO, f"{case.entry.where}; {'see the error' if case.here else ELSEWHERE}"
    if case.environment and case.entries and not case.environment.node:
        return UNKNOWN, f"the node's name decides which entry of {_path(case)} counts"
    return UNKNOWN, "see the error"


def _path(case: ExplainContext) -> str:
    return case.entries[0].file if case.entries else ""


def _not_chosen(case: ExplainContext) -> Iterator[str]:
    chosen, entry = case.interface, case.entry
    if chosen:
        yield from chosen.passed_over or _other_links(case, chosen)
        yield from _other_names(chosen, entry) if entry and entry is not ifaces_conf.DEFAULT else ()
        if case.variables.get(NCCL, "").startswith("^"):
            yield f"{case.shown(NCCL)}: excludes, and chooses none"
    yield from _later_entries(case)


def _other_links(case: ExplainContext, chosen: SelectedInterface) -> Iterator[str]:
    for link in case.here.links if case.here and chosen.address != UNKNOWN else ():
        if link.name != chosen.name:
            loopback = chosen.source.startswith(_LOOPBACK)
            yield f"{link.name}: " + (f"not needed, {chosen.source}" if loopback else f"not that of {chosen.source}")


def _other_names(chosen: SelectedInterface, entry: ifaces_conf.IfacesEntry) -> Iterator[str]:
    """What the entry says beside the name that was taken."""
    says = f"{entry.where}, interface {' '.join(entry.interfaces)}"
    if chosen.source.startswith((f"{GLOO}=", f"{NCCL}=")):
        yield f"{says}: exported variables come first"
    elif chosen.source.startswith(_LOOPBACK):
        yield f"{says}: not needed, {chosen.source}"
    elif len(entry.interfaces) > 1:
        yield f"{says}: by local rank, in turn"


def _later_entries(case: ExplainContext) -> Iterator[str]:
    if case.entries and case.entry and case.entry in case.entries and case.environment and case.environment.node:
        for later in case.entries[case.entries.index(case.entry) + 1 :]:
            if later.matches(case.environment.node):
                yield f"{later.where}, nodes {later.nodes}: matches too, but {case.entry.where} comes first"


def _other_addresses(case: ExplainContext) -> Iterator[str]:
    for link in case.here.links if case.here else ():
        if case.interface and link.name == case.interface.name:
            others = [address for address in link.addresses if address != case.interface.address]
            yield from (f"{address}: of {link.name} as well" for address in others)


def _ranks(case: ExplainContext) -> list[Row]:
    """What every rank is given as torchrun's do, besides its numbers."""
    if case.alone:
        return []
    rules = case.environment is not None and case.environment.master is not None
    here = "where the ranks meet, not the store" if rules else "replaced"
    why = {
        "MASTER_ADDR": "rank 0's address",
        "MASTER_PORT": "the store's port",
        "NODE_RANK": "the node's number",
        "GROUP_RANK": "the node's number",
    }
    return [
        Row(name, UNKNOWN, f"{reason}, {LATER}", tuple(f"{shown}: {here}" for shown in case.there(name)))
        for name, reason in why.items()
    ]


def _of_interface(case: ExplainContext) -> Iterator[Row]:
    chosen, entry = case.interface, case.entry
    if chosen is None:
        for name, value in (entry.env if entry else {}).items():
            shown = case.variables.get(name) or value
            yield Row(name, shown, "exported" if case.variables.get(name) else entry.where if entry else "")
        return
    for name, value in chosen.exports.items():
        ours = entry.env.get(name) if entry else None
        decided = entry.where if entry and ours is not None else chosen.source
        kept = name in chosen.kept
        over = (f"{name}={ours} of {entry.where}: what is exported stays",) if kept and entry and ours else ()
        yield Row(name, value, "exported" if kept else decided, over)


def _of_mpi(case: ExplainContext) -> Iterator[Row]:
    if case.environment and case.interface and on_channel(case.environment) == "mpi":
        for name, value in mpi.interface_variables(case.variables, case.interface.name).items():
            yield Row(name, value, "interface, for MPI_Init")
