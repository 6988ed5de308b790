"""Every value that srunddp decides for a rank, what decided it, and what was passed over.

It prints the decisions that the steps of a run return, and goes on where one of them is wrong, as that is when it is
asked.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence

from srunddp.bootstrap.environment import mpi, slurm
from srunddp.bootstrap.environment.cpus import THREADS
from srunddp.bootstrap.environment.detect import SRUN, USER, Environment, likely_ranks
from srunddp.bootstrap.environment.rank_zero_discovery import DISCOVERIES
from srunddp.bootstrap.network.ifaces_conf import AUTO, DEFAULT, IfacesEntry, entry_for
from srunddp.bootstrap.process_group.device import device_index, has_own
from srunddp.bootstrap.rendezvous import discovery
from srunddp.bootstrap.rendezvous.auth import MUNGE_SOCKET
from srunddp.errors import ConfigError
from srunddp.explain.context import (
    LATER,
    SEE_ERROR,
    UNKNOWN,
    ExplainContext,
    ExplainOptions,
    Explanation,
    NodeFacts,
    Row,
    context_of,
)
from srunddp.stage.enter import VARIABLE
from srunddp.stage.paths import offline

_LAUNCHERS = (*mpi.LAUNCHERS, SRUN, USER)
_JOBS, _PARTIAL = "the job's, not the step's", "not all that a rank needs"
# What names a number, and never decides it.
_NEVER = {
    "rank": {"PMIX_RANK": _PARTIAL},
    "local_rank": {"PMI_LOCAL_RANK": _PARTIAL},
    "world_size": dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), _JOBS),
    "local_world_size": {
        **{"PMI_LOCAL_SIZE": _PARTIAL, slurm.RANKS_HERE: "the step's", slurm.TASKS_PER_NODE: "of all nodes"},
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"), _JOBS),
    },
}
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OTHER_NUMBERS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "NVIDIA_VISIBLE_DEVICES")
_CUDA_RULE = "no GPU: cpu; one: cuda:0; one for each rank of the node: cuda:LOCAL_RANK"
_THREADS_RULE = "torch's choice, with Trainer at most this rank's CPUs; its share of them where ranks share the node"
_OFFLINE_RULE = "--offline: this rank's CPUs by the ranks that share them, known when they meet"


def explain(variables: Mapping[str, str], asked: ExplainOptions, here: NodeFacts | None) -> Explanation:
    """Explain one rank.

    Args:
        variables: its environment.
        asked: what the command line says.
        here: what is seen on its node; None for the environment of a process of another machine.
    """
    case = context_of(variables, asked, here)
    rows = tuple(_rows(case))  # may add errors
    rank = case.environment.rank if case.environment else likely_ranks(variables)[0]
    return Explanation(rank, rows, tuple(case.notes), tuple(case.errors))


def _rows(case: ExplainContext) -> Iterator[Row]:
    """All rows; what is wrong with rank 0's address is added to the errors of the case."""
    yield _launcher(case)
    yield from (_number(case, field) for field in _NEVER)
    yield _node(case)
    yield from _network(case)
    yield from _exports(case)
    if found := case.environment:
        yield _channel(case, found)
        yield from _rank_zero(case, found)
        yield _token(case, found)
        yield _proof(case, found)
    else:
        names = ("channel", "rank 0", "ports", "store port", "token", "proof")
        yield from (Row(name, UNKNOWN, SEE_ERROR) for name in names)
    yield Row("backend", case.asked.backend or "auto", "--backend" if case.asked.backend else "the default")
    yield _device(case)
    yield from (Row(name, f"{seconds:g} s", why) for name, (seconds, why) in case.asked.limits.items())
    if re.fullmatch(r"\d{1,11}", end := case.variables.get("SLURM_JOB_END_TIME", "")):
        at = datetime.datetime.fromtimestamp(int(end), datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        yield Row("job's end", at, case.shown("SLURM_JOB_END_TIME"))
    yield _threads(case)
    yield from _offline_and_staged(case)


def _launcher(case: ExplainContext) -> Row:
    found = case.environment
    passed_over = tuple(_other_launchers(case, found))
    if found is None:
        return Row("launcher", UNKNOWN, SEE_ERROR, passed_over)
    names = [found.sources[field].partition("=")[0] for field in ("rank", "local_rank", "world_size")]
    why = found.sources["rank"] if found.is_single else f"{', '.join(names)} are set"
    why = f"{case.shown(slurm.STEP_ID)}, a step" if found.step else why
    return Row("launcher", found.launcher, why, passed_over)


def _other_launchers(case: ExplainContext, found: Environment | None) -> Iterator[str]:
    first = SEE_ERROR if found is None else "see the note" if found.is_single else f"{found.launcher} comes first"
    decided = found.sources["rank"].partition("=")[0] if found else ""
    for launcher in _LAUNCHERS:
        if launcher.rank in case.variables and launcher.rank != decided:
            needed = (launcher.local_rank, launcher.world_size)
            missing = [name for name in needed if name not in case.variables]
            why = f"{' and '.join(missing)} not set" if missing else first
            yield f"{launcher.name}: {case.shown(launcher.rank)}: {why}"
    if slurm.in_allocation(case.variables) and not slurm.in_step(case.variables):
        yield f"Slurm: {case.shown('SLURM_JOB_ID')}: an allocation or its shell, not a step"


def _number(case: ExplainContext, field: str) -> Row:
    found, value = case.environment, getattr(case.environment, field, None)
    source = found.sources.get(field, LATER) if found else SEE_ERROR
    of_launcher = f", and the launcher is {found.launcher}" if found else ""
    names = {getattr(launcher, field): f"of {launcher.name}{of_launcher}" for launcher in _LAUNCHERS}
    passed_over = []
    for name, why in (names | _NEVER[field]).items():
        if name and name in case.variables and case.shown(name) != source:
            agrees = found and not found.is_single and name in names and case.variables[name] == str(value)
            passed_over.append(f"{case.shown(name)}: {'agrees' if agrees else why}")
    return Row(field, UNKNOWN if value is None else str(value), source, tuple(passed_over))


def _node(case: ExplainContext) -> Row:
    node = case.environment.node if case.environment else case.variables.get(slurm.NODE_NAME, "")
    others = {name: case.variables.get(name, "") for name in ("PMI_HOSTNAME", "PMIX_HOSTNAME")}
    source = slurm.NODE_NAME if slurm.NODE_NAME in case.variables else "hostname"
    if case.here and source != "hostname":
        others["hostname"] = case.here.hostname
    seen = [(name, value) for name, value in others.items() if value]
    over = tuple(f"{name}={value}: {'agrees' if value == node else 'not read'}" for name, value in seen)
    return Row("node", node or UNKNOWN, source if node else f"{source} there, as {slurm.NODE_NAME} is not set", over)


def _channel(case: ExplainContext, found: Environment) -> Row:
    taken, asked = found.discovery, case.asked.channel
    if case.alone and not found.discoveries:
        return Row("channel", taken.name, "none is needed")
    later = f"--channel {asked} was asked for" if asked else f"comes after {taken.name}"
    others = [] if case.alone else [each for each in DISCOVERIES if each is not taken]
    over = tuple(f"{each.name}: {each.why_unavailable(found, case.variables) or later}" for each in others)
    if not found.discoveries:
        return Row("channel", UNKNOWN, SEE_ERROR, over)
    why = [taken.source(found, case.variables), *(f"then {name}" for name in found.channels[1:])]
    return Row("channel", taken.name, ", ".join(["--channel", *why] if asked == taken.name else why), over)


def _network(case: ExplainContext) -> Iterator[Row]:
    """The file of interface entries, this node's interface and its address."""
    found, config, chosen, entry = case.environment, case.config, case.interface, case.entry
    later = tuple(_later_entries(case))
    unsure = SEE_ERROR if case.here else "not checked, as this is not that node"
    yield (
        Row("ifaces.conf", config.path or "none", config.source, config.passed_over)
        if config
        else Row("ifaces.conf", UNKNOWN, SEE_ERROR)
    )
    if chosen is None:
        name, why = UNKNOWN, SEE_ERROR
        if entry and entry.interfaces == (AUTO,):
            name, why = AUTO, f"{entry.where}; {unsure}"
        elif found and config and not found.node:
            why = f"the node's name decides which entry of {config.path} counts"
        yield Row("interface", name, why, later)
        yield Row("address", UNKNOWN, "that interface's")
        return
    checked = chosen.address != UNKNOWN
    why = chosen.source if checked else f"{chosen.source}; {unsure}"
    yield Row("interface", chosen.name, why, (*chosen.passed_over, *later))
    own = [link for link in (case.here.links if case.here and checked else ()) if link.name == chosen.name]
    others = [address for link in own for address in link.addresses if address != chosen.address]
    over = tuple(f"{address}: of it as well" for address in others)
    yield Row("address", chosen.address, f"of {chosen.name}" if checked else unsure, over)


def _later_entries(case: ExplainContext) -> Iterator[str]:
    entries = case.config.entries if case.config else ()
    if case.entry in entries and case.environment and case.environment.node:
        for later in entries[entries.index(case.entry) + 1 :]:
            if later.matches(case.environment.node):
                yield f"{later.where}, nodes {later.nodes}: matches too, but {case.entry.where} comes first"


def _exports(case: ExplainContext) -> Iterator[Row]:
    """The variables that are exported for the interface."""
    found, chosen, entry = case.environment, case.interface, case.entry
    of_entry = entry.env if entry else {}
    for name, value in (chosen.exports if chosen else of_entry).items():
        decided = entry.where if entry and name in of_entry else chosen.source if chosen else ""
        if not case.variables.get(name):
            yield Row(name, value, decided)
        else:
            over = (f"{name}={of_entry[name]} of {decided}: what is exported stays",) if name in of_entry else ()
            yield Row(name, case.variables[name], "exported", over)
    if found and chosen and found.discovery.starts_mpi:
        for name, value in mpi.interface_variables(case.variables, chosen.name).items():
            yield Row(name, value, "interface, for MPI_Init")


def _rank_zero(case: ExplainContext, found: Environment) -> Iterator[Row]:
    """Rank 0's addresses, the ports of the rendezvous and of the store."""
    forced = case.asked.ports
    if case.config is None or not (case.alone or found.discoveries):
        yield from (Row(name, UNKNOWN, SEE_ERROR) for name in ("rank 0", "ports", "store port"))
        return
    entry = case.entry if case.alone else _entry_of_rank_zero(found, case.config.entries)
    limits = f"--port {forced[0]}-{forced[-1]}" if forced else ""
    if not forced and entry and entry.ports:
        limits = f"ports: {entry.ports[0]}-{entry.ports[-1]} of {entry.where}"
    unknown = "" if entry or forced else "the entry of rank 0's node is not known"
    if not case.alone:
        yield _address(case, found, case.config.entries)
        tried, rule = (
            discovery.rendezvous_ports(found, entry or DEFAULT, forced),
            discovery.working_out(found).ports_rule,
        )
        over = [f"{shown}: {limits.split()[0]} rules" for shown in case.there("SLURM_STEP_RESV_PORTS") if limits]
        over += [f"ports: of {entry.where}: --port rules"] if entry and entry.ports and forced else []
        value = UNKNOWN if unknown else "any" if tried == [0] else _few(tried)
        yield Row("ports", value, unknown or "; ".join(filter(None, (limits, rule))), tuple(over))
    value = UNKNOWN if unknown else "one of them" if limits else "any"
    yield Row("store port", value, unknown or limits or "the kernel's choice")


def _entry_of_rank_zero(found: Environment, entries: tuple[IfacesEntry, ...]) -> IfacesEntry | None:
    if not any(entry.ports or entry.address for entry in entries):
        return DEFAULT  # whichever it is
    try:
        if found.rank == 0 and found.node:
            return entry_for(entries, found.node)
        return None if discovery.working_out(found).publishes else discovery.rank_zero_name(found, entries)[0]
    except ConfigError:
        return None


def _address(case: ExplainContext, found: Environment, entries: tuple[IfacesEntry, ...]) -> Row:
    passed_over = [] if found.master else case.there("MASTER_ADDR", "MASTER_PORT")
    over = tuple(f"{shown}: ignored below {found.launcher}" for shown in passed_over)
    if found.discovery.publishes:
        return Row("rank 0", f"told over {found.discovery.name}", "its interface's address", over)
    try:
        entry, name = discovery.rank_zero_name(found, entries)
        where: Sequence[object] = [
            f"{name}:{port}" for port in discovery.rendezvous_ports(found, entry, case.asked.ports)
        ]
        if case.here:
            chosen = case.interface if case.interface and case.interface.address != UNKNOWN else None
            if found.rank == 0 and chosen and not found.one_node:
                discovery.check_reachable(found, chosen, entry, case.here.links)
            where = discovery.candidate_addresses(found, chosen, entries, case.asked.ports)
    except ConfigError as error:
        case.errors.append(error)
        return Row("rank 0", UNKNOWN, f"not found: {error}", over)
    why = [discovery.working_out(found).source(found, case.variables)]
    why += [f"address: of {entry.where}"] if entry.address else []
    why += ["all ranks share one node"] if found.one_node else []
    why += [] if case.here or found.one_node else ["a name that is not looked up here"]
    return Row("rank 0", _few(where), ", ".join(why), over)


def _few(found: Sequence[object]) -> str:
    return ", ".join(map(str, found[:3])) + (", …" if len(found) > 3 else "")


def visible_devices(text: str) -> int:
    """How many devices ``CUDA_VISIBLE_DEVICES`` lets through, at most: CUDA stops at the first that is none."""
    count = 0
    for item in text.split(",") if text.strip() else ():
        if not re.fullmatch(r"\s*(\d+|(GPU|MIG)-\S+)\s*", item):
            break
        count += 1
    return count


def _device(case: ExplainContext) -> Row:
    over = tuple(f"{shown}: need not be CUDA's numbers" for shown in case.there(*_OTHER_NUMBERS))
    found, local_size = case.environment, getattr(case.environment, "local_world_size", None)
    if _VISIBLE not in case.variables:
        return Row("device", UNKNOWN, f"torch counts, as {_VISIBLE} is not set; {_CUDA_RULE}", over)
    if not (visible := visible_devices(case.variables[_VISIBLE])):
        return Row("device", "cpu", f"{case.shown(_VISIBLE)}: no GPU", over)
    why = f"{visible} visible, {case.shown(_VISIBLE)}, if they are there"
    if found is None or (local_size is None and visible > 1):
        return Row("device", UNKNOWN, why, over)
    own = has_own(case.variables, local_size or 1, visible)
    try:
        index = device_index(found.local_rank, local_size or 1, visible, own=own)
    except ConfigError as error:
        return Row("device", UNKNOWN, f"{why}: {error}", over)
    rule = "the first of its own" if own or visible == 1 else f"local rank {found.local_rank}"
    return Row("device", f"cuda:{index}", f"{rule} of {why}", over)


def _token(case: ExplainContext, found: Environment) -> Row:
    if found.step or found.master:
        what = "job, step and restart count; TORCHELASTIC_RUN_ID" if found.step else "MASTER_ADDR:MASTER_PORT"
        return Row("token", discovery.token(found), what)
    return Row("token", "random", "of this process" if case.alone else f"of rank 0, {LATER}")


def _proof(case: ExplainContext, found: Environment) -> Row:
    socket = case.there(MUNGE_SOCKET)
    if case.alone or not found.discoveries:
        return Row("proof", "none", "a single process") if case.alone else Row("proof", UNKNOWN, SEE_ERROR)
    if found.discovery.publishes:
        over = tuple(f"{shown}: not needed" for shown in socket)
        return Row("proof", "secret", f"carried over {found.discovery.name}", over)
    if case.here is None:
        return Row("proof", UNKNOWN, "munge where it works on that node, else none")
    kind = case.here.proof()
    works = f"munge {'works' if kind == 'munge' else 'does not work'} on this node"
    return Row("proof", kind, ", ".join([works, *socket]), (f"secret: {found.discovery.name} carries none",))


def _threads(case: ExplainContext) -> Row:
    """Of torch in a script without ``Trainer``'s setting."""
    first, *others = [*case.there(*THREADS), ""]
    over = tuple(f"{other}: torch reads both" for other in others if other)
    rule = _OFFLINE_RULE if case.asked.offline else _THREADS_RULE
    return Row("threads", first.partition("=")[2] or UNKNOWN, first or rule, over)


def _offline_and_staged(case: ExplainContext) -> Iterator[Row]:
    exported, staged = offline(case.variables), case.asked.staged
    for name in offline({}) if case.asked.offline else ():
        yield Row(name, exported.get(name) or case.variables[name], "--offline" if name in exported else "exported")
    if staged:
        yield Row("staged", staged.folder, case.shown(VARIABLE))
        for place in staged.places:
            why = "seen here" if place.here == place.path else "a copy, as this node does not see it"
            yield Row(f"staged {place.role}", place.here, f"{place.path}: {why}")
