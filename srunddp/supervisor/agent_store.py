"""torch's agent store, on demand: a store for processes that are not ranks, at ``MASTER_ADDR`` and
``MASTER_PORT``.

torchrun's agent serves a ``TCPStore`` there from the start of its ranks to their end, and sets
``TORCHELASTIC_USE_AGENT_STORE``: every process that inherits this variable connects to the store as
a client. Here it works like this:

1. The ranks have a store of their own, which rank 0's worker serves on another port. So a
   connection to ``MASTER_PORT`` never comes from a rank that joins the world of the run: it comes
   from a program that a rank has started, or has become by ``exec``, from a group of only some
   ranks, or from a client such as torchft's.
2. When all ranks have met, rank 0's supervisor listens on ``MASTER_PORT`` before any rank learns
   the port. The kernel queues incoming connections, so no client is refused or has to try again.
3. The first connection makes the supervisor start a process, which takes over the socket and serves
   torch's ``TCPStore`` on it. Who has connected is not checked, and need not be: nodes that test
   the network between them use another port. If nobody connects, the process is never started.
4. The process is a child of the supervisor, blocks all signals, and ends with the supervisor. It
   alone reads the interpreter's and torch's files, so a file system that does not answer holds up
   no other process. After a restart, the next start of the run listens on a new socket.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.signals import die_with_parent
from srunddp.supervisor.worker_process import wait_for_child
from srunddp.util.console import say_amid_output
from srunddp.util.descriptors import close_all, opened
from srunddp.util.quick_dataclass import dataclass


@dataclass(eq=False)
class AgentStore:
    """The agent store of one start, on rank 0.

    Attributes:
        listening: The listening socket; closed here once :meth:`start` has handed it to the store's
            process.
        host: The address on which the socket listens.
        port: The port on which the socket listens.
        limits: How long :meth:`close` waits for the process to end.
        process: The process id of the store; None before :meth:`start`, and if :meth:`start` could
            not fork.
    """

    listening: socket.socket
    host: str
    port: int
    limits: Limits = DEFAULT_LIMITS
    process: int | None = None
    _selector: selectors.BaseSelector | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable when the first process has connected."""
        return self.listening.fileno()

    def watch(
        self, selector: selectors.BaseSelector, on_client: Callable[[AgentStore], None]
    ) -> None:
        """Register with a selector, which then reports the first client that connects.
        :meth:`start` and :meth:`close` unregister.

        Args:
            selector: The selector with which to register this object.
            on_client: Stored as the ``data`` of the selector's key. When the selector reports the
                key, the caller has to call this function with the key's object, which is this
                store.
        """
        selector.register(self, selectors.EVENT_READ, on_client)
        self._selector = selector

    def start(self) -> None:
        """Start the process that serves the store, and hand the socket over to it.

        Call this in the supervisor's main thread, because the process ends when the thread that
        forked it ends. The process is forked first and then calls ``exec``: the interpreter may be
        on a file system that does not answer, and with ``posix_spawn`` or ``subprocess`` the
        supervisor would wait for the ``exec``.
        """
        supervisor = os.getpid()
        try:
            with warnings.catch_warnings():
                # Python warns of a fork while other threads run. The child needs none of their
                # locks.
                warnings.simplefilter("ignore")
                pid = os.fork()
        except OSError as error:
            _say_why_there_is_none(error)
        else:
            if pid == 0:
                self._become(supervisor)
            self.process = pid
        # Close the socket even if there is no process: while a copy is open here and nobody
        # accepts, clients would wait instead of being refused.
        self._close_socket()

    def _become(self, supervisor: int) -> NoReturn:
        """Turn the forked child into the store's process. Called in the child."""
        descriptor = self.listening.fileno()
        code = (
            f"import sys; sys.path[:] = {sys.path}; from srunddp.bootstrap.process_group"
            f".store_process import main; main({descriptor}, {self.host!r}, {self.port})"
        )
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",  # the store's process computes nothing
        }
        try:
            # Set this before the exec, which may take long on a slow file system. The kernel keeps
            # the setting across the exec.
            die_with_parent(supervisor)
            # Launchers send signals to the whole process group or job step, but the store is needed
            # as long as a rank may still be saving.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            # The store reads no input, and its output must not get between the ranks' lines.
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(nothing, 1)
            # Close the inherited descriptors. If the store's process hangs, its copy of a
            # supervisor's connection would keep the connection open, and no rank would see it end.
            # Descriptors that the launcher has opened for its rank, such as a socket of PMI, are
            # not meant for the store.
            close_all([each for each in opened() if each > 2 and each != descriptor])
            os.set_inheritable(descriptor, True)
            os.execve(sys.executable, [sys.executable, "-c", code], variables)
        except OSError as error:
            _say_why_there_is_none(error)
        finally:
            os._exit(1)

    def close(self) -> bool:
        """Free the port: close the socket, or kill the process that has it. Later calls have no
        effect.

        Returns:
            False if there was a process and it has not ended in time; otherwise True.
        """
        self._close_socket()
        if self.process is None:
            return True
        # The process may have been reaped, and then another process may have its id.
        if wait_for_child(self.process, 0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)
            if wait_for_child(self.process, self.limits.kill_after) is None:
                return False
        self.process = None
        return True

    def _close_socket(self) -> None:
        # Unregister first: the selector knows the socket by its descriptor's number, which another
        # file may soon have. And the kernel goes on reporting a closed socket while a process that
        # was forked meanwhile has a copy.
        if self._selector is not None:
            self._selector.unregister(self)
            self._selector = None
        self.listening.close()


def _say_why_there_is_none(error: OSError) -> None:
    say_amid_output(f"no store at MASTER_PORT for processes that are no ranks: {error}")
