"""Brings back a task whose node was given up: the task waits for the next start, to be a task of a
spare node.

The task's worker has ended before, as for any restart. While a start runs, rank 0 listens on a
socket for the next start and reads nothing there. The task connects and says hello; the kernel of
rank 0's node keeps the connection and the hello. The server of the next start answers, gives the
task a number, and the task begins that start again with this number. If no start follows, rank 0
says that the run is over.
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
# Rank 0 says goodbye within this time, in seconds.
_GOODBYE = 3.0
# A successor of rank 0 listens all the time, so there is none if no process has listened in this
# number of rounds.
_ROUNDS = 3


def wait_for_next_start(
    setup: RankSetup,
    introduction: Introduction,
    interrupt: CancelToken | None,
    lost_after: float,
    limits: Limits,
) -> NoReturn:
    """Wait until the run takes this task back.

    Args:
        setup: What this task knows of itself.
        introduction: What this task says of itself, and where rank 0 may be.
        interrupt: Ends the wait when this task fails.
        lost_after: Seconds without an answer of rank 0's node after which the task looks for rank 0
            again.
        limits: How long the task looks for rank 0.

    Raises:
        ReassignedError: The run takes the task back, with this number.
        NotNeededError: The run is over.
        RendezvousError: Rank 0 is not found, or Slurm has taken the node out of the job.
    """
    own = setup.interface.address
    search = Search(setup.environment.node, limits.returns_within, is_awaited=is_awaited(setup))
    client.come_back(
        # No task on this node has gone on.
        [each for each in introduction.addresses if each.host != own],
        introduction.hello,
        introduction.trust,
        interrupt,
        lost_after,
        search.why_over,
    )


def is_awaited(setup: RankSetup) -> bool:
    """Return whether this task was told to come back in this very start."""
    rejoin = setup.options.rejoin
    return rejoin is not None and rejoin.spare_nodes is not None and rejoin.spare_nodes.is_awaited


def wait_for_link(prepare: Callable[[], RankSetup], node: str, within: float) -> RankSetup:
    """Wait until this node has an interface again: its link may be down.

    Args:
        prepare: Chooses the interface, and raises a ConfigError if it cannot.
        node: The node's name in Slurm.
        within: For how many seconds to wait once srun can be reached.

    Raises:
        ConfigError: The node has no interface in time, or a signal asks for an end.
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
    """Decides how long a task looks for the others.

    As long as srun cannot be reached, the node is likely cut off, and the time does not count.

    Attributes:
        node: The node of the task.
        within: For how many seconds the task looks once srun can be reached.
        clock: Measures the time.
        is_awaited: Whether the task was told to come back at this restart. Then the first round
            begins at once: the node was not cut off, and Slurm may take seconds to answer.
    """

    node: str
    within: float
    clock: Clock = time.monotonic
    is_awaited: bool = False
    _began: float | None = None  # None until the first round
    _since: float = 0.0  # from when the time counts
    _closed: int = 0  # rounds in a row in which no process listened
    # Whether srun has been found there, and the node in the job, since the node was cut off. srun
    # prints a line each time that a process connects to it.
    _is_in_reach: bool = False

    def why_over(self, found: client.Round) -> str:
        """Return why the task no longer looks for the others; empty if it does.

        Args:
            found: The result of the last round.
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
        """Return why the run is over for this node; empty if that is not known."""
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
        standing: The socket at which they wait.
    """
    introduction = discovery.introduce(setup.environment, setup.returns_at)
    deadline = time.monotonic() + _GOODBYE
    with AuthenticatedListener(
        listening=[standing],
        own=introduction.hello,
        trust=introduction.trust,
        say=lambda _: None,
    ) as listener:
        # The tasks that wait include some that have ended meanwhile, and those prove nothing.
        while waiting_at(standing) or listener.has_unproven:
            if time.monotonic() > deadline:
                break
            for _, connection, message in listener.events(deadline - time.monotonic()):
                if message is not None:
                    send(connection, RunHasEnded())
        for connection in listener.known:
            connection.close()
