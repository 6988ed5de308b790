"""The failure monitor, which each supervisor asks what the failure of one rank means for all.

:class:`FailureMonitor` is its interface and the implementation for a single process. On rank 0 it
is a :class:`srunddp.supervisor.coordinator.Coordinator`, which decides; on the other ranks it is a
:class:`srunddp.supervisor.participant.Participant`, which obeys rank 0. :class:`RankContext` holds
the facts that both know about their own rank.
"""

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Protocol

from srunddp.supervisor.clock import Clock
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.deputies import Deputies
from srunddp.supervisor.failure import Failure, FailureCategory, GpuFault
from srunddp.supervisor.limits import DEFAULT_LIMITS, GRACE, LOST_AFTER, SIGNAL_GRACE, Limits
from srunddp.supervisor.node_replacement import NextStart, SpareNodesOfStart
from srunddp.supervisor.restart import NO_STEPS_SEEN, RestartPolicy, StartSteps
from srunddp.supervisor.root_cause import Ending, RootCause, report, write
from srunddp.util.console import write_amid_output
from srunddp.util.quick_dataclass import dataclass

# The signals after which the failure of a single process is reported. Other signals, such as
# SIGTERM, are left out, because their sender knows why the process ends. Python prints nothing for
# them either.
_UNFORESEEN = (
    signal.SIGKILL,
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
)


class GpuHealth(Protocol):
    """Asks another process what is wrong with the GPUs of this node. No method blocks."""

    def ask(self) -> None:
        """Ask for the faults of the GPUs now. :meth:`look` returns the answer."""

    def look(self) -> tuple[GpuFault, ...] | None:
        """Return the answer to :meth:`ask`; None if it may still come."""

    def news(self) -> tuple[GpuFault, ...]:
        """Return the hardware faults that have come since the last call; empty if no process
        watches the GPUs.
        """


def may_be_of_gpu(root_cause: RootCause) -> bool:
    """Return whether a GPU may be the reason for a root cause, so that asking about GPUs is
    worthwhile.
    """
    is_open = root_cause.category is FailureCategory.OTHER
    return is_open and root_cause.ending is Ending.FAILED


class FailureMonitor:
    """Tells a supervisor what to do when a rank fails or finishes.

    The times that its methods take and return are those of the supervisor's :class:`ActiveClock`.
    This class itself is for a run of a single process, whose first failure is the root cause.

    Attributes:
        root_cause: Why all ranks have to leave; None while the run goes on.
        restart: The text that says where the ranks meet for the next start; None if none follows.
        has_lost: Whether a spare node has been lost.
        fenced: Whether the worker has to end at once, because others may go on with its rank.
        cut_off: Whether this node may be cut off from the other nodes.
        returns: Whether this node is given up, and its tasks come back to be a spare node.
    """

    def __init__(
        self,
        folder: Path | None,
        restarts: RestartPolicy | None = None,
        limits: Limits = DEFAULT_LIMITS,
        gpus: GpuHealth | None = None,
    ) -> None:
        self.root_cause: RootCause | None = None
        # The root cause as it was found, without faults of GPUs; None before. While
        # :attr:`root_cause` is still None, the process that asks NVML has been asked whether a GPU
        # is the reason. That is the state ASKING_GPUS of decision.py.
        self._found: RootCause | None = None
        self._gpus = gpus
        self.restart: str | None = None
        self.has_lost = self.fenced = self.cut_off = self.returns = False
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
        return self.root_cause is not None or (self._left and self._found is None)

    def connections(self) -> Iterable[SupervisorConnection]:
        """Return the connections for which the supervisor has to call :meth:`on_readable`."""
        return ()

    def on_readable(self, connection: SupervisorConnection, now: float) -> None:
        """Read the messages of a connection. Afterwards its ``open`` is False if it has ended."""

    def fail(self, failure: Failure, now: float) -> None:
        """Note that this rank has failed, which may set the root cause at once."""
        if self._found is not None:
            return
        shown = failure.shown or failure.exit_code - 128 not in _UNFORESEEN
        self._found = RootCause.of(replace(failure, shown=shown))
        if self._gpus is not None and may_be_of_gpu(self._found):
            self._gpus.ask()
        else:
            self._name_cause(self._found)

    def _name_cause(self, root_cause: RootCause) -> None:
        """Report the root cause of a single process, decide on a restart, and write
        ``failure.json``.
        """
        self.root_cause = root_cause
        report(root_cause, {})
        self._decide_restart(root_cause, "its script is over" if self._done else "")
        write(root_cause, {}, self._folder)

    def next_start(self) -> NextStart:
        """Return what is known of the next start with spare nodes. The supervisor asks when the
        worker has ended.
        """
        return NextStart()

    def is_first_deputy(self) -> bool:
        """Return whether this rank is the first deputy that can be reached. The supervisor asks
        when rank 0 is gone and the worker has ended.
        """
        return False

    def abandon(self, failure: Failure, now: float) -> bool:
        """Leave the ranks of this node to a spare node, because this process cannot go on.

        Args:
            failure: Why this process cannot go on.
            now: The time.

        Returns:
            Whether a spare node can take the ranks. If so, there is a root cause from now on, which
            may replace an earlier one. If not, nothing was done, and the caller has to treat this
            as a failure of this rank.
        """
        return False

    def _decide_restart(
        self,
        root_cause: RootCause,
        obstacle: str,
        *,
        moves: bool = False,
        steps_seen: StartSteps = NO_STEPS_SEEN,
    ) -> None:
        """Set :attr:`restart`, and say whether the run restarts, in a run with ``--restarts``.

        Args:
            root_cause: Why this start ends.
            obstacle: Why no restart is possible; empty if one is.
            moves: Whether ranks move to other nodes in the next start.
            steps_seen: What this start has shown of steps.
        """
        if self._restarts:
            self.restart, line = self._restarts.decide(
                root_cause, self._asked_by or obstacle, moves=moves, steps_seen=steps_seen
            )
            if line:
                write_amid_output(f"srunddp: {line}\n")

    def done(self, *, waits: bool = False) -> None:
        """Note that the script is over without an error.

        Args:
            waits: Whether the worker stays until the scripts of all ranks are over, as with MPI.
        """
        self._done = True

    def left(self) -> None:
        """Note that the worker has ended with 0."""
        self._left = True

    def asked(self, by: str) -> None:
        """Note that a signal asks for an end of the run: from now on no restart follows a failure.
        Only the first call counts.

        Args:
            by: The signal's name.
        """
        self._asked_by = self._asked_by or f"{by} asks for an end"

    def uses_mpi(self) -> None:
        """Note that the script has started MPI. MPI cannot be started again in the same process, so
        from now on no restart is possible.
        """
        if self._restarts:
            self._restarts = None
            write_amid_output(
                "srunddp: --restarts has no effect from now on, as the script uses MPI\n"
            )

    def ended(self) -> None:
        """Note that the worker has ended after the root cause was known."""

    def saves(self) -> None:
        """Note that the worker handles SIGTERM, and may save after the root cause was known."""

    def tick(self, now: float) -> float:
        """Do what is due, and return in how many seconds something is due next."""
        found = self._found
        if found is None or self.root_cause is not None or self._gpus is None:
            return self._limits.single_looks
        faults = self._gpus.look()
        if faults is None:
            return self._limits.gpus_look
        of_node = [replace(each, node=found.node) for each in faults]
        self._name_cause(found.with_gpu_faults(of_node))
        return 0.0


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """The facts about its own rank that a failure monitor needs, as values or as functions that
    return them.

    Attributes:
        rank: The rank of this supervisor.
        node: The node of this supervisor.
        nodes: The node of each task that this supervisor knows, by the task's number. Rank 0 is
            always among them.
        stall_timeout: Seconds without a step of any rank after which the run ends; 0 for no limit.
        asks_for_stall_timeout: Whether the user has given ``--stall-timeout``.
        step: Returns how many steps the worker has made; 0 while none is expected.
        paused: Returns whether the worker has said that no step is expected for now.
        has_steps: Returns whether the worker has ever made a step in this start.
        ran_alone: Returns whether the script is over, and has used torch without ever being in a
            process group with other ranks.
        stacks: Asks the worker for its stacks, and returns them as text.
        link_is_up: Returns whether this node's interface has a link.
        addresses: On rank 0, the address of each task's interface, as far as it is known.
        port: On rank 0, the port to which the nodes may connect to find out whether they reach each
            other; 0 if none is known.
        folder: The folder of the run's logs; None if the run writes none.
        lost_after: Seconds without an answer from another node's kernel after which that node is
            lost.
        signal_grace: Seconds that the other ranks may save after one has ended by the launcher's
            signal or has agreed to stop.
        ends_within: Seconds that a worker may take to end after the verdict before it is killed.
        restarts: Decides on rank 0 whether the run restarts; None on other ranks and without
            ``--restarts``.
        asked: Returns the number of a signal of the launcher that counts, at the given time, as the
            reason for the end of this run; 0 for none.
        deputies: The ranks that act for rank 0 when rank 0 is gone.
        spare_nodes: The spare nodes of this start; None in a run without ``--spare-nodes``.
        gpus: Asks about the GPUs of this node; None if the node has none.
        limits: How long the failure monitor waits, and how often it looks at what may have changed.
        clock: The clock of the leases, which goes on during a suspension. A deputy also uses it to
            measure how long it stays.
    """

    rank: int
    node: str
    nodes: Mapping[int, str]
    stall_timeout: float
    step: Callable[[], int]
    stacks: Callable[[], str]
    link_is_up: Callable[[], bool]
    addresses: Mapping[int, str] = field(default_factory=dict)
    port: int = 0
    folder: Path | None = None
    lost_after: float = LOST_AFTER
    signal_grace: float = SIGNAL_GRACE
    ends_within: float = GRACE
    restarts: RestartPolicy | None = None
    asked: Callable[[float], int] = lambda _: 0
    deputies: Deputies = field(default_factory=Deputies)
    spare_nodes: SpareNodesOfStart | None = None
    limits: Limits = DEFAULT_LIMITS
    clock: Clock = time.monotonic
    paused: Callable[[], bool] = lambda: False
    has_steps: Callable[[], bool] = lambda: False
    ran_alone: Callable[[], bool] = lambda: False
    asks_for_stall_timeout: bool = False
    gpus: GpuHealth | None = None

    @property
    def ping_every(self) -> float:
        """Seconds between two pings. A ping also says how many steps this rank has made, so pings
        are more frequent if ``--stall-timeout`` is short.
        """
        seldom = self.limits.pings_every
        return min(seldom, self.lost_after / 4, self.stall_timeout / 4 or seldom)

    @property
    def silent_after(self) -> float:
        """Seconds without a ping after which a supervisor counts as stopped or starved although its
        node's kernel answers.
        """
        return self.lost_after + self.limits.starved_for

    @property
    def lease_may_be_over_after(self) -> float:
        """With spare nodes: seconds without a message from the other side of a connection after
        which that side's lease may be over. A lease lasts for ``--lost-after`` from the last ping
        that was answered, which may be one earlier than the last that arrived, because an answer
        can get lost.
        """
        return self.lost_after - self.ping_every

    @property
    def starved(self) -> str:
        """The cause to report for a supervisor that counts as stopped or starved."""
        return f"srunddp has been silent for {self.silent_after:g} s, stopped or starved"
