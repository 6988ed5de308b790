"""Linux's signal functions that Python's signal module lacks: signals as a file descriptor, the
signals that a process handles, and the end of a process with its parent.
"""

import contextlib
import ctypes
import os
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from srunddp.util.kernel_file import text_of

# The signals that ask for an end of the run.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
# The signals by which users, Slurm and MPI ask a script for something.
REQUESTS = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
# The signals that the supervisor passes on if the worker has not got them. SIGKILL and SIGSTOP
# cannot be caught, and SIGPIPE and faults such as SIGSEGV come from the process itself.
FORWARDED = (*REQUESTS, signal.SIGTSTP, signal.SIGCONT)
# Users send these to ask for a checkpoint. They end a script that has no handler yet.
FOR_HANDLERS = (signal.SIGUSR1, signal.SIGUSR2)
# On this signal the supervisor prints its worker's stack. Other processes ignore it by default.
PRINT_STACK = signal.SIGURG
_WATCHED = frozenset({*FORWARDED, PRINT_STACK, signal.SIGCHLD})

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_SFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_PIDFD_OPEN = 434  # Linux's number of this call, the same on all processors

# Linux's number of tgkill, for which glibc before 2.30 has no function.
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


def descriptor(numbers: Iterable[int] = _WATCHED) -> int:
    """Return a new file descriptor that becomes readable when one of these signals has come.

    Args:
        numbers: The signals, which must be blocked.
    """
    mask = ctypes.create_string_buffer(128)
    _libc.sigemptyset(mask)
    for number in numbers:
        _libc.sigaddset(mask, ctypes.c_int(number))
    return _checked(_libc.signalfd(-1, mask, _SFD_NONBLOCK_CLOEXEC))


def read(numbers: Iterable[int] = _WATCHED) -> list[signal.struct_siginfo]:
    """Return which of these signals have come since the last call, with their senders.

    Args:
        numbers: The signals, which must be blocked.
    """
    return list(iter(lambda: signal.sigtimedwait(numbers, 0), None))


def signal_name(number: int) -> str:
    """Return a name such as ``SIGKILL``, or ``signal 64`` for a signal without a name."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


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
    """Return whether a process has set a handler for a signal; False if the process is gone."""
    return _is_in_a_set(pid, number, "SigCgt")


def is_safe_for(pid: int, number: int) -> bool:
    """Return whether a signal would not end a process, because the process handles or ignores the
    signal, or blocks it in its main thread. False if the process is gone.
    """
    return _is_in_a_set(pid, number, "SigCgt", "SigIgn", "SigBlk")


def _is_in_a_set(pid: int, number: int, *names: str) -> bool:
    """Return whether one of these sets of a process's signals, by their names in
    ``/proc/PID/status``, has a signal.
    """
    status = text_of(Path(f"/proc/{pid}/status"))
    found = re.findall(rf"^(?:{'|'.join(names)}):\s*([0-9a-f]+)$", status, re.MULTILINE)
    return any(int(numbers, 16) >> (number - 1) & 1 for numbers in found)


def stop_by(number: int, is_wanted: Callable[[], bool]) -> None:
    """Stop this process by a signal that stops processes by default, and return once the process
    goes on.

    Args:
        number: The signal, which all threads block.
        is_wanted: Returns whether the process should still stop. It is called after the signal was
            sent, because a SIGCONT that has come before then was discarded.
    """
    # With this call the kernel discards a SIGCONT that is pending. A SIGCONT that comes later
    # discards this signal.
    os.kill(os.getpid(), number)
    if not is_wanted():
        signal.sigtimedwait({number}, 0)
        return
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_by(number: int) -> None:
    """End this process by a signal, so that its parent sees this signal. The call returns only if
    the kernel ignores the signal, as for process 1 of a container.
    """
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process, whose thread id is the process id.

    With :func:`os.kill`, another thread would take the signal if the main thread blocks it.

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
