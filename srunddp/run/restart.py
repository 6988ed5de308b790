"""A restart within the job: each rank's supervisor becomes a new one by execve, with the same
process id and parent.

The launcher notices nothing. The ranks meet again where rank 0 listens already: its socket is the
next start's, and what it has published went to the others with the root cause. All else begins as
in a new job, so nothing that an earlier start left can be mistaken for the next one's.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn

from srunddp.bootstrap.rendezvous.rank_setup import Rejoin
from srunddp.errors import ConfigError
from srunddp.supervisor.restart import Starts
from srunddp.supervisor.worker_process import wait_for_child
from srunddp.util.messages import Message

_VARIABLE = "_SRUNDDP_RESTART"


class _RestartMessage(Message):
    """What a start hands to the next one, in a variable, as both are one process."""


@dataclass(frozen=True, kw_only=True)
class _HandedOver(_RestartMessage, kind="handed_over"):
    """All of it.

    Attributes:
        rejoin, history, mask, remaining: as of :class:`InheritedStart`.
    """

    rejoin: Rejoin
    history: Starts
    mask: tuple[int, ...]
    remaining: tuple[int, ...]


class EndedStart(NamedTuple):
    """How a start of the run has ended on this rank, and what the next one needs to know.

    Attributes:
        exit_code: to leave with, where no other start follows.
        rejoin: where the ranks meet again; None where the run is over.
        history: on rank 0, what the starts so far have come to; None where only their number is
            known.
        remaining: processes of this start that could not be killed.
        end_requests: signals by which somebody has asked for an end meanwhile.
        has_lost_nodes: whether nodes, of ranks or spare ones, were lost since the run began.
        is_fenced: whether others go on without this node.
    """

    exit_code: int
    rejoin: Rejoin | None = None
    history: Starts | None = None
    remaining: Sequence[int] = ()
    end_requests: Sequence[int] = ()
    has_lost_nodes: bool = False
    is_fenced: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class InheritedStart:
    """What a start finds in this process: nothing in the first, and what the one before has left.

    Attributes:
        rejoin: where the ranks meet, after a restart.
        history: on rank 0, what the starts before have come to.
        mask: the signals that the script is to have blocked; None for those that this process was
            started with.
        remaining: processes of the start before that could not be killed.
        environ, folder, cpus, files: variables, working folder, affinity mask and limit of open
            files of this process when it was started; the next start has the same.
    """

    rejoin: Rejoin | None = None
    history: Starts = field(default_factory=Starts)
    mask: Sequence[int] | None = None
    remaining: Sequence[int] = ()
    environ: Mapping[str, str] = field(repr=False)
    folder: str
    cpus: set[int]
    files: tuple[int, int]

    def check(self) -> None:
        """Refuse to start beside the worker before, or what it has started.

        Raises:
            ConfigError: one of them is still there.
        """
        if remaining := [pid for pid in self.remaining if wait_for_child(pid, 0.0) is None]:
            raise ConfigError(
                f"processes {', '.join(map(str, remaining))} of the start before cannot be killed",
                expected="its memory, and its GPU's, to be free",
                hint="see their state in /proc/PID/stack, and have the node looked after",
            )

    def execute_next(self, ended: EndedStart, rejoin: Rejoin, mask: Iterable[int]) -> NoReturn:
        """Become the next start, in this process.

        The next start finds all that a new process would: variables as texts, and what the kernel
        keeps over ``execve``, which are pending signals, working folder, affinity mask and limits.

        Args:
            ended: this start.
            rejoin: where the ranks meet again.
            mask: the signals that the script is to have blocked.
        """
        handed_over = _HandedOver(
            rejoin=rejoin,
            # Of a rank 0 that is gone no more is known than how many starts there were.
            history=ended.history or Starts(rejoin.generation),
            mask=tuple(map(int, mask)),
            remaining=tuple(ended.remaining),
        )
        text = handed_over.encode().decode()
        _set_inheritable(True, rejoin)
        for number in ended.end_requests:
            # Blocked, and so pending until the next start reads them.
            os.kill(os.getpid(), number)
        with suppress(OSError):  # it may have another name by now
            os.chdir(self.folder)
        # With --bind=auto this process has fewer CPUs than when it was started, and the next start
        # shares out those that its mask allows.
        os.sched_setaffinity(0, self.cpus)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.files)
        os.execve(sys.executable, _command_line(), {**self.environ, _VARIABLE: text})


def _command_line() -> list[str]:
    """The words that started this process, with Python's UTF-8 mode as it is.

    Of a C locale Python makes UTF-8, in the variables too, by which the next Python no longer
    finds that it was C. Only the first start lacks the option.
    """
    option = f"-Xutf8={sys.flags.utf8_mode}"
    words = sys.orig_argv[1:]
    if words[0] == option:
        words = words[1:]
    return [sys.executable, option, *words]


def inherited_start() -> InheritedStart:
    """Take what the start before has handed over to this process.

    To be called before anything of this process is changed. The script does not see the variable.
    """
    handed_over = _RestartMessage.decode(os.environb.pop(_VARIABLE.encode(), b""))
    first = InheritedStart(
        environ=dict(os.environ),
        # Also where it has been deleted, which is an error later.
        folder=os.readlink("/proc/self/cwd"),
        cpus=os.sched_getaffinity(0),
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
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
    )


def _set_inheritable(inheritable: bool, rejoin: Rejoin) -> None:
    """Let the socket on which rank 0 listens for the next start survive execve, or not."""
    if rejoin.descriptor is not None:
        os.set_inheritable(rejoin.descriptor, inheritable)
