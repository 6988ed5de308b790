"""Where rank 0's line is, or that it is told; the ports that it tries, and by which rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from srunddp.bootstrap.environment.detect import Environment
from srunddp.bootstrap.environment.slurm import NODE_LIST
from srunddp.bootstrap.network import ifaces_conf
from srunddp.bootstrap.network.ifaces_conf import IfacesEntry
from srunddp.bootstrap.rendezvous import discovery
from srunddp.bootstrap.rendezvous.protocol import Address
from srunddp.errors import ConfigError
from srunddp.explain.context import UNKNOWN, ExplainContext, Row

_RESERVED = "SLURM_STEP_RESV_PORTS"


def rows(case: ExplainContext, errors: list[ConfigError]) -> list[Row]:
    """Rank 0's addresses, the line's ports and the store's; what is wrong is added to ``errors``."""
    environment = case.environment
    if environment is None:
        return [Row(name, UNKNOWN, "see the error") for name in ("rank 0", "ports", "store port")]
    if case.alone:
        return [_store(case, case.entry)]
    entry = _entry(case, environment)
    return [_where(case, environment, entry, errors), _ports(case, environment, entry), _store(case, entry)]


def _entry(case: ExplainContext, environment: Environment) -> IfacesEntry | None:
    """Of rank 0's node."""
    node = environment.node if environment.rank == 0 else _node(environment)
    if case.entries and not any(entry.ports or entry.address for entry in case.entries):
        return ifaces_conf.DEFAULT  # whichever it is
    try:
        return ifaces_conf.entry_for(case.entries, node) if case.entries and node else None
    except ConfigError:
        return None


def _node(environment: Environment) -> str:
    return environment.step.nodes[0] if environment.step and not environment.step.unordered else ""


def _where(case: ExplainContext, environment: Environment, entry: IfacesEntry | None, errors: list[ConfigError]) -> Row:
    channel, passed_over = discovery.on_channel(environment), tuple(_ignored(case, environment))
    if channel in discovery.TELLING:
        return Row("rank 0", f"told over {channel}", "its interface's address", passed_over)
    if channel == "none" or case.entries is None:
        return Row("rank 0", UNKNOWN, "see the error", passed_over)
    try:
        found = _found(case, environment, entry)
    except ConfigError as error:
        errors.append(error)
        return Row("rank 0", UNKNOWN, f"not found: {error}", passed_over)
    return Row("rank 0", _few(found), _rule(case, environment, entry), passed_over)


def _found(case: ExplainContext, environment: Environment, entry: IfacesEntry | None) -> Sequence[object]:
    if case.here:
        assert case.entries
        checked = case.interface if case.interface and case.interface.address != UNKNOWN else None
        if environment.rank == 0 and checked and case.entry and not environment.one_node:
            discovery.check_reachable(environment, checked, case.entry, case.here.links)
        return discovery.candidate_addresses(environment, checked, case.entries, case.asked.ports)
    if environment.master:
        return [Address(*environment.master)]
    assert environment.step
    node = discovery.rank_zero_node(environment.step)
    if entry is None:
        return [node]
    name = "127.0.0.1" if environment.one_node else discovery.hostname_of(entry, node)
    return [Address(name, port) for port in discovery.line_ports(environment, entry, case.asked.ports)]


def _few(found: Sequence[object]) -> str:
    return ", ".join(map(str, found[:3])) + (", …" if len(found) > 3 else "")


def _rule(case: ExplainContext, environment: Environment, entry: IfacesEntry | None) -> str:
    elsewhere = "" if case.here else ", a name that is not looked up here"
    if environment.master:
        return f"MASTER_ADDR and MASTER_PORT{'' if environment.one_node else elsewhere}"
    if environment.one_node:
        return "all ranks share one node"
    named = f", as address: of {entry.where}" if entry and entry.address else ""
    return f"the first node of {case.shown(NODE_LIST)}{named}{elsewhere}"


def _ignored(case: ExplainContext, environment: Environment) -> Iterator[str]:
    if not environment.master:
        yield from (
            f"{shown}: ignored below {environment.launcher}" for shown in case.there("MASTER_ADDR", "MASTER_PORT")
        )
    if environment.step and environment.step.unordered:
        yield f"{' '.join(case.there(NODE_LIST)) or NODE_LIST}: {environment.step.unordered}"


def _ports(case: ExplainContext, environment: Environment, entry: IfacesEntry | None) -> Row:
    if environment.master:
        asked = ("--port: MASTER_PORT is where all look",) if case.asked.ports else ()
        return Row("ports", str(environment.master[1]), "MASTER_PORT", asked)
    if entry is None and not case.asked.ports:
        return Row("ports", UNKNOWN, "the entry of rank 0's node is not known")
    entry = entry or ifaces_conf.DEFAULT
    ports = discovery.line_ports(environment, entry, case.asked.ports)
    value = "any" if ports == [0] else _few(ports)
    return Row("ports", value, _ports_rule(case, environment, entry), tuple(_ports_over(case, environment, entry)))


def _limits(case: ExplainContext, entry: IfacesEntry) -> str:
    if case.asked.ports:
        return f"--port {_span(case.asked.ports)}"
    return f"ports: {_span(entry.ports)} of {entry.where}" if entry.ports else ""


def _span(ports: range) -> str:
    return f"{ports[0]}-{ports[-1]}"


def _ports_rule(case: ExplainContext, environment: Environment, entry: IfacesEntry) -> str:
    limits = _limits(case, entry)
    if environment.step is None:
        return limits or f"the kernel's choice, told over {discovery.on_channel(environment)}"
    derived = "derived from job, step and restart count"
    if limits:
        return f"{limits}; the first is {derived}"
    return f"{case.shown(_RESERVED)}, then {derived}" if environment.step.reserved_ports else derived


def _ports_over(case: ExplainContext, environment: Environment, entry: IfacesEntry) -> Iterator[str]:
    limits = _limits(case, entry)
    if limits and environment.step and environment.step.reserved_ports:
        yield f"{case.shown(_RESERVED)}: {limits.partition(' ')[0]} rules"
    if case.asked.ports and entry.ports:
        yield f"ports: {_span(entry.ports)} of {entry.where}: --port rules"


def _store(case: ExplainContext, entry: IfacesEntry | None) -> Row:
    if entry is None and not case.asked.ports:
        return Row("store port", UNKNOWN, "the entry of rank 0's node is not known")
    limits = _limits(case, entry or ifaces_conf.DEFAULT)
    return Row("store port", "any" if not limits else "one of them", limits or "the kernel's choice")
