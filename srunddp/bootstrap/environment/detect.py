"""Who am I? Ordered detectors read the environment; the innermost launcher wins and is
cross-checked.

Order: an MPI launcher, a step of Slurm, explicit variables, a single process. A real step is told
from an allocation, a batch body and an interactive shell, which inherit Slurm's variables and are
no ranks.

:func:`detect` goes three steps, of which each returns what it has decided and why: who this process
is, what else names a rank here, and by which ways rank 0 can be found.
"""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from srunddp.bootstrap.environment import mpi, slurm
from srunddp.bootstrap.environment.rank_process import RANK_PROCESS, is_below_rank
from srunddp.bootstrap.environment.rank_zero_discovery import (
    DISCOVERIES,
    EXPLICIT,
    PMI,
    discovery_named,
)
from srunddp.bootstrap.environment.types import (
    NO_LAUNCHER,
    Discovery,
    Environment,
    Identity,
    LauncherVariables,
    SlurmStep,
)
from srunddp.errors import ConfigError, Scope, one_of

CHANNELS = tuple(each.name for each in DISCOVERIES)
SRUN = LauncherVariables("Slurm", slurm.RANK, slurm.WORLD_SIZE, slurm.LOCAL_RANK)
USER = LauncherVariables(
    "explicit variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
)
KNOWN_LATER = "known after the rendezvous"
_ALL_LAUNCHERS = (*mpi.LAUNCHERS, SRUN, USER)
_NUMBERS = ("rank", "local_rank", "world_size", "local_world_size")
# A variable with the job's number of tasks, which is not the step's.
_OF_THE_JOB = "SLURM_NTASKS"


def detect(
    variables: Mapping[str, str], *, channel: str | None = None, pid: int | None = None
) -> Environment:
    """Find out who the process with these variables is, and how it finds rank 0.

    Args:
        variables: the environment variables of the process.
        channel: one of ``CHANNELS``, to use that way alone; None for all that are there.
        pid: the process id, which tells what srun started itself; 0 for a process of another
            machine, None for this one.

    Raises:
        ConfigError: launchers disagree, variables are incomplete or contradict each other, or the
            channel is not there.
    """
    if discovery_named(channel).overrides_launcher:
        identity = _explicit(variables)
        notes: tuple[str, ...] = ()
    else:
        identity, notes = _identify(variables, os.getpid() if pid is None else pid)
    objections = _objections_to_discoveries(identity, variables)
    # A rank's own exports are no contradiction, in what it starts.
    if not identity.master and RANK_PROCESS not in variables:
        _reject_contradictions(identity, variables)
        notes = (*notes, *_note_on_master(identity, variables))
    chosen = _choose_discoveries(identity, objections, variables, channel)
    return Environment(
        launcher=identity.launcher,
        rank=identity.rank,
        local_rank=identity.local_rank,
        world_size=identity.world_size,
        local_world_size=identity.local_world_size,
        node=identity.node,
        sources={**identity.sources, "channel": chosen.source},
        step=identity.step,
        master=identity.master,
        discoveries=chosen.discoveries,
        not_chosen={
            **_others_that_name_a_rank(identity, variables),
            "channel": chosen.not_chosen,
            "master": _ignored_master(identity, variables),
        },
        notes=notes,
    )


def likely_ranks(variables: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and local rank by the first variables that name them, for when :func:`detect` has
    failed; 0 where none does.
    """

    def first(*names: str) -> int:
        return next(
            (int(variables[name]) for name in names if variables.get(name, "").isdecimal()), 0
        )

    rank = first(*(each.rank for each in _ALL_LAUNCHERS))
    local_rank = first(*(each.local_rank for each in _ALL_LAUNCHERS))
    return rank, local_rank


# Who this process is.


def _identify(variables: Mapping[str, str], pid: int) -> tuple[Identity, tuple[str, ...]]:
    """Find out who the innermost launcher says that this process is, unchecked, and what to say
    about it.
    """
    if pid and is_below_rank(variables, pid):  # 0 where it is another process's environment
        return _single(variables), _single_notes("a process that a rank started")
    step = slurm.read_step(variables, pid) if slurm.in_step(variables) else None
    # One variable alone proves nothing: `srun --mpi=pmi2` sets PMI_RANK as Hydra does.
    launchers = [
        each
        for each in mpi.LAUNCHERS
        if {each.rank, each.local_rank, each.world_size} <= {*variables}
    ]
    # Before the step: mpirun within a step hands the variables of its daemon's task on to all of
    # its ranks.
    if launchers:
        return _from_mpi(variables, launchers, step), ()
    if step and not step.typed:
        return _from_slurm(variables, step), ()
    # Not earlier: beside PMIX_RANK, mpirun and a step have variables that tell all that is needed.
    mpi.reject_prterun(variables)
    if any(name in variables for name in EXPLICIT):
        return _explicit(variables), ()
    if step:
        return _single(variables), _single_notes("a shell of srun --pty")
    if slurm.in_allocation(variables):
        return _single(variables), _single_notes("an allocation of Slurm, but not a step")
    return _single(variables), ()


def _from_mpi(
    variables: Mapping[str, str], launchers: list[LauncherVariables], step: SlurmStep | None
) -> Identity:
    """Read who the first of these launchers says that this process is.

    Raises:
        ConfigError: another of them says something else, or Slurm, where srun started this very
            process.
    """
    identity = _from_variables(variables, launchers[0])
    # If srun has started this very process, SLURM_PROCID is its own and has to agree.
    # Otherwise it is that of mpirun's daemon on this node, and may differ.
    others = launchers[1:]
    if step and step.direct:
        others = [*others, SRUN]
    for other in others:
        _require_agreement(variables, identity, other.rank, other.world_size)
    if "I_MPI_HYDRA_UUID" in variables:
        # Its Hydra sets the same variables as MPICH's.
        return replace(identity, launcher="Intel MPI")
    return identity


def _from_slurm(variables: Mapping[str, str], step: SlurmStep) -> Identity:
    identity = _from_variables(variables, SRUN, step=step)
    # srun --mpi=pmi2 sets the same rank and size for PMI. If they differ, PMI_FD is that of another
    # launcher, and leads to other ranks.
    if all(name in variables for name in PMI):
        _require_agreement(variables, identity, "PMI_RANK", "PMI_SIZE")
    return identity


def _explicit(variables: Mapping[str, str]) -> Identity:
    """Read who the user's own variables say that this process is.

    Raises:
        ConfigError: some of them are missing, or impossible.
    """
    there = [name for name in EXPLICIT if variables.get(name)]
    missing = [name for name in EXPLICIT if name not in there]
    if missing:
        raise _incomplete(there, missing, variables)
    identity = _from_variables(variables, USER)
    if identity.rank >= identity.world_size:
        raise ConfigError(
            f"RANK={identity.rank} with WORLD_SIZE={identity.world_size}",
            expected=f"RANK from 0 to {identity.world_size - 1}",
            hint="correct one of the two",
        )
    return replace(identity, master=(variables["MASTER_ADDR"], _master_port(variables)))


def _master_port(variables: Mapping[str, str]) -> int:
    port = slurm.parse_uint(variables, "MASTER_PORT")
    if 0 < port < 65536:
        return port
    raise ConfigError(
        f"MASTER_PORT={port}",
        expected="a port from 1 to 65535",
        hint="correct it",
        scope=Scope.JOB,
    )


def _incomplete(there: list[str], missing: list[str], variables: Mapping[str, str]) -> ConfigError:
    """Return the error where only some of the explicit variables are set."""
    found = f"{one_of(missing, 'and')} missing"
    if there:
        found = f"{one_of(there, 'and')} set, {found}"
    if slurm.in_allocation(variables) and not slurm.in_step(variables):
        hint = "start the script with srun: this is not a step of Slurm"
    else:
        hint = "set them all, or unset them"
    return ConfigError(
        found, expected=f"all of {one_of(EXPLICIT, 'and')}, or none", hint=hint, scope=Scope.JOB
    )


def _single(variables: Mapping[str, str]) -> Identity:
    nobody = "no launcher was found"
    return Identity(
        launcher=NO_LAUNCHER,
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node=_node_name(variables),
        sources={
            "launcher": nobody,
            **dict.fromkeys(_NUMBERS, nobody),
            "node": _source_of_node(variables),
        },
    )


def _single_notes(where: str) -> tuple[str, ...]:
    """Return what to say where somebody may have wanted more than one process."""
    return (
        f"this is {where}: one process, world size 1; start with `srun srunddp …` for one per task",
    )


def _from_variables(
    variables: Mapping[str, str],
    names: LauncherVariables,
    *,
    step: SlurmStep | None = None,
) -> Identity:
    """Read who a launcher's variables say that this process is.

    Args:
        variables: the environment variables of the process.
        names: those of them in which the launcher tells its numbers.
        step: Slurm's view, where Slurm is the launcher.
    """
    set_by = {
        "rank": names.rank,
        "local_rank": names.local_rank,
        "world_size": names.world_size,
    }
    # os.environ takes texts alone.
    if names.local_world_size and names.local_world_size in variables:
        set_by["local_world_size"] = names.local_world_size
    numbers = {field: slurm.parse_uint(variables, name) for field, name in set_by.items()}
    local_world_size = numbers.get("local_world_size")
    if step and step.ranks_here:
        # Slurm has no variable with their number, but one with the ranks themselves.
        set_by["local_world_size"] = slurm.RANKS_HERE
        local_world_size = len(step.ranks_here)
    sources = {field: f"{name}={variables[name]}" for field, name in set_by.items()}
    if step:
        sources["launcher"] = f"{slurm.STEP_ID}={variables[slurm.STEP_ID]}, a step"
    else:
        sources["launcher"] = sources["rank"]
    sources["node"] = _source_of_node(variables)
    return Identity(
        launcher=names.name,
        rank=numbers["rank"],
        local_rank=numbers["local_rank"],
        world_size=numbers["world_size"],
        local_world_size=local_world_size,
        node=_node_name(variables),
        sources=sources,
        step=step,
    )


def _node_name(variables: Mapping[str, str]) -> str:
    # Slurm's name is right inside a step on this node only; under mpirun it is the daemon's, which
    # is the same node.
    return variables.get(slurm.NODE_NAME) or socket.gethostname()


def _source_of_node(variables: Mapping[str, str]) -> str:
    if slurm.NODE_NAME in variables:
        return slurm.NODE_NAME
    return "hostname"


# What else names a rank here.


def _require_agreement(
    variables: Mapping[str, str], identity: Identity, rank: str, world_size: str
) -> None:
    """Refuse a second launcher, told by these variables, that says something else.

    Args:
        variables: the environment variables of the process.
        identity: what the first launcher says.
        rank, world_size: the variables of the second one.

    Raises:
        ConfigError: they disagree.
    """
    if str(identity.rank) == variables[rank] and str(identity.world_size) == variables[world_size]:
        return
    one = f"{identity.sources['rank']} of {identity.sources['world_size']}"
    other = f"{rank}={variables[rank]} of {world_size}={variables[world_size]}"
    raise ConfigError(
        f"two launchers disagree: {one}, and {other}",
        expected="one launcher",
        hint=f"start from a shell that was not itself started by {identity.launcher}",
    )


def _reject_contradictions(identity: Identity, variables: Mapping[str, str]) -> None:
    """Refuse explicit variables beside a launcher that say something else than it does.

    Raises:
        ConfigError: one of them does.
    """
    for name, value in (
        ("RANK", identity.rank),
        ("WORLD_SIZE", identity.world_size),
        ("LOCAL_RANK", identity.local_rank),
    ):
        if name not in variables or variables[name] == str(value):
            continue
        raise ConfigError(
            f"{name}={variables[name]}, but {identity.sources[name.lower()]}",
            expected="the launcher's value, or none",
            hint=(
                f"remove `export {name}` from the job script, or let explicit variables rule"
                " with --channel env"
            ),
            # All ranks have one world size; of the ranks one may be right by chance.
            scope=Scope.JOB if name == "WORLD_SIZE" else Scope.RANK,
        )


def _set_master(variables: Mapping[str, str]) -> list[str]:
    return [
        f"{name}={variables[name]}" for name in ("MASTER_ADDR", "MASTER_PORT") if name in variables
    ]


def _ignored_master(identity: Identity, variables: Mapping[str, str]) -> tuple[str, ...]:
    """``MASTER_*`` beside a launcher, which tells itself where rank 0 is."""
    if identity.master:
        return ()
    return tuple(f"{each}: ignored under {identity.launcher}" for each in _set_master(variables))


def _note_on_master(identity: Identity, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the note for the user on what :func:`_ignored_master` finds."""
    ignored = _set_master(variables)
    if not ignored:
        return ()
    return (
        f"{' and '.join(ignored)} ignored: {identity.launcher} tells where rank 0 is (--channel env"
        " lets them rule)",
    )


def _others_that_name_a_rank(
    identity: Identity, variables: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Find what else in the variables names the launcher or its numbers, and did not count."""
    not_chosen = {
        "launcher": tuple(
            f"{each.name}: {each.rank}={variables[each.rank]}"
            for each in _ALL_LAUNCHERS
            if each.rank in variables and each.rank != identity.rank_variable
        )
    }
    for number in _NUMBERS:
        others = (
            f"{name}={variables[name]}"
            for name in dict.fromkeys(_names_of(number))
            if name in variables
        )
        source = identity.sources.get(number, KNOWN_LATER)
        not_chosen[number] = tuple(each for each in others if each != source)
    return not_chosen


def _names_of(number: str) -> Iterator[str]:
    """Return the variables in which any launcher tells one of the numbers."""
    for each in _ALL_LAUNCHERS:
        if name := getattr(each, number):
            yield name
    if number == "world_size":
        yield _OF_THE_JOB


# How this process finds rank 0.


class _ChosenDiscoveries(NamedTuple):
    """The ways to rank 0 that this rank uses, and why.

    Attributes:
        discoveries: the ways, the preferred one first; empty for a single process.
        source: what decided the first of them, and which follow where that does not work.
        not_chosen: the ways that are not the first of them, and why.
    """

    discoveries: tuple[Discovery, ...]
    source: str
    not_chosen: tuple[str, ...]


def _choose_discoveries(
    identity: Identity,
    objections: Mapping[Discovery, str],
    variables: Mapping[str, str],
    channel: str | None,
) -> _ChosenDiscoveries:
    """Choose among the ways to rank 0: the one that was asked for, or all that can be used.

    Args:
        identity: who this process is.
        objections: the ways that are considered, and why this rank cannot use each; empty where it
            can.
        variables: the environment variables of the process.
        channel: the name of the one that was asked for; None where none was.

    Raises:
        ConfigError: the one that was asked for is not there, or none is.
    """
    usable = sorted(
        (each for each, objection in objections.items() if not objection),
        key=lambda each: each.is_last_resort(identity),
    )
    if channel is None:
        _require_any(identity, usable)
        later = f"comes after {usable[0].name}" if usable else ""
    else:
        asked = discovery_named(channel)
        _require_asked(identity, usable, asked)
        later = f"--channel {channel} was asked for"
        if identity.world_size != 1:
            usable = [asked]
    if not usable:
        return _ChosenDiscoveries((), "none is needed", ())
    first, *others = usable
    reasons = [first.source(identity, variables), *(f"then {other.name}" for other in others)]
    if channel is not None:
        reasons = ["--channel", *reasons]
    not_chosen: tuple[str, ...] = ()
    if identity.world_size != 1:
        not_chosen = tuple(
            f"{each.name}: {objection or later}"
            for each, objection in objections.items()
            if each is not first
        )
    return _ChosenDiscoveries(tuple(usable), ", ".join(reasons), not_chosen)


def _objections_to_discoveries(
    identity: Identity, variables: Mapping[str, str]
) -> dict[Discovery, str]:
    """For each way to rank 0, why this rank cannot use it; a single process needs none."""
    if identity.is_single:
        return {}
    return {each: each.why_unavailable(identity, variables) for each in DISCOVERIES}


def _require_any(identity: Identity, usable: Sequence[Discovery]) -> None:
    if usable or identity.world_size == 1:
        return
    raise ConfigError(
        f"{identity.launcher} started {identity.world_size} ranks, which cannot meet without"
        " mpi4py",
        expected="mpi4py, or a launcher with PMI-1",
        hint="pip install mpi4py for this MPI",
        scope=Scope.JOB,
    )


def _require_asked(identity: Identity, usable: Sequence[Discovery], asked: Discovery) -> None:
    if identity.is_single:
        raise ConfigError(
            f"--channel {asked.name}, and no launcher was found",
            expected="a launcher",
            hint=asked.hint,
        )
    if identity.world_size == 1 or asked in usable:
        return
    names = [each.name for each in usable]
    names += [each.name for each in DISCOVERIES if each.overrides_launcher]
    raise ConfigError(
        f"--channel {asked.name} is not there under {identity.launcher}",
        expected=f"one of {', '.join(dict.fromkeys(names))}",
        hint=asked.hint,
        scope=Scope.JOB,
    )
