"""The sampler of a node as its local rank 0's supervisor has it: forked before the worker, ended before it leaves.

It never imports torch, asks the kernel and NVML alone, and appends to files that are complete to the last sample
whatever ends it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from srunddp.monitor.sampler.loop import SamplerConfig, UnwritableError, sample_until_closed
from srunddp.supervisor import signals
from srunddp.supervisor.process_tree import wait_for_child

NAME = "srunddp-monitor"  # 15 letters, all that Linux keeps
_GONE_WITHIN = 0.2  # after SIGKILL; in a kernel call that does not return it cannot be killed


@dataclass(frozen=True)
class Sampler:
    """A running one.

    Attributes:
        pid: its process id.
    """

    pid: int
    _end: socket.socket

    def in_worker(self) -> None:
        """In a process that the supervisor forks later: leave the sampler to it."""
        self._end.close()

    def finish(self, limit: float) -> str:
        """In the supervisor: have a last sample written, and see the sampler end; killed if it does not.

        Args:
            limit: seconds to wait for that.

        Returns:
            Why it could not write its files, in one line; else nothing.
        """
        until = time.monotonic() + limit
        with self._end:
            with contextlib.suppress(OSError):
                self._end.shutdown(socket.SHUT_WR)
            message = _last_words(self._end, until)
        if wait_for_child(self.pid, until - time.monotonic()) is None:
            os.kill(self.pid, signal.SIGKILL)  # it has not been collected, so that the number is still its own
            wait_for_child(self.pid, _GONE_WITHIN)
        return message


def start(site: SamplerConfig) -> Sampler:
    """Fork the sampler of a node. To be called in the main thread, whose end is the sampler's as well, with the
    signals blocked: those that Slurm sends to every process of a step are not for this one.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            _live(site, theirs)
        finally:
            os._exit(0)
    theirs.close()
    return Sampler(pid, ours)


def _live(site: SamplerConfig, end: socket.socket) -> None:
    signals.die_with_parent(site.supervisor)
    # Also those that no one has blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
    _let_go(end.fileno())
    try:
        sample_until_closed(site, end)
    except Exception as error:
        reason = str(error) if isinstance(error, UnwritableError) else repr(error)
        end.sendall(f"the monitor of {site.run.node} ended: {reason}".encode())


def _let_go(kept: int) -> None:
    """Nobody is to wait for the end of a pipe or a line that this process happens to have."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        if standard != kept:
            os.dup2(nothing, standard)
    for opened in map(int, os.listdir("/proc/self/fd")):
        if opened > 2 and opened != kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(opened)


def _last_words(end: socket.socket, until: float) -> str:
    text = b""
    with contextlib.suppress(OSError):
        while select.select([end], [], [], max(0.0, until - time.monotonic()))[0] and (more := end.recv(4096)):
            text += more
    return text.decode(errors="replace")
