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
from typing import TYPE_CHECKING, NoReturn

from srunddp.bootstrap.rendezvous.meet import Rejoin
from srunddp.errors import ConfigError
from srunddp.supervisor.restart import Starts
from srunddp.supervisor.worker_process import wait_for_child
from srunddp.util.messages import Message

if TYPE_CHECKING:
    from srunddp.run.supervise import Agent

_VARIABLE = "_SRUNDDP_RESTART"


class _RestartMessage(Message):
    """What a start hands to the next one, in a variable, as both are one process."""


@dataclass(frozen=True, kw_only=True)
class _HandedOver(_RestartMessage, kind="handed_over"):
    """All of it.

    Attributes:
        rejoin, history, mask, remaining: As of :class:`Start`.
    """

    rejoin: Rejoin
    history: Starts
    mask: tuple[int, ...]
    remaining: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run in this process: the first, or one after a restart.

    Attributes:
        rejoin: where the ranks meet, after a restart.
        history: on rank 0, what the starts before have come to.
        mask: the signals that the script is to have blocked; None for those that this process was
            started with.
        remaining: processes of the start before that could not be killed.
        environ, folder, cpus, files: of this process when it was started; the next start has the
            same.
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
        """Raise a ConfigError where the worker before, or what it has started, is still there."""
        if remaining := [pid for pid in self.remaining if wait_for_child(pid, 0.0) is None]:
            raise ConfigError(
                f"processes {', '.join(map(str, remaining))} of the start before cannot be killed",
                expected="its memory, and its GPU's, to be free",
                hint="see their state in /proc/PID/stack, and have the node looked after",
            )

    def execute_next(self, agent: Agent, mask: Iterable[int]) -> NoReturn:
        """Become the next start, to which signals that ask for an end come again; those not yet
        read stay pending.
        """
        rejoin = agent.rejoin
        assert rejoin
        # Of a rank 0 that is gone no more is known than how many starts there were.
        if agent.policy:
            history = agent.policy.history
        else:
            history = Starts(rejoin.generation)
        handed_over = _HandedOver(
            rejoin=rejoin,
            history=history,
            mask=tuple(map(int, mask)),
            remaining=tuple(agent.remaining),
        )
        _set_inheritable(True, rejoin)
        for number in agent.asked:
            os.kill(os.getpid(), number)
        with suppress(OSError):  # it may have another name by now
            os.chdir(self.folder)
        os.sched_setaffinity(0, self.cpus)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.files)
        # Of a C locale Python makes UTF-8 in the variables too, by which the next one no longer
        # finds that it was C.
        mode = f"-Xutf8={sys.flags.utf8_mode}"
        words = [sys.executable, mode, *sys.orig_argv[2 if sys.orig_argv[1] == mode else 1 :]]
        text = handed_over.encode().decode()
        os.execve(sys.executable, words, {**self.environ, _VARIABLE: text})


def current_start() -> Start:
    """The start that this process is; before anything is changed in it. The script does not see the
    variable.
    """
    handed_over = _RestartMessage.decode(os.environb.pop(_VARIABLE.encode(), b""))
    start = Start(
        environ=dict(os.environ),
        # Also where it has been deleted, which is an error later.
        folder=os.readlink("/proc/self/cwd"),
        cpus=os.sched_getaffinity(0),
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    if not isinstance(handed_over, _HandedOver):
        return start
    _set_inheritable(False, handed_over.rejoin)
    return replace(
        start,
        rejoin=handed_over.rejoin,
        history=handed_over.history,
        mask=handed_over.mask,
        remaining=handed_over.remaining,
    )


def _set_inheritable(inheritable: bool, rejoin: Rejoin) -> None:
    """Let the socket on which rank 0 listens for the next start survive execve, or not."""
    if rejoin.descriptor is not None:
        os.set_inheritable(rejoin.descriptor, inheritable)
