"""Find out from the environment variables which rank a process is, and how it finds rank 0.

The first of these decides: an MPI launcher, a step of Slurm, explicit variables. Without any of
them the process is a single one, with world size 1. The variables of other launchers must agree
with those of the launcher that decides.
A process in an allocation, a batch script or an interactive shell has Slurm's variables, but is not
a rank.

:func:`detect` takes three steps, and each returns what it decided and why: who this process is,
which other variables name a rank, and by which ways rank 0 can be found.
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
# The number of tasks of the job; a step of the job may have another number.
_OF_THE_JOB = "SLURM_NTASKS"


def detect(
    variables: Mapping[str, str], *, channel: str | None = None, pid: int | None = None
) -> Environment:
    """Find out who the process with these variables is, and how it finds rank 0.

    Args:
        variables: the environment variables of the process.
        channel: one of ``CHANNELS``, to use only that way to rank 0; None for all usable ways.
        pid: the id of the process, which shows whether srun itself started the process; 0 for a
            process of another machine, None for this process.

    Raises:
        ConfigError: launchers disagree, variables are incomplete or contradict each other, or the
            channel cannot be used.
    """
    if discovery_named(channel).overrides_launcher:
        identity = _explicit(variables)
        notes: tuple[str, ...] = ()
    else:
        identity, notes = _identify(variables, os.getpid() if pid is None else pid)
    objections = _objections_to_discoveries(identity, variables)
    # In a process that a rank started, RANK and the others do not contradict the launcher: the rank
    # itself has exported them.
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
    """Return the first rank and the first local rank that any launcher's variables give, each 0 if
    none does. This serves messages after :func:`detect` has failed.
    """

    def first(*names: str) -> int:
        return next(
            (int(variables[name]) for name in names if variables.get(name, "").isdecimal()), 0
        )

    rank = first(*(each.rank for each in _ALL_LAUNCHERS))
    local_rank = first(*(each.local_rank for each in _ALL_LAUNCHERS))
    return rank, local_rank


# The functions from here on decide who this process is.


def _identify(variables: Mapping[str, str], pid: int) -> tuple[Identity, tuple[str, ...]]:
    """Return the identity that the innermost launcher gives this process, and notes for the
    user.
    """
    if pid and is_below_rank(variables, pid):  # 0 stands for a process of another machine
        return _single(variables), _single_notes("a process that a rank started")
    step = slurm.read_step(variables, pid) if slurm.in_step(variables) else None
    # Take an MPI launcher into account only if all three of its variables are set: `srun
    # --mpi=pmi2` too sets some of Hydra's variables, such as PMI_RANK, but not all three.
    launchers = [
        each
        for each in mpi.LAUNCHERS
        if {each.rank, each.local_rank, each.world_size} <= {*variables}
    ]
    # MPI launchers come before the step: if mpirun runs within a step, its ranks inherit the
    # variables of the task that is mpirun's daemon.
    if launchers:
        return _from_mpi(variables, launchers, step), ()
    if step and not step.typed:
        return _from_slurm(variables, step), ()
    # Check for prterun only after mpirun and Slurm's steps were ruled out: their ranks have
    # PMIX_RANK too, but with all other numbers.
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
    """Return the identity that the first of these launchers gives this process.

    Raises:
        ConfigError: another of these launchers gives a different rank or world size; or srun itself
            started this process, and Slurm gives a different one.
    """
    identity = _from_variables(variables, launchers[0])
    # If srun itself started this process, SLURM_PROCID is this process's and has to agree.
    # Otherwise it is the number of mpirun's daemon on this node, and may differ.
    others = launchers[1:]
    if step and step.direct:
        others = [*others, SRUN]
    for other in others:
        _require_agreement(variables, identity, other.rank, other.world_size)
    if "I_MPI_HYDRA_UUID" in variables:
        # Intel MPI's Hydra sets the same variables as MPICH's.
        return replace(identity, launcher="Intel MPI")
    return identity


def _from_slurm(variables: Mapping[str, str], step: SlurmStep) -> Identity:
    identity = _from_variables(variables, SRUN, step=step)
    # srun --mpi=pmi2 sets the same rank and size for PMI. If they differ, PMI_FD belongs to another
    # launcher, and connects to other ranks.
    if all(name in variables for name in PMI):
        _require_agreement(variables, identity, "PMI_RANK", "PMI_SIZE")
    return identity


def _explicit(variables: Mapping[str, str]) -> Identity:
    """Return the identity that the user's explicit variables give this process.

    Raises:
        ConfigError: some of these variables are missing, or have an impossible value.
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
    """Return the error for explicit variables of which some, or all, are missing."""
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
    """Return the note for a process that runs alone although the user may have wanted several
    ranks.

    Args:
        where: what this process is, as the note says it after "this is".
    """
    return (
        f"this is {where}: one process, world size 1; start with `srun srunddp …` for one per task",
    )


def _from_variables(
    variables: Mapping[str, str],
    names: LauncherVariables,
    *,
    step: SlurmStep | None = None,
) -> Identity:
    """Return the identity that a launcher's variables give this process.

    Args:
        variables: the environment variables of the process.
        names: the launcher's name, and the names of the variables that it sets.
        step: the Slurm step of this process, if srun started it.
    """
    set_by = {
        "rank": names.rank,
        "local_rank": names.local_rank,
        "world_size": names.world_size,
    }
    # Test the name first: if the launcher has no such variable it is None, and `None in os.environ`
    # is a TypeError.
    if names.local_world_size and names.local_world_size in variables:
        set_by["local_world_size"] = names.local_world_size
    numbers = {field: slurm.parse_uint(variables, name) for field, name in set_by.items()}
    local_world_size = numbers.get("local_world_size")
    if step and step.ranks_here:
        # Slurm has no variable for the number of ranks on a node, but one that lists them.
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
    # In a step, Slurm sets the variable on each node. Under mpirun the ranks have it from mpirun's
    # daemon, which runs on the same node.
    return variables.get(slurm.NODE_NAME) or socket.gethostname()


def _source_of_node(variables: Mapping[str, str]) -> str:
    if slurm.NODE_NAME in variables:
        return slurm.NODE_NAME
    return "hostname"


# The functions from here on find and check other variables that name a rank.


def _require_agreement(
    variables: Mapping[str, str], identity: Identity, rank: str, world_size: str
) -> None:
    """Require that a second launcher gives this process the same rank and world size.

    Args:
        variables: the environment variables of the process.
        identity: what the first launcher says.
        rank, world_size: the names of the second launcher's variables.

    Raises:
        ConfigError: the two launchers disagree.
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
    """Require that ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``, if set, agree with the launcher.

    Raises:
        ConfigError: one of them has another value.
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
                f"remove `export {name}` from the job script, or let explicit variables decide"
                " with --channel env"
            ),
            # A wrong WORLD_SIZE is wrong on all ranks; a wrong RANK may be right on one rank.
            scope=Scope.JOB if name == "WORLD_SIZE" else Scope.RANK,
        )


def _set_master(variables: Mapping[str, str]) -> list[str]:
    return [
        f"{name}={variables[name]}" for name in ("MASTER_ADDR", "MASTER_PORT") if name in variables
    ]


def _ignored_master(identity: Identity, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each ``MASTER_*`` variable that is set but does not count, because the
    launcher tells where rank 0 is.
    """
    if identity.master:
        return ()
    return tuple(f"{each}: ignored under {identity.launcher}" for each in _set_master(variables))


def _note_on_master(identity: Identity, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the note for the user about ``MASTER_*`` variables that a launcher overrides."""
    ignored = _set_master(variables)
    if not ignored:
        return ()
    return (
        f"{' and '.join(ignored)} ignored: {identity.launcher} tells where rank 0 is (--channel env"
        " lets them decide)",
    )


def _others_that_name_a_rank(
    identity: Identity, variables: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return the variables that name another launcher, or give a rank's number although another
    variable decided it: for ``launcher`` and each of ``_NUMBERS``, lines for the user.
    """
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
    """Yield the names of all launchers' variables for one of ``_NUMBERS``."""
    for each in _ALL_LAUNCHERS:
        if name := getattr(each, number):
            yield name
    if number == "world_size":
        yield _OF_THE_JOB


# The functions and classes from here on choose how this process finds rank 0.


class _ChosenDiscoveries(NamedTuple):
    """The ways to rank 0 that this rank uses, and why.

    Attributes:
        discoveries: the ways, the preferred one first; empty for a single process.
        source: what decided the first way, and which ways are tried after it, for messages.
        not_chosen: all other ways, and why each is not the first.
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
    """Choose the ways to rank 0: the one that ``--channel`` asks for, or all that this rank can
    use.

    Args:
        identity: who this process is.
        objections: for each way, why this rank cannot use it; empty if it can.
        variables: the environment variables of the process.
        channel: the way's name that ``--channel`` gives; None without the option.

    Raises:
        ConfigError: this rank cannot use the way that was asked for, or any way at all.
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
    """Return for each way to rank 0 why this rank cannot use it, or an empty text if it can; no
    ways at all for a single process.
    """
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
        f"--channel {asked.name} is not available under {identity.launcher}",
        expected=f"one of {', '.join(dict.fromkeys(names))}",
        hint=asked.hint,
        scope=Scope.JOB,
    )
