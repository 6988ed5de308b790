"""torch's agent store, on demand: a store for processes that are no ranks, at ``MASTER_ADDR`` and
``MASTER_PORT``.

torchrun's agent serves a ``TCPStore`` there from the start of its ranks to their end, and says so
by ``TORCHELASTIC_USE_AGENT_STORE``: whatever inherits the variables connects to it as a client.
Here it works like this:

1. The ranks have a store of their own, which rank 0's worker serves on another port. So a
   connection to ``MASTER_PORT`` never comes from a rank that joins the world of the run: it comes
   from a program that a rank has started or become, from a group of some ranks, or from a client
   such as torchft's.
2. When all ranks have met, and before any of them learns the port, rank 0's supervisor listens on
   it. The kernel queues who connects, so nobody is refused or has to try again.
3. The first connection makes the supervisor start a process, which takes over the socket and serves
   torch's ``TCPStore`` on it, whoever has connected. Nodes that try the network between them do so
   at another port. A run without a connection has no such process.
4. The process is the supervisor's child, ignores signals, and ends with it. Only this process reads
   the interpreter and torch, so a file system that does not answer holds nobody else up. The next
   start of a run listens on a new socket.
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
        listening: The socket; the process of the store has it once it was started.
        host: The address on which the socket listens.
        port: Its port.
        limits: How long the end of the process may take.
        process: The process id of the store; None before :meth:`start`, and if that could not fork.
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
        """Have a selector wait for the first process that connects, until the socket is closed or
        handed over.

        Args:
            selector: Where to register this object.
            on_client: The data of its key, which the caller calls with this object.
        """
        selector.register(self, selectors.EVENT_READ, on_client)
        self._selector = selector

    def start(self) -> None:
        """Start the process that serves the store, and hand the socket over to it.

        The process must be started from the supervisor's main thread, with the end of which it
        ends. It is forked before it becomes another program: the interpreter may be on a file
        system that does not answer, and in ``posix_spawn`` or ``subprocess`` the supervisor would
        wait for it.
        """
        supervisor = os.getpid()
        try:
            with warnings.catch_warnings():
                # Python warns of a fork while other threads run. The child needs no lock of theirs.
                warnings.simplefilter("ignore")
                pid = os.fork()
        except OSError as error:
            _say_why_there_is_none(error)
        else:
            if pid == 0:
                self._become(supervisor)
            self.process = pid
        # In any case: while a copy is open here, clients wait instead of being refused if the
        # process is gone.
        self._close_socket()

    def _become(self, supervisor: int) -> NoReturn:
        """Become the process of the store; called in the child."""
        descriptor = self.listening.fileno()
        code = (
            f"import sys; sys.path[:] = {sys.path}; from srunddp.bootstrap.process_group"
            f".store_process import main; main({descriptor}, {self.host!r}, {self.port})"
        )
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",  # it computes nothing
        }
        try:
            # Before the new program, which may not come for long. The kernel keeps this over it.
            die_with_parent(supervisor)
            # Launchers send signals to the whole group or step, and the store is needed as long as
            # a rank may still be saving.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(nothing, 1)
            # If this process hangs, no rank may miss the end of a connection that it has inherited.
            # Nor is it for the store what the launcher has opened for its rank, such as a socket of
            # PMI.
            close_all([each for each in opened() if each > 2 and each != descriptor])
            os.set_inheritable(descriptor, True)
            os.execve(sys.executable, [sys.executable, "-c", code], variables)
        except OSError as error:
            _say_why_there_is_none(error)
        finally:
            os._exit(1)

    def close(self) -> bool:
        """Give the port back: close the socket, or end the process that has it. Later calls change
        nothing.

        Returns:
            Whether the process, if there was one, has ended in time.
        """
        self._close_socket()
        if self.process is None:
            return True
        # It may have been reaped, and then another process may have its id.
        if wait_for_child(self.process, 0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)
            if wait_for_child(self.process, self.limits.kill_after) is None:
                return False
        self.process = None
        return True

    def _close_socket(self) -> None:
        # The selector goes by the descriptor's number, which is another file's soon; and the kernel
        # reports a socket of which a process that was forked meanwhile has a copy.
        if self._selector is not None:
            self._selector.unregister(self)
            self._selector = None
        self.listening.close()


def _say_why_there_is_none(error: OSError) -> None:
    say_amid_output(f"no store at MASTER_PORT for processes that are no ranks: {error}")
