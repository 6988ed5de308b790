"""The tasks of this node: what the launcher has started here and told a rank."""

from __future__ import annotations

import contextlib
import os

from srunddp.monitor.sampler.process_tree import ProcessTree
from srunddp.util.kernel_file import ancestors, children_of, environ_of, opened

COLUMNS = ("time", "rank", "cpu_s", "rss_bytes", "processes", "delay_s")
_NANO = 1e-9
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Tasks:
    """All that is run on this node for the job's step.

    Args:
        rank: of the task that the supervisor belongs to; supervisor: its process id.
        launcher: process id of who has started the tasks; None or 0 where that is not known: then there is the
            supervisor's alone.
        rank_variable: that tells a task its rank.

    Attributes:
        trees: of the tasks found so far, also when they have ended.
        visible: what ``CUDA_VISIBLE_DEVICES`` says to each of them, None where it is not set.
    """

    def __init__(self, rank: int, supervisor: int, launcher: int | None, rank_variable: str) -> None:
        self._launcher, self._variable = launcher or 0, rank_variable
        self._started = opened(f"/proc/{launcher}/task/{launcher}/children") if launcher and rank_variable else None
        self._before = b""
        root = _below(self._launcher, supervisor)
        self.trees = [ProcessTree(rank, root)]
        self.visible = {os.environ.get(_VISIBLE)}
        self._known = {root}

    def look(self, *, thorough: bool) -> bool:
        """Take the numbers of now; returns whether more tasks have been found."""
        before = len(self.trees)
        if self._started and (thorough or self._has_started_others()):
            # A task that is not exec'ed yet has not been told its rank: those without one are looked at again.
            for pid in set(children_of(self._launcher)) - self._known:
                self._add_task(pid)
        for tree in self.trees:
            tree.look(thorough=thorough)
        return len(self.trees) > before

    def _has_started_others(self) -> bool:
        before = self._before
        with contextlib.suppress(OSError):  # it has ended
            self._before = self._started.read(whole=True) if self._started else b""
        return self._before != before

    def _add_task(self, pid: int) -> None:
        variables: dict[str, str] = {}
        with contextlib.suppress(OSError):  # another user's
            variables = environ_of(pid)
        rank = variables.get(self._variable, "")
        if rank.isdecimal():
            self._known.add(pid)
            self.visible.add(variables.get(_VISIBLE))
            self.trees.append(ProcessTree(int(rank), pid))

    def rows(self, time: str) -> str:
        """A line for each task that has a process."""
        return "".join(
            f"{time},{tree.rank},{tree.cpu.value * _NANO:.3f},{tree.resident},{tree.processes},"
            f"{tree.delay * _NANO:.3f}\n"
            for tree in self.trees
            if tree.processes
        )

    def cpus(self) -> int:
        """How many CPUs the affinity masks of the tasks name together."""
        union: set[int] = set()
        for tree in self.trees:
            with contextlib.suppress(OSError):
                union |= os.sched_getaffinity(tree.root)
        return len(union)


def _below(launcher: int, pid: int) -> int:
    """The ancestor of a process, or itself, that is the launcher's child; the process where the launcher is none."""
    line = [each for each, _ in ancestors(pid)]
    return line[line.index(launcher) - 1] if launcher in line[1:] else pid
