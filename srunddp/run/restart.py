"""A restart within the job: the supervisor of each rank executes itself anew (``execve``), and so
becomes the supervisor of the next start, with the same process id and parent.

The launcher notices nothing. The ranks meet again at a socket on which rank 0 already listens: the
next start inherits this socket, and the other ranks have got its address with the root cause.
Everything else begins as in a new job, so that nothing of an earlier start can be mistaken for
something of the next start.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import NamedTuple, NoReturn

from srunddp.bootstrap.rendezvous.rank_setup import Rejoin
from srunddp.errors import ConfigError
from srunddp.run.read_once import position_of_stdin, rewind_stdin
from srunddp.supervisor.descendants import Earlier
from srunddp.supervisor.restart import Starts
from srunddp.supervisor.root_cause import STALLED
from srunddp.supervisor.worker_process import wait_for_child
from srunddp.util.messages import Message
from srunddp.util.quick_dataclass import dataclass

_VARIABLE = "_SRUNDDP_RESTART"


class _RestartMessage(Message):
    """A message from a start to the next one, in an environment variable of their process."""


@dataclass(frozen=True, kw_only=True)
class _HandedOver(_RestartMessage, kind="handed_over"):
    """All that a start hands over to the next one.

    Attributes:
        rejoin, history, mask, remaining, stdin, earlier, stalls, checkpointed: As in
            :class:`InheritedStart`.
    """

    rejoin: Rejoin
    history: Starts
    mask: tuple[int, ...]
    remaining: tuple[int, ...]
    stdin: int | None
    earlier: Earlier
    stalls: int
    checkpointed: float | None


class EndedStart(NamedTuple):
    """How a start of the run has ended on this rank, and what the next start needs to know.

    Attributes:
        exit_code: The exit code with which this process ends if no other start follows.
        rejoin: Where the ranks meet again; None if the run is over.
        history: On rank 0, how the starts so far have ended; None if only their number is known.
        remaining: The pids of processes of this start that could not be killed.
        end_requests: The signals that asked the run to end during this start. The next start gets
            them again.
        ends_by: The signal by which this process is to end; 0 to end with the exit code.
        has_lost_nodes: Whether any node, spare or not, was lost since the run began.
        is_fenced: Whether the other ranks go on without this node.
        is_cut_off: Whether this rank did not meet the other ranks and now waits to come back. As
            far as this rank knows, the run is then over, although ``rejoin`` is set.
        checkpointed: Unix time of the last checkpoint that this rank wrote in this start; None for
            none.
    """

    exit_code: int
    rejoin: Rejoin | None = None
    history: Starts | None = None
    remaining: Sequence[int] = ()
    end_requests: Sequence[int] = ()
    ends_by: int = 0
    has_lost_nodes: bool = False
    is_fenced: bool = False
    is_cut_off: bool = False
    checkpointed: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class InheritedStart:
    """What a start finds in its process: what the previous start has handed over, and the state
    with which the process was started.

    In the first start nothing was handed over: ``rejoin``, ``history``, ``mask``, ``remaining``,
    ``earlier``, ``stalls`` and ``checkpointed`` have their defaults.

    Attributes:
        rejoin: Where the ranks meet after a restart; None in the first start.
        history: On rank 0, how the previous starts have ended.
        mask: The signals that are blocked in the script; None to keep the mask of this process.
        remaining: The pids of processes of the previous start that could not be killed.
        stdin: How far standard input had been read when the first start began; None if it is not a
            regular file.
        earlier: The children that this process had before the first start forked its worker; None
            in the first start.
        stalls: How many of the previous starts have ended with a stall.
        checkpointed: Unix time of the last checkpoint that this process wrote in a previous start;
            None for none.
        environ, folder, cpus, files: Environment variables, working directory, affinity mask, and
            soft and hard limit of open files with which this process was started. The next start
            gets the same.
    """

    rejoin: Rejoin | None = None
    history: Starts = field(default_factory=Starts)
    mask: Sequence[int] | None = None
    remaining: Sequence[int] = ()
    stdin: int | None = None
    earlier: Earlier | None = None
    stalls: int = 0
    checkpointed: float | None = None
    environ: Mapping[str, str] = field(repr=False)
    folder: str
    cpus: set[int]
    files: tuple[int, int]

    def check(self) -> None:
        """Check that the processes of the previous start that could not be killed have ended since.

        Raises:
            ConfigError: One of them has not ended.
        """
        if remaining := [pid for pid in self.remaining if wait_for_child(pid, 0.0) is None]:
            raise ConfigError(
                f"processes {', '.join(map(str, remaining))} of the previous start cannot be"
                " killed",
                expected="their memory, also on GPUs, to be free",
                hint="see their state in /proc/PID/stack, and have the node checked",
            )

    def execute_next(
        self, ended: EndedStart, rejoin: Rejoin, mask: Iterable[int], earlier: Earlier
    ) -> NoReturn:
        """Replace this process by the next start.

        The next start finds what a new process would find: the original variables, working
        directory, affinity mask and limit of open files. Signals that are pending stay pending.

        Args:
            ended: How this start has ended.
            rejoin: Where the ranks meet again.
            mask: The signals that are blocked in the script.
            earlier: The children that this process had before the first start.
        """
        handed_over = _HandedOver(
            rejoin=rejoin,
            # Without rank 0 only two things are known: the number of starts, and that ranks move to
            # other nodes.
            history=ended.history or Starts(rejoin.generation, moved=True),
            mask=tuple(map(int, mask)),
            remaining=tuple(ended.remaining),
            stdin=self.stdin,
            earlier=earlier,
            stalls=self.stalls + (ended.exit_code == STALLED),
            checkpointed=ended.checkpointed or self.checkpointed,
        )
        text = handed_over.encode().decode()
        rewind_stdin(self.stdin)
        _set_inheritable(True, rejoin)
        for number in ended.end_requests:
            # The signals are blocked, so they stay pending until the next start reads them.
            os.kill(os.getpid(), number)
        with suppress(OSError):  # the folder may have been renamed or removed
            os.chdir(self.folder)
        # --bind=auto has narrowed this process's affinity mask. The next start needs the original
        # mask, because it divides the CPUs in it among the ranks.
        os.sched_setaffinity(0, self.cpus)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.files)
        os.execve(sys.executable, _command_line(), {**self.environ, _VARIABLE: text})


def _command_line() -> list[str]:
    """Return the words that started this process, with Python's present UTF-8 mode as an option.

    The option is needed because Python changes the locale variables to UTF-8 in a C locale. From
    the changed variables the Python of the next start could not tell that the locale was C, and
    might choose another mode.
    """
    option = f"-Xutf8={sys.flags.utf8_mode}"
    words = sys.orig_argv[1:]
    if words[0] == option:
        words = words[1:]
    return [sys.executable, option, *words]


def inherited_start() -> InheritedStart:
    """Read what the previous start has handed over, and remove the environment variable with it, so
    that the script does not see this variable.

    Call this before this process changes its variables, working directory, affinity mask or limits,
    because the present ones are kept for the next start.
    """
    handed_over = _RestartMessage.decode(os.environb.pop(_VARIABLE.encode(), b""))
    first = InheritedStart(
        environ=dict(os.environ),
        # Unlike getcwd(), readlink() also works if the folder has been deleted. That error is
        # reported later.
        folder=os.readlink("/proc/self/cwd"),
        cpus=os.sched_getaffinity(0),
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        stdin=position_of_stdin(),
    )
    if not isinstance(handed_over, _HandedOver):
        return first
    _set_inheritable(False, handed_over.rejoin)
    return replace(
        first,
        rejoin=handed_over.rejoin,
        history=handed_over.history,
        mask=handed_over.mask,
        remaining=handed_over.remaining,
        stdin=handed_over.stdin,
        earlier=handed_over.earlier,
        stalls=handed_over.stalls,
        checkpointed=handed_over.checkpointed,
    )


def _set_inheritable(inheritable: bool, rejoin: Rejoin) -> None:
    """Choose whether the socket on which rank 0 listens for the next start stays open in a program
    that this process executes. On other ranks there is no such socket.
    """
    if rejoin.descriptor is not None:
        os.set_inheritable(rejoin.descriptor, inheritable)
