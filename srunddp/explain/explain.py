"""Explain every value that srunddp decides for a rank: what decided it, and what was not chosen.

This module calls the same functions that decide these values in a run, so that an explanation
agrees with the run. If a decision fails, the values that depend on it are left out.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import Any

from srunddp.bootstrap.environment import mpi, slurm
from srunddp.bootstrap.environment.cpus import THREADS
from srunddp.bootstrap.environment.detect import KNOWN_LATER, detect, likely_ranks
from srunddp.bootstrap.environment.slurm import has_own
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network.ifaces_conf import IfacesConfig, load
from srunddp.bootstrap.network.ifaces_entry import (
    DEFAULT,
    Entries,
    IfacesEntry,
    entry_for,
    later_entries,
)
from srunddp.bootstrap.network.interface import (
    UNKNOWN,
    Links,
    SelectedInterface,
    select_elsewhere,
    select_interface,
)
from srunddp.bootstrap.process_group import numa
from srunddp.bootstrap.process_group.device import device_index
from srunddp.bootstrap.rendezvous import auth, discovery
from srunddp.errors import ConfigError, one_line
from srunddp.stage.offline import contradictions, offline
from srunddp.stage.paths import VARIABLE, StagedPaths

_ELSEWHERE = "not checked, as only a rank on that node can"
_PTY = "SLURM_PTY_PORT"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# An entry of CUDA_VISIBLE_DEVICES: a number, `GPU-8932f937-d72c-4106-c12f-20bd9faed9f6`, or a MIG
# instance.
_DEVICE = re.compile(r"\s*(\d+|(GPU|MIG)-\S+)\s*")
_CUDA_RULE = "no GPU: cpu; one: cuda:0; one for each rank of the node: cuda:LOCAL_RANK"
_THREADS_RULE = (
    "torch's choice, with Trainer at most this rank's CPUs; its share of them if ranks share the"
    " node"
)
_OFFLINE_RULE = (
    "--offline: this rank's CPUs by the ranks that share them, known after the rendezvous"
)


@dataclass(frozen=True)
class Row:
    """One value of a rank, and its explanation.

    Attributes:
        name: The name of the value, such as ``rank``.
        value: The value as text; ``?`` if it is not known.
        why: The variable, the line of a file or the rule that decided the value.
        not_chosen: What else could have decided it, each with the reason why it did not.
    """

    name: str
    value: str
    why: str = ""
    not_chosen: Sequence[str] = ()


@dataclass(frozen=True)
class ExplainOptions:
    """The options of ``srunddp explain``; None for an option that was not given.

    Attributes:
        backend: The value of ``--backend``.
        bind: The value of ``--bind``, ``none`` or ``auto``.
        ifaces: The value of ``--ifaces``.
        channel: The value of ``--channel``.
        ports: The ports that ``--port`` allows.
        limits: For the name of each time limit its seconds, and the option or variable that set it.
        offline: Whether ``--offline`` was given.
        staged: What ``stage push`` has copied to this node; None without ``--staged``.
    """

    backend: str | None = None
    bind: str = "none"
    ifaces: str | None = None
    channel: str | None = None
    ports: range | None = None
    limits: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    offline: bool = False
    staged: StagedPaths | None = None


def explain(
    variables: Mapping[str, str], asked: ExplainOptions, links: Links | None
) -> Explanation:
    """Explain the values of one rank.

    Args:
        variables: The rank's environment variables.
        asked: The options of ``srunddp explain``.
        links: The interfaces of the rank's node; None if the rank is on another machine.
    """
    # Guess the rank first, so that each line begins with the rank even if detect() fails.
    found = Explanation(variables, asked, links, likely_ranks(variables)[0])
    found.rows += found.decide()
    if asked.offline:
        found.notes += contradictions(variables)
    return found


@dataclass
class Explanation:
    """The explanation of one rank.

    Attributes:
        variables: The rank's environment variables.
        asked: The options of ``srunddp explain``.
        links: The interfaces of the rank's node; None if the rank is on another machine.
        rank: The rank's number; a guess until the launcher's variables have been read.
        rows: The values of the rank, without those that depend on a failed decision.
        notes: Remarks for the user that are not errors.
        errors: The errors that would end the run.
    """

    variables: Mapping[str, str]
    asked: ExplainOptions
    links: Links | None
    rank: int = 0
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[ConfigError] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The exit code of the first error; 0 if there is none."""
        return self.errors[0].exit_code if self.errors else 0

    @property
    def text(self) -> str:
        """The explanation as text: a line for each value, each alternative that was not chosen,
        each note and each error; each line begins with the rank.
        """
        lines = []
        for row in self.rows:
            lines.append(f"{row.name:<20} {row.value:<18} {row.why}".rstrip())
            lines += [f"{'':<20} not chosen: {over}" for over in row.not_chosen]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"error: {error} (exit code {error.exit_code})" for error in self.errors]
        return "".join(f"[rank {self.rank}] {one_line(line)}\n" for line in lines)

    @property
    def record(self) -> dict[str, Any]:
        """The explanation as the object that ``--json`` prints."""
        errors = [
            {name: getattr(each, name) for name in ("found", "expected", "hint")}
            for each in self.errors
        ]
        found = {
            "rank": self.rank,
            "exit_code": self.exit_code,
            "values": [asdict(row) for row in self.rows],
        }
        return {**found, "notes": self.notes, "errors": errors}

    def decide(self) -> Iterator[Row]:
        """Decide all values, and yield each with its reason.

        This sets :attr:`rank`, and adds to :attr:`notes` and :attr:`errors` on the way.
        """
        try:
            found = self._detect()
        except ConfigError as error:
            self.errors.append(error)
            found = None
        if found:
            self.rank = found.rank
            yield from self._identity(found)
        yield from self._network(found)
        yield Row(
            "backend",
            self.asked.backend or "auto",
            "--backend" if self.asked.backend else "the default",
        )
        yield self._device(found)
        yield self._binding(found)
        yield from (
            Row(name, f"{seconds:g} s", why) for name, (seconds, why) in self.asked.limits.items()
        )
        first, *others = [*self._set(*THREADS), ""]
        over = [f"{other}: torch reads both" for other in others if other]
        rule = _OFFLINE_RULE if self.asked.offline else _THREADS_RULE
        yield Row("threads", first.partition("=")[2] or UNKNOWN, first or rule, over)
        yield from self._offline_and_staged()

    def _set(self, *names: str) -> list[str]:
        """Return ``NAME=value`` for each of these variables that is set."""
        return [f"{name}={self.variables[name]}" for name in names if name in self.variables]

    def _detect(self) -> Environment:
        if self.links is not None:
            return detect(self.variables, channel=self.asked.channel)
        # The variables belong to a process on another machine. Leave out SLURM_PTY_PORT: with it,
        # detect() would examine the process of this machine that has the id in SLURM_TASK_PID. Pass
        # the impossible pid 0, because it is unknown whether srun itself started the process.
        known = {name: value for name, value in self.variables.items() if name != _PTY}
        self.notes += [
            f"{each}: treated as a step, not as a shell of srun --pty" for each in self._set(_PTY)
        ]
        return replace(
            detect(known, channel=self.asked.channel, pid=0),
            node=self.variables.get(slurm.NODE_NAME, ""),
        )

    def _identity(self, found: Environment) -> Iterator[Row]:
        """Explain what the launcher tells the rank (its number, the size of the world, its node),
        and the channel, the token and the proof with which it will find rank 0.
        """
        self.notes += found.notes
        values = {
            "launcher": found.launcher,
            "rank": found.rank,
            "local_rank": found.local_rank,
            "world_size": found.world_size,
            "local_world_size": found.local_world_size,
            "node": found.node or None,
            "channel": found.discovery.name,
        }
        for name, value in values.items():
            yield Row(
                name,
                UNKNOWN if value is None else str(value),
                found.sources.get(name, KNOWN_LATER),
                found.not_chosen.get(name, ()),
            )
        if found.step or found.master:
            yield Row("token", discovery.token(found), discovery.token_source(found))
        if found.discovery.publishes:
            yield Row("proof", "secret", f"carried over {found.discovery.name}")
        elif found.world_size != 1:
            kind = UNKNOWN if self.links is None else auth.choose_authenticator().kind
            yield Row("proof", kind, auth.CHOICE)

    def _network(self, found: Environment | None) -> Iterator[Row]:
        """Explain which ifaces.conf is used, which interface of the node it selects, which
        variables are exported for this interface, and where rank 0 is found.
        """
        try:
            config = load(self.asked.ifaces, self.variables)
        except ConfigError as error:
            self.errors += getattr(error, "each", (error,))
            return
        yield Row("ifaces.conf", config.path or "none", config.source, config.passed_over)
        if found:
            entry, chosen = self._interface(found, config)
        else:
            entry = None
            chosen = None
        unsure = _ELSEWHERE if self.links is None else "see the error"
        if chosen:
            others = later_entries(config.entries, entry, found.node) if found else []
            yield from _chosen_interface(chosen, others, unsure)
        elif entry and not entry.exact:
            yield Row(
                "interface", entry.rule.removeprefix("interface "), f"{entry.where}; {unsure}"
            )
        elif found and not found.node:
            yield Row(
                "interface",
                UNKNOWN,
                f"the node's name decides which entry of {config.path} counts",
            )
        if found and chosen and found.discovery.starts_mpi:
            for name, value in mpi.interface_variables(self.variables, chosen.name).items():
                yield Row(name, value, "interface, for MPI_Init")
        if found and found.world_size > 1:
            yield from self._rank_zero(found, config.entries, chosen)

    def _interface(
        self, found: Environment, config: IfacesConfig
    ) -> tuple[IfacesEntry | None, SelectedInterface | None]:
        """Return the entry of ifaces.conf for the rank's node, and the interface of the rank.

        The interface is selected among those of this machine. If the rank is on another machine, or
        nothing can be selected here, the interface is the one that would be selected if all
        interfaces that the entry names were up. The entry and the interface are each None if
        unknown.
        """
        alone = found.world_size == 1
        # If the node's name is unknown, its entry is known only if the first entry is for all
        # nodes: otherwise the name decides which entry counts.
        if config.entries[0].nodes == "*" and not found.node:
            entry = config.entries[0]
        else:
            entry = None
        try:
            if found.node or alone:
                entry = entry_for(config.entries, found.node, or_default=alone)
            if self.links is not None:
                return entry, select_interface(config.entries, found, self.variables, self.links)
        except ConfigError as error:
            self.errors.append(error)
        if not entry:
            return None, None
        return entry, select_elsewhere(entry, found, self.variables)

    def _rank_zero(
        self, found: Environment, entries: Entries, chosen: SelectedInterface | None
    ) -> Iterator[Row]:
        """Explain at which addresses the other ranks look for rank 0, and which ports rank 0 tries.

        Args:
            found: The environment of the explained rank.
            entries: The entries of ifaces.conf.
            chosen: The interface of the explained rank; None if it is unknown.
        """
        if found.discovery.publishes:
            yield Row(
                "rank 0",
                f"told over {found.discovery.name}",
                "its interface's address",
                found.not_chosen["master"],
            )
            yield self._ports_of_publisher(found, entries)
            return
        try:
            entry, name = discovery.rank_zero_name(found, entries)
            where = self._addresses_of_rank_zero(found, entries, entry, name, chosen)
        except ConfigError as error:
            self.errors.append(error)
            yield Row("rank 0", UNKNOWN, f"not found: {error}")
            return
        yield Row(
            "rank 0",
            _few(where),
            discovery.place_source(found, entry, self.variables),
            found.not_chosen["master"],
        )
        yield self._ports(found, entry)

    def _addresses_of_rank_zero(
        self,
        found: Environment,
        entries: Entries,
        entry: IfacesEntry,
        name: str,
        chosen: SelectedInterface | None,
    ) -> Sequence[object]:
        """Return the addresses and ports at which the other ranks look for rank 0. If the explained
        rank is on another machine, rank 0's name is returned in place of its addresses.

        Args:
            found: The environment of the explained rank.
            entries: The entries of ifaces.conf.
            entry: The entry for rank 0's node.
            name: The name by which the other ranks look for rank 0.
            chosen: The interface of the explained rank; None if it is unknown.

        Raises:
            ConfigError: The other ranks would not find rank 0 at these addresses.
        """
        forced = self.asked.ports
        if self.links is None:
            return [f"{name}:{port}" for port in discovery.rendezvous_ports(found, entry, forced)]
        interface = chosen if chosen and chosen.address != UNKNOWN else None
        # Rank 0 makes the same check at the start of a run, in rank_setup.bind().
        if interface and found.rank == 0 and not found.one_node:
            discovery.check_reachable(found, interface, entry, self.links)
        return discovery.candidate_addresses(found, interface, entries, forced)

    def _ports(self, found: Environment, entry: IfacesEntry) -> Row:
        ports = discovery.rendezvous_ports(found, entry, self.asked.ports)
        return Row(
            "ports",
            "any" if ports == [0] else _few(ports),
            discovery.ports_source(found, entry, self.asked.ports),
        )

    def _ports_of_publisher(self, found: Environment, entries: Entries) -> Row:
        """Explain on which ports rank 0 listens if it publishes its address: on those that the
        entry of ifaces.conf for its node allows.
        """
        # Rank 0 binds its port before it knows whether it can publish its address. If the other
        # ranks may have to work out the port themselves, rank 0 uses a port that they would try.
        if not discovery.working_out(found).publishes:
            with contextlib.suppress(ConfigError):
                entry, _ = discovery.rank_zero_name(found, entries)
                return self._ports(found, entry)
        if self.asked.ports or not any(each.ports for each in entries):
            return self._ports(found, DEFAULT)
        return Row("ports", UNKNOWN, "the entry of rank 0's node is not known")

    def _device(self, found: Environment | None) -> Row:
        if _VISIBLE not in self.variables:
            return Row("device", UNKNOWN, f"torch counts, as {_VISIBLE} is not set; {_CUDA_RULE}")
        shown = self._set(_VISIBLE)[0]
        local_size = found.local_world_size if found else None
        # CUDA ignores all entries after one that names no device.
        visible = len(list(takewhile(_DEVICE.fullmatch, self.variables[_VISIBLE].split(","))))
        if not visible:
            return Row("device", "cpu", f"{shown}: no GPU")
        why = f"{visible} visible, {shown}, if they exist"
        if found is None or (local_size is None and visible > 1):
            return Row("device", UNKNOWN, why)
        try:
            own = has_own(self.variables, local_size or 1, visible)
            return Row(
                "device",
                f"cuda:{device_index(found.local_rank, local_size or 1, visible, own=own)}",
                why,
            )
        except ConfigError as error:
            return Row("device", UNKNOWN, f"{why}: {error}")

    def _binding(self, found: Environment | None) -> Row:
        if self.asked.bind == "none" or found is None or self.links is None:
            return Row(
                "bind",
                self.asked.bind,
                "the default" if self.asked.bind == "none" else f"--bind; {_ELSEWHERE}",
            )
        # Call plan() instead of bind_near_gpu(), which would bind this process to these CPUs.
        binding = numa.plan(found, self.variables, os.sched_getaffinity(0))
        return Row("bind", binding.value, f"--bind=auto: {binding.why}", binding.not_chosen)

    def _offline_and_staged(self) -> Iterator[Row]:
        exported = offline(self.variables)
        staged = self.asked.staged
        if self.asked.offline:
            # List all variables of --offline, even those that the user has already set.
            for name in offline({}):
                value = exported.get(name) or self.variables[name]
                yield Row(name, value, "--offline" if name in exported else "exported")
        if staged:
            yield Row("staged", staged.folder, self._set(VARIABLE)[0])
            for place in staged.places:
                if place.here == place.path:
                    why = "seen here"
                else:
                    why = "a copy, as this node does not see it"
                yield Row(f"staged {place.role}", place.here, f"{place.path}: {why}")


def _chosen_interface(
    chosen: SelectedInterface, others: Sequence[str], unsure: str
) -> Iterator[Row]:
    """Explain the rank's interface, its address, and the variables that are exported for it.

    Args:
        chosen: The interface of the rank.
        others: A text for each later entry of ifaces.conf that matches the node, with the reason
            why it does not count.
        unsure: Why the address is unknown; not used if ``chosen`` has an address.
    """
    if chosen.address == UNKNOWN:
        yield Row(
            "interface",
            chosen.name,
            f"{chosen.source}; {unsure}",
            [*chosen.passed_over, *others],
        )
        yield Row("address", chosen.address, unsure)
    else:
        yield Row("interface", chosen.name, chosen.source, [*chosen.passed_over, *others])
        yield Row("address", chosen.address, f"of {chosen.name}")
    for name, value in chosen.exports.items():
        yield Row(name, value, chosen.export_sources[name])


def _few(found: Sequence[object]) -> str:
    return ", ".join(map(str, found[:3])) + (", …" if len(found) > 3 else "")
