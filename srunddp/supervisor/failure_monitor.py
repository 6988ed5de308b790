"""What decides for all ranks when one fails: what a supervisor asks of it, what it knows of its own
rank (:class:`RankContext`), and the failure monitor of a single process.

:class:`srunddp.supervisor.coordinator.Coordinator` does so on rank 0, and
:class:`srunddp.supervisor.participant.Participant`, which obeys it, on the others.
"""

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from srunddp.supervisor.clock import Clock
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.deputies import Deputies
from srunddp.supervisor.failure import Failure
from srunddp.supervisor.limits import DEFAULT_LIMITS, LOST_AFTER, Limits
from srunddp.supervisor.node_replacement import NextStart, SpareNodesOfStart
from srunddp.supervisor.restart import RestartPolicy
from srunddp.supervisor.root_cause import RootCause, report, write
from srunddp.util.console import write_stderr

# Of other ends whoever asked for them knows, and Python is silent about them, too.
_UNFORESEEN = (
    signal.SIGKILL,
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
)


class FailureMonitor:
    """What a supervisor asks of it. All times are those of the supervisor's :class:`ActiveClock`.

    This class itself is for a single process: its failure is the root cause, and nobody else is
    told.

    Attributes:
        root_cause: why all ranks leave now; None while they need not.
        restart: what rank 0 has published for the next start of the run; None where there is none.
        has_lost: whether a spare node is lost.
        fenced: whether the worker has to end at once, as others may go on without it; cut_off: as
            this node is lost.
    """

    def __init__(
        self,
        folder: Path | None,
        restarts: RestartPolicy | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.root_cause: RootCause | None = None
        self.restart: str | None = None
        self.has_lost = self.fenced = self.cut_off = False
        self._restarts = restarts
        self._asked_by = ""
        self._folder = folder
        self._limits = limits
        self._done = self._left = False

    @property
    def released(self) -> bool:
        """Whether the worker may leave."""
        return self._done

    @property
    def finished(self) -> bool:
        """Whether the supervisor may leave."""
        return self._left or self.root_cause is not None

    def connections(self) -> Iterable[SupervisorConnection]:
        """Those to watch for :meth:`on_readable`."""
        return ()

    def on_readable(self, connection: SupervisorConnection, now: float) -> None:
        """Read the messages of a connection, whose ``open`` says afterwards whether it has
        ended.
        """

    def fail(self, failure: Failure, now: float) -> None:
        """This rank has failed."""
        if not self.root_cause:
            shown = failure.shown or failure.exit_code - 128 not in _UNFORESEEN
            self.root_cause = RootCause.of(replace(failure, shown=shown))
            report(self.root_cause, {})
            self._decide_restart(self.root_cause, "its script is over" if self._done else "")
            write(self.root_cause, {}, self._folder)

    def next_start(self) -> NextStart:
        """With spare nodes, what is known of a next start. Asked once the worker has ended."""
        return NextStart()

    def is_first_deputy(self) -> bool:
        """Where rank 0 is gone, whether this one is the first that can act for it; asked when the
        worker has ended.
        """
        return False

    def abandon(self, failure: Failure, now: float) -> bool:
        """Leave the ranks of this node to a spare node, as this process cannot go on.

        Args:
            failure: Why it cannot.
            now: The time.

        Returns:
            Whether they are left: there is a root cause from now on, or the one that there was
            has changed. Else nothing was done, and this rank has failed.
        """
        return False

    def _decide_restart(self, root_cause: RootCause, obstacle: str, *, moves: bool = False) -> None:
        if self._restarts:
            self.restart, line = self._restarts.decide(
                root_cause, self._asked_by or obstacle, moves=moves
            )
            write_stderr(f"srunddp: {line}\n" if line else "")

    def done(self, *, waits: bool = False) -> None:
        """The script is over, without an error; ``waits``: its worker stays until all scripts are
        over, as with MPI.
        """
        self._done = True

    def left(self) -> None:
        """The worker has ended with 0."""
        self._left = True

    def asked(self, by: str) -> None:
        """Somebody wants an end of the run: no failure is a restart any more."""
        self._asked_by = self._asked_by or f"{by} asks for an end"

    def uses_mpi(self) -> None:
        """The script has started MPI, which cannot be started in these processes again: no restart
        any more.
        """
        if self._restarts:
            self._restarts = None
            write_stderr("srunddp: --restarts has no effect from now on, as the script uses MPI\n")

    def ended(self) -> None:
        """The worker has ended after the root cause was known."""

    def tick(self, now: float) -> float:
        """Do what is due; returns the seconds until something is."""
        return self._limits.single_looks


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a failure monitor knows of its own rank.

    Attributes:
        rank, node: of this supervisor; nodes: of the ranks that it knows, rank 0's among them.
        stall_timeout: seconds without a step; 0 for no limit.
        step: how many steps the worker has made; stacks: asks the worker for its stacks.
        link_is_up: whether this node's interface has a link.
        folder: of the run's logs.
        restarts: on rank 0, decides whether the run starts anew; None without ``--restarts``.
        asked: the number of the launcher's signal that ends this run, at a time; 0 for none.
        lost_after: seconds without an answer of another node's kernel, after which that node is
            lost.
        deputies: those that act for rank 0 when it is gone.
        spare_nodes: of this start; None in a run without ``--spare-nodes``.
        limits: how long it waits for what.
        clock: for leases and for how long a deputy stays: one that a suspension does not stop. With
            spare nodes theirs is the same.
    """

    rank: int
    node: str
    nodes: Mapping[int, str]
    stall_timeout: float
    step: Callable[[], int]
    stacks: Callable[[], str]
    link_is_up: Callable[[], bool]
    folder: Path | None = None
    lost_after: float = LOST_AFTER
    restarts: RestartPolicy | None = None
    asked: Callable[[float], int] = lambda _: 0
    deputies: Deputies = field(default_factory=Deputies)
    spare_nodes: SpareNodesOfStart | None = None
    limits: Limits = DEFAULT_LIMITS
    clock: Clock = time.monotonic

    @property
    def ping_every(self) -> float:
        """Seconds between two pings, which also say how many steps this rank has made."""
        seldom = self.limits.pings_every
        return min(seldom, self.lost_after / 4, self.stall_timeout / 4 or seldom)

    @property
    def silent_after(self) -> float:
        """Seconds without a ping, though the kernel answers, after which a supervisor is stopped or
        starved.
        """
        return self.lost_after + self.limits.starved_for

    @property
    def starved(self) -> str:
        """The cause then."""
        return f"srunddp has been silent for {self.silent_after:g} s, stopped or starved"
