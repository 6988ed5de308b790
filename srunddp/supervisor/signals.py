"""Linux's signal functions that Python's signal module lacks: signals as a file descriptor, their
sender, and what happens when a parent ends.
"""

import contextlib
import ctypes
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from srunddp.util.kernel_file import ancestors, environ_of, text_of

# The signals that ask for an end of the run.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
# The signals that users, Slurm and MPI send. SIGKILL and SIGSTOP cannot be caught and passed on;
# SIGPIPE and faults such as SIGSEGV come from the process itself.
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
# Passed on even if it is unknown whether Slurm signals the worker too. Such a signal may be a job's
# last chance of a checkpoint, so it is better for the worker to get it twice than not at all.
URGENT = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
# On this signal the supervisor prints its worker's stack. Other processes ignore it by default.
PRINT_STACK = signal.SIGURG
_WATCHED = (*FORWARDED, PRINT_STACK, signal.SIGCONT, signal.SIGCHLD)

# The processes of launchers that start ranks, by the kernel's names, which have at most 15 letters.
_SLURMSTEPD = "slurmstepd"
_MPI_COMMANDS = ("prterun", "mpirun", "mpiexec", "mpiexec.hydra")
_DAEMONS = (_SLURMSTEPD, "orted", "prted", "hydra_pmi_proxy", "palsd", *_MPI_COMMANDS)
# Commands that leave processes on other nodes, or an allocation, if they are ended by SIGKILL. On
# SIGTERM they end these. Of torchrun and accelerate all processes are on their own node.
REMOTE_STARTERS = frozenset(
    {*_MPI_COMMANDS, "srun", "salloc", "orterun", "prun", "prte", "jsrun", "aprun"}
)
# The initial cgroup namespace, from which no group is hidden; the kernel's number for it is fixed.
_INITIAL_NAMESPACE = "cgroup:[4026531835]"

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_SFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_FROM_KERNEL = 0x80  # Linux's SI_KERNEL, as for a key typed in a terminal
_PIDFD_OPEN = 434  # Linux's number of this call, the same on all processors

# Linux's number of tgkill, of which glibc has no function before 2.30.
_TGKILL = {"x86_64": 234, "aarch64": 131, "ppc64le": 250}.get(os.uname().machine)

_libc = ctypes.CDLL(None, use_errno=True)


def block() -> set[signal.Signals]:
    """Block the watched signals, which :func:`descriptor` then reports.

    Returns:
        The signals that were blocked before.
    """
    # If SIGCHLD was inherited as ignored, it would never come, and the worker's end would go
    # unnoticed.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)}


def descriptor() -> int:
    """Return a new file descriptor that becomes readable when a watched signal has come."""
    mask = ctypes.create_string_buffer(128)
    _libc.sigemptyset(mask)
    for number in _WATCHED:
        _libc.sigaddset(mask, ctypes.c_int(number))
    return _checked(_libc.signalfd(-1, mask, _SFD_NONBLOCK_CLOEXEC))


def read() -> list[signal.struct_siginfo]:
    """Return the watched signals that have come since the last call, with their senders."""
    return list(iter(lambda: signal.sigtimedwait(_WATCHED, 0), None))


def signal_name(number: int) -> str:
    """Return a name such as ``SIGKILL``, or ``signal 64`` for a signal without a name."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


@dataclass(frozen=True)
class Launcher:
    """The launcher of this process, which also sends it signals.

    Attributes:
        pid: The launcher's process id; 0 if it is outside our process namespace; None for no
            launcher.
        slurm: The process ids of Slurm's processes among our ancestors; 0 stands for those outside
            our process namespace.
        signals_all: Whether Slurm signals all processes of a step, see :func:`signals_all`.
    """

    pid: int | None
    slurm: frozenset[int] = frozenset()
    signals_all: bool | None = True

    def sent(self, received: signal.struct_siginfo) -> bool:
        """Return whether the launcher, or the Slurm step that it runs in, has sent a signal."""
        return received.si_pid == self.pid or received.si_pid in self.slurm

    def reached_worker(self, received: signal.struct_siginfo) -> bool | None:
        """Return whether the worker has got this signal too; None if that is unknown.

        Which processes Slurm signals depends on its process tracking. Open MPI and Hydra signal the
        process group of each rank, and a terminal signals its whole foreground group.
        """
        if received.si_code == _FROM_KERNEL:
            return received.si_signo in TERMINAL
        if received.si_pid in self.slurm:
            return self.signals_all
        return received.si_pid == self.pid


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
    return Launcher(
        pid, frozenset(steps), signals_all(Path("/proc/self/cgroup"), Path("/proc/self/ns/cgroup"))
    )


def _launcher(rank_variable: str) -> int:
    """Return the process id of our nearest ancestor whose environment has no rank. Wrappers between
    the launcher and this process have our rank in theirs.

    We may not read the environment of another user's process, nor of one outside our user
    namespace, such as a container's starter. Such a process is judged by its name. If no ancestor
    is a launcher, the result is the nearest unreadable one, or 0.
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


def signals_all(groups: Path, namespace: Path) -> bool | None:
    """Return whether Slurm signals all processes of a step; None if a container hides the groups.

    With ``proctrack/linuxproc`` and ``proctrack/pgid`` Slurm signals all of them. With
    ``proctrack/cgroup``, which uses the ``freezer`` group of version 1 or the group of version 2,
    it signals only the processes that slurmstepd started, and not their children.

    Args:
        groups: ``/proc/self/cgroup``.
        namespace: ``/proc/self/ns/cgroup``.
    """
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
        hidden = os.readlink(namespace) != _INITIAL_NAMESPACE
    except OSError:
        return None
    by_kind = {kind: group for _, kind, group in lines}
    group = by_kind.get("freezer", by_kind.get("", ""))
    if "/step_" in group:
        return False
    return None if hidden else True


def become_subreaper() -> None:
    """Make orphans among our descendants our own children instead of those of process 1.

    The supervisor calls this before it forks the worker.
    """
    _libc.prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends. If the parent has
    ended already, end at once.

    Args:
        parent: The process id of the parent.
    """
    _libc.prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def pidfd_open(pid: int) -> int:
    """Return a descriptor that becomes readable when a process ends, even if Python lacks the call.

    Raises:
        OSError: The process does not exist, or the kernel is too old.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _checked(_libc.syscall(_PIDFD_OPEN, pid, 0))


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler of its own for a signal; False if it is gone."""
    status = text_of(Path(f"/proc/{pid}/status"))
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process, whose thread id is the process id.

    By :func:`os.kill` another thread takes it if the main thread blocks it.

    Raises:
        ProcessLookupError: The process is gone.
    """
    if _TGKILL is None:
        os.kill(pid, number)
    else:
        _checked(_libc.syscall(_TGKILL, pid, pid, number))


def _checked(result: int) -> int:
    """Return the result of a function of the C library; raise an OSError if it is negative."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
