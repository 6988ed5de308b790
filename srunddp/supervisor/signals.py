"""Signals as a file descriptor, and who sent them: the parts of Linux that Python's signal module
leaves out.
"""

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from srunddp.util.kernel_file import ancestors, environ_of

# Whose sender wants the run to end.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
# What users, Slurm and MPI send. SIGKILL and SIGSTOP cannot be passed on, SIGPIPE and faults are
# one's own.
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
# Passed on where Slurm's tracking cannot be told: a job's last chance of a checkpoint goes before a
# signal too many.
URGENT = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
# Has the supervisor print its worker's stack. Other processes that get it ignore it by default.
PRINT_STACK = signal.SIGURG
_WATCHED = (*FORWARDED, PRINT_STACK, signal.SIGCONT, signal.SIGCHLD)

# The launchers' processes that start ranks, by the names that the kernel has of them, of at most 15
# letters.
_SLURMSTEPD = "slurmstepd"
_DAEMONS = (
    _SLURMSTEPD,
    "orted",
    "prted",
    "prterun",
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "hydra_pmi_proxy",
    "palsd",
)
# The kernel's fixed number of the one that hides no group.
_INITIAL_NAMESPACE = "cgroup:[4026531835]"

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_SFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_FROM_KERNEL = 0x80  # Linux's SI_KERNEL, as of a terminal's keys
_PIDFD_OPEN = 434  # Linux's number of this call, the same on all processors

_libc = ctypes.CDLL(None, use_errno=True)


def block() -> set[signal.Signals]:
    """Hold the watched signals back for :func:`descriptor`; returns the mask from before."""
    # Inherited as ignored it would never come, and neither would the worker's end.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)}


def descriptor() -> int:
    """A file descriptor that becomes readable when one of the blocked signals has come."""
    mask = ctypes.create_string_buffer(128)
    _libc.sigemptyset(mask)
    for number in _WATCHED:
        _libc.sigaddset(mask, ctypes.c_int(number))
    return _checked(_libc.signalfd(-1, mask, _SFD_NONBLOCK_CLOEXEC))


def read() -> list[signal.struct_siginfo]:
    """The signals that have come since the last reading, each with its sender's process id."""
    return list(iter(lambda: signal.sigtimedwait(_WATCHED, 0), None))


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


@dataclass(frozen=True)
class Launcher:
    """Who starts this process and sends signals to it.

    Attributes:
        pid: the launcher's process id; 0 where it is outside our process namespace; None for no
            launcher.
        slurm: the process ids of Slurm among our ancestors, and 0 where they are outside our
            process namespace.
        signals_all: whether Slurm signals all processes of a step, by :func:`signals_all`.
    """

    pid: int | None
    slurm: frozenset[int] = frozenset()
    signals_all: bool | None = True

    def sent(self, received: signal.struct_siginfo) -> bool:
        """Whether the launcher, or Slurm around it, has sent this signal."""
        return received.si_pid == self.pid or received.si_pid in self.slurm

    def reached_worker(self, received: signal.struct_siginfo) -> bool | None:
        """Whether the worker has got this signal as well; None where that cannot be told.

        Slurm goes by its process tracking. Open MPI and Hydra signal the process group of each
        rank, and a terminal its whole foreground group.
        """
        if received.si_code == _FROM_KERNEL:
            return received.si_signo in TERMINAL
        if received.si_pid in self.slurm:
            return self.signals_all
        return received.si_pid == self.pid


def find_launcher(rank_variable: str, *, slurm: bool) -> Launcher:
    """Find the launcher among our ancestors, by the variable in which it tells the rank; empty for
    no launcher.

    ``slurm`` says whether this process belongs to a job step of Slurm.
    """
    pid = _launcher(rank_variable) if rank_variable else None
    steps = {ancestor for ancestor, name in ancestors(os.getppid()) if name == _SLURMSTEPD}
    if slurm and not steps:
        steps = {pid or 0}
    return Launcher(
        pid, frozenset(steps), signals_all(Path("/proc/self/cgroup"), Path("/proc/self/ns/cgroup"))
    )


def _launcher(rank_variable: str) -> int:
    """Our nearest ancestor that was not itself told a rank; wrappers in between were told the same
    rank as we.

    The environment of another user's process may not be read, nor that of one outside our user
    namespace, as of a container's starter: there the name counts.
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
    """Whether Slurm signals all processes of a step, by ``/proc/self/cgroup`` and
    ``/proc/self/ns/cgroup``.

    ``proctrack/linuxproc`` and ``proctrack/pgid`` do. ``proctrack/cgroup``, of the kind ``freezer``
    of version 1, or of version 2, signals those that slurmstepd started, and none of their
    children. None where a container hides the groups.
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
    """In the supervisor, before the fork: orphans of the worker become our children, not those of
    process 1.
    """
    _libc.prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread of ``parent`` ends that forked it, or has
    ended before.
    """
    _libc.prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def pidfd_open(pid: int) -> int:
    """A descriptor that becomes readable when the process ends, else an OSError; also where Python
    has no such call.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _checked(_libc.syscall(_PIDFD_OPEN, pid, 0))


def _checked(result: int) -> int:
    """What a call of C's library returned; an OSError where it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
