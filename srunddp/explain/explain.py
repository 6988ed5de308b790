"""Every value that srunddp decides for a rank, what decided it, and what was passed over.

It goes on where something is wrong, as that is when it is asked.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from srunddp.bootstrap.environment import slurm
from srunddp.bootstrap.environment.detect import Environment, detect, identify, likely_ranks
from srunddp.bootstrap.network import ifaces_conf, interface
from srunddp.bootstrap.network.ifaces_conf import AUTO, IfacesEntry
from srunddp.bootstrap.network.interface import GLOO, NCCL, NetworkInterface, SelectedInterface
from srunddp.bootstrap.rendezvous import auth
from srunddp.errors import ConfigError, one_line
from srunddp.explain import channel, defaults, network, rank_zero, ranks
from srunddp.explain.context import UNKNOWN, ExplainContext, ExplainOptions, NodeFacts, Row
from srunddp.stage.paths import contradictions

__all__ = ["ExplainOptions", "Explanation", "NodeFacts", "Row", "explain", "this_node"]

_PTY = "SLURM_PTY_PORT"


@dataclass(frozen=True)
class Explanation:
    """One rank's.

    Attributes:
        rank: as far as it is known; rows: all values; notes: what is no error, but worth a line.
        errors: that would end the run.
    """

    rank: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    errors: tuple[ConfigError, ...]

    @property
    def exit_code(self) -> int:
        """That of the first error, 0 without one."""
        return self.errors[0].exit_code if self.errors else 0

    @property
    def text(self) -> str:
        """For people: a line for each value and for each thing that was passed over, each with the rank."""
        lines = []
        for row in self.rows:
            lines.append(f"{row.name:<20} {row.value:<18} {row.why}".rstrip())
            lines += [f"{'':<20} passed over: {over}" for over in row.passed_over]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"error: {error} (exit code {error.exit_code})" for error in self.errors]
        return "".join(f"[rank {self.rank}] {one_line(line)}\n" for line in lines)


def this_node() -> NodeFacts:
    """What is seen on this node."""
    return NodeFacts(interface.list_interfaces(), socket.gethostname(), lambda: auth.choose_authenticator().kind)


def explain(variables: Mapping[str, str], asked: ExplainOptions, here: NodeFacts | None) -> Explanation:
    """Explain one rank.

    Args:
        variables: its environment.
        asked: what the command line says.
        here: what is seen on its node; None for the environment of a process of another machine.
    """
    errors: list[ConfigError] = []
    notes: list[str] = []
    case = _case(variables, asked, here, errors, notes)
    rows = [
        *ranks.rows(case),
        *channel.rows(case),
        *network.rows(case),
        *rank_zero.rows(case, errors),
        *defaults.rows(case),
    ]
    notes += contradictions(variables) if asked.offline else []
    rank = case.environment.rank if case.environment else likely_ranks(variables)[0]
    return Explanation(rank, tuple(rows), tuple(notes), tuple(errors))


def _case(
    variables: Mapping[str, str],
    asked: ExplainOptions,
    here: NodeFacts | None,
    errors: list[ConfigError],
    notes: list[str],
) -> ExplainContext:
    environment, offered = _environment(variables, asked, here, errors, notes)
    entries, entry, chosen = _entries(variables, asked, errors), None, None
    if entries and environment:
        entry = _entry(entries, environment, errors)
    if entry and entries and environment:
        chosen = _interface(variables, entries, entry, environment, here, errors)
    return ExplainContext(variables, asked, here, environment, offered, entries, entry, chosen)


def _environment(
    variables: Mapping[str, str],
    asked: ExplainOptions,
    here: NodeFacts | None,
    errors: list[ConfigError],
    notes: list[str],
) -> tuple[Environment | None, tuple[str, ...]]:
    """Who it is, and the channels that are there; where it would be refused, as far as a launcher tells."""
    # Process 0 is nobody's: of another machine's process it is not known whether srun itself started it, and a
    # terminal would be this machine's.
    known, pid = variables, None
    if here is None:
        known, pid = {name: value for name, value in variables.items() if name != _PTY}, 0
        if _PTY in variables:
            notes.append(f"{_PTY}={variables[_PTY]}: taken for a step, not for a shell of srun --pty")
    told: Environment | None = None
    try:
        told = identify(known, pid=pid)
    except ConfigError:
        offered: tuple[str, ...] = ()
    else:
        offered = told.channels
    try:
        found: Environment | None = detect(known, channel=asked.channel, pid=pid)
    except ConfigError as error:
        errors.append(error)
        # A channel that was asked for in vain leaves none; with explicit variables it would be another world.
        found = replace(told, channels=() if asked.channel else told.channels) if told else None
        found = None if asked.channel == "env" else found
    if found:
        notes += found.notes
    if found and here is None:
        found = replace(found, node=variables.get(slurm.NODE_NAME, ""))
    return found, offered


def _entries(
    variables: Mapping[str, str], asked: ExplainOptions, errors: list[ConfigError]
) -> tuple[IfacesEntry, ...] | None:
    try:
        return ifaces_conf.load(asked.ifaces, variables).entries
    except ConfigError as error:
        errors.append(error)
        return None


def _entry(entries: tuple[IfacesEntry, ...], environment: Environment, errors: list[ConfigError]) -> IfacesEntry | None:
    """This node's; where the node is not known, the first if it is for all."""
    alone = environment.world_size == 1
    if not environment.node and not alone:
        return entries[0] if entries[0].nodes == "*" else None
    try:
        return ifaces_conf.entry_for(entries, environment.node, alone=alone)
    except ConfigError as error:
        errors.append(error)
        return None


def _interface(
    variables: Mapping[str, str],
    entries: tuple[IfacesEntry, ...],
    entry: IfacesEntry,
    environment: Environment,
    here: NodeFacts | None,
    errors: list[ConfigError],
) -> SelectedInterface | None:
    """The choice; where it is wrong, or the node another one, the name that would be taken if it were there."""
    if here:
        try:
            return interface.select_interface(entries, environment, variables, here.links)
        except ConfigError as error:
            errors.append(error)
    try:
        return interface.select_interface((entry,), environment, variables, _named(variables, entry))
    except ConfigError:
        return None  # auto, which only the node itself can decide


def _named(variables: Mapping[str, str], entry: IfacesEntry) -> tuple[NetworkInterface, ...]:
    """An interface for each name that an entry or the user gives, of which no more is known."""
    names = [name for name in entry.interfaces if name != AUTO]
    for variable in (GLOO, NCCL):
        names += variables.get(variable, "").lstrip("=^").split(",")
    return tuple(NetworkInterface(name, True, 0, (UNKNOWN,), ()) for name in dict.fromkeys(names) if name)
