"""Signals as a file descriptor, and who sent them: the parts of Linux that Python's signal module leaves out."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

# What users, Slurm and MPI send. SIGKILL and SIGSTOP cannot be passed on, SIGPIPE and faults are one's own.
FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGXCPU,
)
# Whose sender wants the run to end.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_WATCHED = (*FORWARDED, signal.SIGCHLD)

_SET_PDEATHSIG = 1
SET_CHILD_SUBREAPER = 36
_SFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_SIGINFO = struct.Struct("=IiiI112x")  # ssi_signo, ssi_errno, ssi_code, ssi_pid of signalfd_siginfo
_FROM_KERNEL = 0x80

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Received:
    """A signal and its sender: a process's id, or the kernel for a terminal's keys."""

    number: int
    sender: int
    from_kernel: bool


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
    opened = _libc.signalfd(-1, mask, _SFD_NONBLOCK_CLOEXEC)
    if opened < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(opened)


def read(opened: int) -> list[Received]:
    """The signals that have come since the last reading."""
    received: list[Received] = []
    while True:
        try:
            record = os.read(opened, _SIGINFO.size)
        except BlockingIOError:
            return received
        number, _, code, sender = _SIGINFO.unpack(record)
        received.append(Received(number, sender, code == _FROM_KERNEL))


def launcher(rank_variable: str) -> int:
    """The process id of the launcher: our nearest ancestor that was not itself told a rank by it.

    Wrappers in between were told the same rank. A process that we may not look into is another user's, as Slurm's.
    0 where the launcher is outside our process namespace, as for a container.
    """
    pid, wanted = os.getppid(), rank_variable.encode() + b"="
    while pid > 1:
        try:
            told = any(entry.startswith(wanted) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return pid
        if not told:
            return pid
        pid = parent
    return pid


def prctl(option: int, value: int) -> None:
    """Linux's call of this name, with one argument."""
    _libc.prctl(option, value)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends.

    Args:
        parent: the process that forked, in case it ended before this call.
    """
    prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
