"""Finds the launcher of this process, and tells who has sent this process a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from pathlib import Path

from srunddp.util.kernel_file import ancestors, environ_of
from srunddp.util.quick_dataclass import dataclass

# The processes of launchers that start ranks, by the names that the kernel keeps, which have at
# most 15 characters.
_SLURMSTEPD = "slurmstepd"
_MPI_COMMANDS = ("prterun", "mpirun", "mpiexec", "mpiexec.hydra")
_DAEMONS = (_SLURMSTEPD, "orted", "prted", "hydra_pmi_proxy", "palsd", *_MPI_COMMANDS)
# Commands that, if SIGKILL ends them, leave behind processes on other nodes or an allocation; on
# SIGTERM they end these first. torchrun and accelerate are not listed here, because all their
# processes are on their own node.
REMOTE_STARTERS = frozenset(
    {*_MPI_COMMANDS, "srun", "salloc", "orterun", "prun", "prte", "jsrun", "aprun"}
)


@dataclass(frozen=True)
class Launcher:
    """The launcher of this process, which also sends it signals.

    Attributes:
        pid: The launcher's process id; 0 if it is outside our process namespace; None if there is
            no launcher.
        slurm: The process ids of the ``slurmstepd`` processes among our ancestors; 0 stands for
            those outside our process namespace.
        tracks_by_cgroup: Whether it can be seen that Slurm tracks the step's processes by a control
            group, see :func:`is_tracked_by_cgroup`.
    """

    pid: int | None
    slurm: frozenset[int] = frozenset()
    tracks_by_cgroup: bool = False

    def sent(self, received: signal.struct_siginfo) -> bool:
        """Return whether the launcher, or the Slurm step that it runs in, has sent a signal."""
        return received.si_pid == self.pid or received.si_pid in self.slurm

    def spares_the_worker(self, received: signal.struct_siginfo) -> bool:
        """Return whether the worker is known not to have got this signal.

        If Slurm tracks processes by a control group, it signals only those that slurmstepd has
        started, and not their children.
        """
        return self.tracks_by_cgroup and received.si_pid in self.slurm

    def is_of_rank(self, sender: int, not_of_worker: Collection[int]) -> bool:
        """Return whether a signal was sent by the worker, by a process that the worker has started,
        or by a process of another rank on this node. The latter happens because all ranks of a
        Slurm step on a node share a process group.

        If the sender has ended since then, the result is False.

        Args:
            sender: The sender's process id; 0 if the kernel was the sender.
            not_of_worker: The process ids of our children that do not come from the worker.
        """
        own = os.getpid()
        above = {pid for pid, _ in ancestors(os.getppid())}
        if not sender or sender == own or sender in above:
            # The sender is the kernel, this process (which repeats a request that came in its
            # previous start), a wrapper, the launcher, or a process that has started the launcher.
            return False
        below = sender
        for pid, _ in ancestors(sender):
            if pid == own:
                return below not in not_of_worker
            if pid in above:
                # The sender descends from a process above this one. If that is the launcher, the
                # sender belongs to another rank; if it is a wrapper between the launcher and this
                # process, it does not.
                return pid == self.pid
            below = pid
        return False


def find_launcher(rank_variable: str, *, slurm: bool) -> Launcher:
    """Find the launcher among our ancestors.

    Args:
        rank_variable: The variable in which the launcher sets the rank; empty for no launcher.
        slurm: Whether this process belongs to a job step of Slurm.
    """
    pid = _launcher(rank_variable) if rank_variable else None
    steps = {ancestor for ancestor, name in ancestors(os.getppid()) if name == _SLURMSTEPD}
    if slurm and not steps:
        steps = {pid or 0}
    return Launcher(pid, frozenset(steps), is_tracked_by_cgroup(Path("/proc/self/cgroup")))


def _launcher(rank_variable: str) -> int:
    """Return the process id of our nearest ancestor that has no rank in its environment. Wrappers
    between the launcher and this process have one, because they inherit it as we do.

    We may not read the environment of another user's process, nor of one outside our user
    namespace, such as a container's starter. Such a process is judged by its name. If no ancestor
    turns out to be a launcher, the result is the nearest ancestor whose environment could not be
    read, or 0 if there is none.
    """
    unreadable = 0
    for pid, name in ancestors(os.getppid()):
        try:
            has_rank = rank_variable in environ_of(pid)
        except OSError:
            has_rank = name not in _DAEMONS
            unreadable = unreadable or pid
        if not has_rank:
            return pid
    return unreadable


def is_tracked_by_cgroup(groups: Path) -> bool:
    """Return whether it can be seen that Slurm tracks the processes of this step by
    ``proctrack/cgroup``, which uses the control group ``freezer`` of version 1 or the group of
    version 2. False if a container hides the groups.

    Args:
        groups: ``/proc/self/cgroup``.
    """
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return False
    by_kind = {kind: group for _, kind, group in lines}
    return "/step_" in by_kind.get("freezer", by_kind.get("", ""))
