"""Who am I? Ordered detectors read the environment; the innermost launcher wins and is
cross-checked.

Order: an MPI launcher, a step of Slurm, explicit variables, a single process. A real step is told
from an allocation, a batch body and an interactive shell, which inherit Slurm's variables and are
no ranks.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from srunddp.bootstrap.environment import mpi, slurm
from srunddp.bootstrap.environment import rank_zero_discovery as ways
from srunddp.bootstrap.environment.rank_process import RANK_PROCESS, is_below_rank
from srunddp.bootstrap.environment.rank_zero_discovery import (
    DISCOVERIES,
    EXPLICIT,
    Discovery,
    discovery_named,
)
from srunddp.errors import ConfigError, Scope, one_of

CHANNELS = tuple(each.name for each in DISCOVERIES)
NO_LAUNCHER = "none"
SRUN = mpi.LauncherVariables("Slurm", slurm.RANK, slurm.WORLD_SIZE, slurm.LOCAL_RANK)
USER = mpi.LauncherVariables(
    "explicit variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
)


@dataclass(frozen=True)
class Environment:
    """Who this process is, and which launcher said so.

    Attributes:
        launcher: its name: Slurm, Open MPI, Hydra, …, ``explicit variables``, or ``none``.
        rank, local_rank, world_size: torch's terms.
        local_world_size: ranks on this node; None before the rendezvous, where nothing tells.
        node: this node's name, ``SLURMD_NODENAME`` or the hostname.
        discoveries: the ways to learn where rank 0 is that can be used, the preferred one first;
            empty for a single process.
        sources: for each value the variable that decided it.
        notes: lines to be said once, such as what was ignored and why.
        step: Slurm's view, where a step of Slurm is the launcher.
        master: ``MASTER_ADDR`` and ``MASTER_PORT`` where explicit variables rule.
        node_sizes: with spare nodes, the ranks of each other node, in their order.
        spares: tasks of the spare nodes, which have the numbers from ``world_size`` on in place of
            a rank.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None
    node: str
    sources: Mapping[str, str]
    discoveries: tuple[Discovery, ...] = ()
    notes: tuple[str, ...] = ()
    step: slurm.SlurmStep | None = None
    master: tuple[str, int] | None = None
    node_sizes: tuple[int, ...] = ()
    spares: int = 0

    @property
    def is_spare(self) -> bool:
        """Whether this process waits on a spare node."""
        return self.rank >= self.world_size

    @property
    def one_node(self) -> bool:
        """Whether all ranks are known to share this node."""
        if self.spares:
            return False
        at_home = self.master is not None and self.master[0].startswith(
            ("127.", "localhost", "::1")
        )
        return at_home or self.world_size in (1, self.local_world_size)

    @property
    def rank_variable(self) -> str:
        """The variable that tells the rank; a sentence where none does."""
        return self.sources["rank"].partition("=")[0]

    @property
    def is_single(self) -> bool:
        """Whether nothing says that this process is a rank."""
        return self.launcher == NO_LAUNCHER

    @property
    def discovery(self) -> Discovery:
        """The way that is tried first."""
        if self.discoveries:
            return self.discoveries[0]
        return discovery_named(None)

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the ways, as ``--channel`` takes them."""
        return tuple(each.name for each in self.discoveries)


def detect(
    variables: Mapping[str, str], *, channel: str | None = None, pid: int | None = None
) -> Environment:
    """Find out who the process with these variables is; one of ``CHANNELS`` uses that way alone.

    ``pid`` tells what srun started itself, 0 one of another machine. A ConfigError for launchers
    that disagree, incomplete or contradicting variables, or a channel that is not there.
    """
    overridden = discovery_named(channel).overrides_launcher
    if overridden:
        found = _explicit(variables)
    else:
        found = _identify(variables, os.getpid() if pid is None else pid)
    found = replace(found, discoveries=ways.usable_discoveries(found, variables))
    # A rank's own exports are no contradiction, in what it starts.
    if not found.master and RANK_PROCESS not in variables:
        found = _cross_check(found, variables)
    return _forced(found, channel)


def _identify(variables: Mapping[str, str], pid: int) -> Environment:
    """Who the innermost launcher says that this process is, unchecked."""
    if pid and is_below_rank(variables, pid):  # 0 where it is another process's environment
        return _single(variables, "a process that a rank started")
    step = slurm.read_step(variables, pid) if slurm.in_step(variables) else None
    if launchers := [
        each
        for each in mpi.LAUNCHERS
        if {each.rank, each.local_rank, each.world_size} <= {*variables}
    ]:
        found = _from_launcher_variables(variables, launchers[0])
        for other in [*launchers[1:], *([SRUN] if step and step.direct else [])]:
            _require_agreement(variables, found, other.rank, other.world_size)
        if "I_MPI_HYDRA_UUID" in variables:
            return replace(found, launcher="Intel MPI")
        return found
    if step and not step.typed:
        return _from_slurm(variables, step)
    mpi.reject_prterun(variables)
    if any(name in variables for name in EXPLICIT):
        return _explicit(variables)
    if slurm.in_allocation(variables):
        allocation = "an allocation of Slurm, but not a step"
    else:
        allocation = ""
    return _single(variables, "a shell of srun --pty" if step else allocation)


def likely_ranks(variables: Mapping[str, str]) -> tuple[int, int]:
    """Rank and local rank by the first variables that name them, for when :func:`detect` has
    failed; else 0.
    """

    def first(*names: str) -> int:
        return next(
            (int(variables[name]) for name in names if variables.get(name, "").isdecimal()), 0
        )

    names = (*mpi.LAUNCHERS, SRUN, USER)
    return first(*(each.rank for each in names)), first(*(each.local_rank for each in names))


def _from_slurm(variables: Mapping[str, str], step: slurm.SlurmStep) -> Environment:
    found = replace(_from_launcher_variables(variables, SRUN), step=step)
    if all(name in variables for name in ways.PMI):
        _require_agreement(variables, found, "PMI_RANK", "PMI_SIZE")
    if not step.ranks_here:
        return found
    sources = {
        **found.sources,
        "local_world_size": f"{slurm.RANKS_HERE}={variables[slurm.RANKS_HERE]}",
    }
    return replace(found, local_world_size=len(step.ranks_here), sources=sources)


def _from_launcher_variables(
    variables: Mapping[str, str], launcher: mpi.LauncherVariables
) -> Environment:
    """Who a launcher's variables say that this process is."""
    names = {
        "rank": launcher.rank,
        "local_rank": launcher.local_rank,
        "world_size": launcher.world_size,
    }
    # os.environ takes texts alone.
    if launcher.local_world_size and launcher.local_world_size in variables:
        names["local_world_size"] = launcher.local_world_size
    numbers = {field: slurm.parse_uint(variables, name) for field, name in names.items()}
    return Environment(
        launcher=launcher.name,
        rank=numbers["rank"],
        local_rank=numbers["local_rank"],
        world_size=numbers["world_size"],
        local_world_size=numbers.get("local_world_size"),
        node=_node_name(variables),
        sources={field: f"{name}={variables[name]}" for field, name in names.items()},
    )


def _require_agreement(
    variables: Mapping[str, str], found: Environment, rank: str, world_size: str
) -> None:
    if (str(found.rank), str(found.world_size)) != (variables[rank], variables[world_size]):
        one = f"{found.sources['rank']} of {found.sources['world_size']}"
        other = f"{rank}={variables[rank]} of {world_size}={variables[world_size]}"
        raise ConfigError(
            f"two launchers disagree: {one}, and {other}",
            expected="one launcher",
            hint=f"start from a shell that was not itself started by {found.launcher}",
        )


def _cross_check(found: Environment, variables: Mapping[str, str]) -> Environment:
    """Explicit variables beside a launcher: ``MASTER_*`` is ignored, a contradicting rank is an
    error.
    """
    for name, value in (
        ("RANK", found.rank),
        ("WORLD_SIZE", found.world_size),
        ("LOCAL_RANK", found.local_rank),
    ):
        if name in variables and variables[name] != str(value):
            text = f"{name}={variables[name]}, but {found.sources[name.lower()]}"
            scope = Scope.JOB if name == "WORLD_SIZE" else Scope.RANK
            raise ConfigError(
                text,
                expected="the launcher's value, or none",
                hint=(
                    f"remove `export {name}` from the job script, or let explicit variables rule"
                    " with --channel env"
                ),
                scope=scope,
            )
    ignored = [
        f"{name}={variables[name]}" for name in ("MASTER_ADDR", "MASTER_PORT") if name in variables
    ]
    if not ignored:
        return found
    note = (
        f"{' and '.join(ignored)} ignored: {found.launcher} tells where rank 0 is (--channel env"
        " lets them rule)"
    )
    return replace(found, notes=(*found.notes, note))


def _explicit(variables: Mapping[str, str]) -> Environment:
    there = [name for name in EXPLICIT if variables.get(name)]
    if missing := [name for name in EXPLICIT if name not in there]:
        shell = slurm.in_allocation(variables) and not slurm.in_step(variables)
        if there:
            text = f"{one_of(there, 'and')} set, "
        else:
            text = ""
        if shell:
            hint = "start the script with srun: this is not a step of Slurm"
        else:
            hint = "set them all, or unset them"
        raise ConfigError(
            f"{text}{one_of(missing, 'and')} missing",
            expected=f"all of {one_of(EXPLICIT, 'and')}, or none",
            hint=hint,
            scope=Scope.JOB,
        )
    found = _from_launcher_variables(variables, USER)
    if found.rank >= found.world_size:
        raise ConfigError(
            f"RANK={found.rank} with WORLD_SIZE={found.world_size}",
            expected=f"RANK from 0 to {found.world_size - 1}",
            hint="correct one of the two",
        )
    port = slurm.parse_uint(variables, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(
            f"MASTER_PORT={port}",
            expected="a port from 1 to 65535",
            hint="correct it",
            scope=Scope.JOB,
        )
    return replace(found, master=(variables["MASTER_ADDR"], port))


def _single(variables: Mapping[str, str], where: str) -> Environment:
    note = (
        f"this is {where}: one process, world size 1; start with `srun srunddp …` for one per task"
    )
    return Environment(
        launcher=NO_LAUNCHER,
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node=_node_name(variables),
        sources=dict.fromkeys(
            ("rank", "local_rank", "world_size", "local_world_size"), "no launcher was found"
        ),
        notes=(note,) if where else (),
    )


def _forced(found: Environment, channel: str | None) -> Environment:
    """The environment with the way that was asked for alone, where one was; a single process needs
    none.
    """
    asked = discovery_named(channel)
    if channel and found.is_single:
        raise ConfigError(
            f"--channel {channel}, and no launcher was found",
            expected="a launcher",
            hint=asked.hint,
        )
    if found.world_size == 1 or (channel is None and found.discoveries):
        return found
    if channel is None:
        raise ConfigError(
            f"{found.launcher} started {found.world_size} ranks, which cannot meet without mpi4py",
            expected="mpi4py, or a launcher with PMI-1",
            hint="pip install mpi4py for this MPI",
            scope=Scope.JOB,
        )
    if asked not in found.discoveries:
        overriding = [each.name for each in DISCOVERIES if each.overrides_launcher]
        text = f"--channel {channel} is not there under {found.launcher}"
        ways = ", ".join(dict.fromkeys((*found.channels, *overriding)))
        raise ConfigError(text, expected=f"one of {ways}", hint=asked.hint, scope=Scope.JOB)
    return replace(found, discoveries=(asked,))


def _node_name(variables: Mapping[str, str]) -> str:
    # Slurm's name is right inside a step on this node only; under mpirun it is the daemon's, which
    # is the same node.
    return variables.get(slurm.NODE_NAME) or socket.gethostname()
