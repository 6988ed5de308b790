"""Brings back a task whose node was given up: the task waits for the next start, in which it is a
task of a spare node.

The task's worker has ended before, as for any restart. While a start runs, rank 0 has a listening
socket for the tasks that come back, but does not read from it. So a task connects and says hello,
and the kernel of rank 0's node keeps the connection and the hello. The rendezvous server of the
next start answers and gives the task a number. With this number the task repeats the rendezvous of
the same start. If no start follows, rank 0 answers that the run is over.
"""

import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from srunddp.bootstrap.rendezvous import client, discovery
from srunddp.bootstrap.rendezvous.discovery import Introduction
from srunddp.bootstrap.rendezvous.listener import AuthenticatedListener
from srunddp.bootstrap.rendezvous.messages import RunHasEnded
from srunddp.bootstrap.rendezvous.protocol import CancelToken
from srunddp.bootstrap.rendezvous.rank_setup import RankSetup
from srunddp.errors import ConfigError
from srunddp.spare_nodes import srun
from srunddp.spare_nodes.srun import SrunState
from srunddp.supervisor import signals
from srunddp.supervisor.clock import Clock
from srunddp.supervisor.limits import Limits
from srunddp.util.messages import send
from srunddp.util.tcp import waiting_at

_LINK_LOOK = 1.0
# Seconds that rank 0 takes at most to tell the waiting tasks that the run is over.
_GOODBYE = 3.0
# After this number of rounds in which no process has listened, the run is over: a task that takes
# over from rank 0 would be listening all the time.
_ROUNDS = 3


def wait_for_next_start(
    setup: RankSetup,
    introduction: Introduction,
    interrupt: CancelToken | None,
    lost_after: float,
    limits: Limits,
) -> NoReturn:
    """Wait until the run takes this task back. This function never returns: the result is an
    exception.

    Args:
        setup: What this task knows of itself.
        introduction: What this task says of itself, and where rank 0 may be.
        interrupt: Ends the wait when this task fails.
        lost_after: Seconds without an answer from rank 0's node after which the task looks for rank
            0 again.
        limits: How long the task looks for rank 0.

    Raises:
        ReassignedError: The run takes the task back, with the number in the exception.
        NotNeededError: The run is over.
        RendezvousError: Rank 0 is not found, or Slurm has taken the node out of the job.
    """
    own = setup.interface.address
    search = Search(setup.environment.node, limits.returns_within, is_awaited=is_awaited(setup))
    client.come_back(
        # Do not look for rank 0 on this node: the run has given up all tasks of the node.
        [each for each in introduction.addresses if each.host != own],
        introduction.hello,
        introduction.trust,
        interrupt,
        lost_after,
        search.why_over,
    )


def is_awaited(setup: RankSetup) -> bool:
    """Return whether rank 0 told this task to come back when it gave up the task's node, so that
    the start that begins now waits for the task.
    """
    rejoin = setup.options.rejoin
    return rejoin is not None and rejoin.spare_nodes is not None and rejoin.spare_nodes.is_awaited


def wait_for_link(prepare: Callable[[], RankSetup], node: str, within: float) -> RankSetup:
    """Wait until this node has a usable interface again, because its link may be down for a while.

    Args:
        prepare: Chooses the interface, and raises a ConfigError if there is none.
        node: The node's name in Slurm.
        within: For how many seconds to wait once srun can be reached.

    Returns:
        What ``prepare`` has returned.

    Raises:
        ConfigError: The node has no interface in time, the run is over, or a signal asks for an
            end.
    """
    search = Search(node, within)
    while True:
        try:
            return prepare()
        except ConfigError:
            is_over = bool(search.why_over(client.Round()))
            if is_over or signal.sigpending() & {*signals.ENDING}:
                raise
        time.sleep(_LINK_LOOK)


@dataclass
class Search:
    """Decides how long a task looks for the other tasks of the run.

    While srun cannot be reached, the task's node is likely cut off, so this time does not count.

    Attributes:
        node: The name of the task's node in Slurm.
        within: For how many seconds the task looks once srun can be reached.
        clock: Measures the time.
        is_awaited: Whether the task was told to come back at this restart. Then the node was not
            cut off, so the first round begins at once, without asking Slurm, which may take
            seconds to answer.
    """

    node: str
    within: float
    clock: Clock = time.monotonic
    is_awaited: bool = False
    _began: float | None = None  # None until the first round
    _since: float = 0.0  # the time from which `within` counts
    _closed: int = 0  # rounds in a row in which no process listened
    # Whether the task has reached srun, while its node was still in the job, since the last
    # connection to rank 0. If so, the task does not try srun again, because srun prints a line for
    # each process that connects to it.
    _is_in_reach: bool = False

    def why_over(self, found: client.Round) -> str:
        """Return why the task gives up looking for the other tasks; empty if it goes on looking.

        Args:
            found: The result of the last round; a new ``Round`` before the first.
        """
        now = self.clock()
        skips_srun = self._began is None and self.is_awaited
        if self._began is None or found.has_waited:
            self._began = now
            self._since = now
            self._is_in_reach = False
        if skips_srun:
            return ""
        self._closed = self._closed + 1 if found.are_all_closed else 0
        if not self._is_in_reach and (why := self._look_for_srun(now)):
            return why
        if self._closed >= _ROUNDS:
            return "no process of the run listens any more where it did"
        if now - self._began > srun.AWAITED or now - self._since > self.within:
            return f"they have not answered for {now - self._since:.0f} s"
        return ""

    def _look_for_srun(self, now: float) -> str:
        """Ask for the states of srun and of this node in the job. Return why the run is over for
        this node; empty if it may still go on.
        """
        match srun.state():
            case SrunState.ENDED:
                return "srun has ended"
            case SrunState.CUT_OFF:
                self._since = now
            case SrunState.THERE:
                if srun.is_in_job(self.node) is False:
                    return "Slurm has taken the node out of the job"
                self._is_in_reach = True
        return ""


def dismiss(setup: RankSetup, standing: socket.socket) -> None:
    """Tell the tasks that wait for the next start that the run is over.

    Args:
        setup: What rank 0 knows of itself.
        standing: The listening socket to which the waiting tasks have connected.
    """
    introduction = discovery.introduce(setup.environment, setup.returns_at)
    deadline = time.monotonic() + _GOODBYE
    with AuthenticatedListener(
        listening=[standing],
        own=introduction.hello,
        trust=introduction.trust,
        say=lambda _: None,
    ) as listener:
        # Some of the tasks that have connected may have ended since. They never send a proof, so
        # there is a deadline.
        while waiting_at(standing) or listener.has_unproven:
            if time.monotonic() > deadline:
                break
            for _, connection, message in listener.events(deadline - time.monotonic()):
                if message is not None:
                    send(connection, RunHasEnded())
        for connection in listener.known:
            connection.close()
