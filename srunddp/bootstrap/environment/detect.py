"""Who am I? Ordered detectors read the environment; the innermost launcher wins and is cross-checked.

Order: an MPI launcher, a step of Slurm, explicit variables, a world of one. A real step is told from
an allocation, a batch body and an interactive shell, which inherit Slurm's variables and are no ranks.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from srunddp.bootstrap.environment import mpi, rank_process, slurm
from srunddp.errors import ConfigError, Scope

EXPLICIT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
CHANNELS = ("mpi", "pmi", "slurm", "env")
_SRUN = mpi.LauncherVariables("Slurm", slurm.RANK, slurm.WORLD_SIZE, slurm.LOCAL_RANK)
_USER = mpi.LauncherVariables("explicit variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Environment:
    """Who this process is, and which launcher said so.

    Attributes:
        launcher: its name: Slurm, Open MPI, Hydra, …, ``explicit variables``, or ``none``.
        rank, local_rank, world_size: torch's terms.
        local_world_size: ranks on this node; None until the ranks have met, where nothing tells.
        node: this node's name, ``SLURMD_NODENAME`` or the hostname.
        channels: the ways in which the ranks can meet, the best first; empty for a world of one.
        sources: for each value the variable that decided it.
        notes: lines to be said once, such as what was ignored and why.
        step: Slurm's view, where a step of Slurm is the launcher.
        master: ``MASTER_ADDR`` and ``MASTER_PORT`` where explicit variables rule.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None
    node: str
    channels: tuple[str, ...]
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()
    step: slurm.SlurmStep | None = None
    master: tuple[str, int] | None = None

    @property
    def one_node(self) -> bool:
        """Whether all ranks are known to share this node."""
        at_home = self.master is not None and self.master[0].startswith(("127.", "localhost", "::1"))
        return at_home or self.world_size in (1, self.local_world_size)


def detect(variables: Mapping[str, str], *, channel: str | None = None, pid: int | None = None) -> Environment:
    """Find out who this process is.

    Args:
        variables: the process's environment.
        channel: one of ``mpi``, ``pmi``, ``slurm``, ``env`` to force that way of meeting.
        pid: this process's id, to tell what srun started itself.

    Raises:
        ConfigError: launchers that disagree, incomplete or contradicting variables, a channel that is not there.
    """
    if channel == "env":
        return _explicit(variables)
    found = identify(variables, pid=pid)
    # A rank's own exports are no contradiction, in what it starts.
    ours = found.master or rank_process.VARIABLE in variables
    return _forced(found if ours else _cross_check(found, variables), channel)


def identify(variables: Mapping[str, str], *, pid: int | None = None) -> Environment:
    """Who the innermost launcher says that this process is, unchecked, with all channels that are there.

    Args:
        variables, pid: as in :func:`detect`.

    Raises:
        ConfigError: launchers that disagree, incomplete or contradicting variables.
    """
    pid = os.getpid() if pid is None else pid
    if pid and rank_process.is_below(variables, pid):  # 0 where it is another process's environment
        return _single(variables, "a process that a rank started")
    step = slurm.read_step(variables, pid) if slurm.in_step(variables) else None
    if launchers := mpi.find_launchers(variables):
        return _from_mpi(variables, launchers, step)
    if step and not step.typed:
        return _from_slurm(variables, step)
    mpi.reject_prterun(variables)
    return (
        _explicit(variables)
        if any(name in variables for name in EXPLICIT)
        else _single(variables, _shell(variables, step))
    )


def likely_ranks(variables: Mapping[str, str]) -> tuple[int, int]:
    """Rank and local rank by the first variables that name them, for when :func:`detect` has failed; else 0."""

    def first(*names: str) -> int:
        return next((int(variables[name]) for name in names if variables.get(name, "").isdecimal()), 0)

    return (
        first(*(launcher.rank for launcher in mpi.LAUNCHERS), slurm.RANK, "RANK"),
        first(*(launcher.local_rank for launcher in mpi.LAUNCHERS), slurm.LOCAL_RANK, "LOCAL_RANK"),
    )


def _from_mpi(
    variables: Mapping[str, str], launchers: list[mpi.LauncherVariables], step: slurm.SlurmStep | None
) -> Environment:
    launcher = launchers[0]
    found = _told(variables, launcher, _mpi_channels(variables))
    for other in launchers[1:]:
        _agree(variables, launcher, found, (other.rank, other.world_size))
    if step and step.direct:
        _agree(variables, launcher, found, (slurm.RANK, slurm.WORLD_SIZE))
    return replace(found, launcher="Intel MPI") if "I_MPI_HYDRA_UUID" in variables else found


def _told(variables: Mapping[str, str], launcher: mpi.LauncherVariables, channels: tuple[str, ...]) -> Environment:
    """Who a launcher's variables say that this process is."""
    # os.environ is asked for texts alone.
    local_size = launcher.local_world_size if (launcher.local_world_size or "") in variables else None
    names = {"rank": launcher.rank, "local_rank": launcher.local_rank, "world_size": launcher.world_size}
    rank, local_rank, world_size = (slurm.parse_uint(variables, name) for name in names.values())
    names |= {"local_world_size": local_size} if local_size else {}
    return Environment(
        launcher=launcher.name,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=slurm.parse_uint(variables, local_size) if local_size else None,
        node=_node_name(variables),
        channels=channels,
        sources={field: f"{name}={variables[name]}" for field, name in names.items()},
    )


def _agree(
    variables: Mapping[str, str], launcher: mpi.LauncherVariables, found: Environment, names: tuple[str, str]
) -> None:
    if (str(found.rank), str(found.world_size)) != (variables[names[0]], variables[names[1]]):
        raise ConfigError(
            f"two launchers disagree: {launcher.rank}={found.rank} of {launcher.world_size}={found.world_size}, "
            f"and {names[0]}={variables[names[0]]} of {names[1]}={variables[names[1]]}",
            expected="one launcher",
            hint=f"start from a shell that was not itself started by {launcher.name}",
        )


def _mpi_channels(variables: Mapping[str, str]) -> tuple[str, ...]:
    # Open MPI has no PMI-1: below it, PMI_FD is that of a daemon which srun started.
    channels = ["pmi"] if "PMI_FD" in variables and "OMPI_COMM_WORLD_RANK" not in variables else []
    return (*channels, "mpi") if _has_mpi4py() else tuple(channels)


def _has_mpi4py() -> bool:
    return importlib.util.find_spec("mpi4py") is not None


def _from_slurm(variables: Mapping[str, str], step: slurm.SlurmStep) -> Environment:
    channels = ["slurm"]
    if "PMIX_RANK" in variables and _has_mpi4py():
        # Last where SLURM_* tell enough: a broadcast costs MPI_Init, which can crash where MPI and Slurm do not match.
        channels.insert(0 if step.unordered else 1, "mpi")
    if pmi := all(name in variables for name in ("PMI_FD", "PMI_RANK", "PMI_SIZE")):
        channels.insert(0, "pmi")
    found = _told(variables, _SRUN, tuple(channels))
    if pmi:
        _agree(variables, _SRUN, found, ("PMI_RANK", "PMI_SIZE"))
    if step.ranks_here:
        sources = {**found.sources, "local_world_size": f"{slurm.RANKS_HERE}={variables[slurm.RANKS_HERE]}"}
        found = replace(found, local_world_size=step.local_world_size, sources=sources)
    return replace(found, step=step)


def _cross_check(found: Environment, variables: Mapping[str, str]) -> Environment:
    """Explicit variables beside a launcher: ``MASTER_*`` is ignored, a contradicting rank is an error."""
    for name, value in (("RANK", found.rank), ("WORLD_SIZE", found.world_size), ("LOCAL_RANK", found.local_rank)):
        if name in variables and variables[name] != str(value):
            field = name.lower()
            raise ConfigError(
                f"{name}={variables[name]}, but {found.sources[field]}",
                expected="the launcher's value, or none",
                hint=f"remove `export {name}` from the job script, or let explicit variables rule with --channel env",
                scope=Scope.JOB if name == "WORLD_SIZE" else Scope.RANK,
            )
    ignored = [f"{name}={variables[name]}" for name in ("MASTER_ADDR", "MASTER_PORT") if name in variables]
    if not ignored:
        return found
    note = f"{' and '.join(ignored)} ignored: {found.launcher} tells where rank 0 is (--channel env lets them rule)"
    return replace(found, notes=(*found.notes, note))


def _require_explicit(variables: Mapping[str, str]) -> None:
    missing = [name for name in EXPLICIT if not variables.get(name)]
    if missing:
        there = [name for name in EXPLICIT if variables.get(name)]
        shell = slurm.in_allocation(variables) and not slurm.in_step(variables)
        raise ConfigError(
            f"{_and(there)} set, {_and(missing)} missing" if there else f"{_and(missing)} missing",
            expected=f"all of {_and(EXPLICIT)}, or none",
            hint="start the script with srun: this is not a step of Slurm" if shell else "set them all, or unset them",
            scope=Scope.JOB,
        )


def _explicit(variables: Mapping[str, str]) -> Environment:
    _require_explicit(variables)
    found = _told(variables, _USER, ("env",))
    if found.rank >= found.world_size:
        raise ConfigError(
            f"RANK={found.rank} with WORLD_SIZE={found.world_size}",
            expected=f"RANK from 0 to {found.world_size - 1}",
            hint="correct one of the two",
        )
    port = slurm.parse_uint(variables, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={port}", expected="a port from 1 to 65535", hint="correct it", scope=Scope.JOB)
    return replace(found, master=(variables["MASTER_ADDR"], port))


def _shell(variables: Mapping[str, str], step: slurm.SlurmStep | None) -> str:
    if step:
        return "a shell of srun --pty"
    return "an allocation of Slurm, but not a step" if slurm.in_allocation(variables) else ""


def _single(variables: Mapping[str, str], where: str) -> Environment:
    start = f"this is {where}: one process, world size 1; start with `srun srunddp …` for one per task"
    alone = "no launcher was found"
    return Environment(
        launcher="none",
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node=_node_name(variables),
        channels=(),
        sources=dict.fromkeys(("rank", "local_rank", "world_size", "local_world_size"), alone),
        notes=(start,) if where else (),
    )


def _forced(found: Environment, channel: str | None) -> Environment:
    """The environment with the channel that was asked for alone, where one was; a world of one needs none."""
    if channel and found.launcher == "none":
        raise ConfigError(
            f"--channel {channel}, and no launcher was found", expected="a launcher", hint=_CHANNEL_HINTS[channel]
        )
    if found.world_size == 1 or (channel is None and found.channels):
        return found
    if channel is None:
        raise ConfigError(
            f"{found.launcher} started {found.world_size} ranks, which cannot meet without mpi4py",
            expected="mpi4py, or a launcher with PMI-1",
            hint="pip install mpi4py for this MPI",
            scope=Scope.JOB,
        )
    if channel not in found.channels:
        raise ConfigError(
            f"--channel {channel} is not there under {found.launcher}",
            expected=f"one of {', '.join(dict.fromkeys((*found.channels, 'env')))}",
            hint=_CHANNEL_HINTS[channel],
            scope=Scope.JOB,
        )
    return replace(found, channels=(channel,))


_CHANNEL_HINTS = {
    "mpi": "install mpi4py and start with mpirun or `srun --mpi=pmix`",
    "pmi": "start with `srun --mpi=pmi2` or MPICH's mpirun",
    "slurm": "start with srun",
}


def _node_name(variables: Mapping[str, str]) -> str:
    # Slurm's name is right inside a step on this node only; below mpirun it is the daemon's, which is the same node.
    return variables.get(slurm.NODE_NAME) or socket.gethostname()


def _and(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
