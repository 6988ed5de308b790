"""The tasks of this node, that the launcher has started here, and their processes: what those of a
task have taken together is kept when some of them end.
"""

from __future__ import annotations

import contextlib
import os
import time

from srunddp.util.kernel_file import (
    KernelFile,
    ancestors,
    children_of,
    environ_of,
    number_after,
    opened,
)

_NANO = 1e-9
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PASSES = 4  # what still ends then is complete in the next sample
# The kernel rounds the CPU time of children that were waited for down to two ticks of 10 ms: that
# is not lost.
_ROUNDING = 20_000_000


class MonotonicCounter:
    """A sum of counters whose owners come and go: ``value`` never falls, and keeps what no one has
    taken over.

    Args:
        rounding: a fall by so much is no loss.
    """

    def __init__(self, rounding: int = 0) -> None:
        self.value = self._kept = self._last = 0
        self._rounding = rounding

    def update(self, total: int) -> None:
        """Take the sum of the counters whose owners are there now."""
        if self._last - total > self._rounding:
            self._kept += self._last - total
        self._last = total
        self.value = max(self.value, total + self._kept)


class ProcessTree:
    """A task's first process and all that descend from it. One that was found once is followed to
    its end, whoever has adopted it meanwhile.

    The resident sets are summed over the processes, as Slurm's jobacct_gather/linux does: pages
    that they share count for each.

    Args:
        rank: the task's.
        root: its first process.

    Attributes:
        cpu: nanoseconds of CPU; resident: bytes; delay: nanoseconds that main threads waited for a
            CPU.
        bytes_read, bytes_written: of storage, a child's when it has been waited for as its
            parent's.
    """

    def __init__(self, rank: int, root: int) -> None:
        self.rank = rank
        self.root = root
        self.cpu = MonotonicCounter(_ROUNDING)
        self.bytes_read = MonotonicCounter()
        self.bytes_written = MonotonicCounter()
        self.resident = self.delay = 0
        self._members: dict[int, Process] = {}  # parents first
        self._delay_of_ended = 0
        self._join(root)

    @property
    def processes(self) -> int:
        """How many there are."""
        return len(self._members)

    def look(self, *, thorough: bool) -> None:
        """Take the numbers of now.

        Args:
            thorough: Read all of each process, and what all of its threads have forked.
        """
        # A parent is read before its children: nothing counts twice, but one that ended in between
        # is missing until its parent is read once more.
        for _ in range(_PASSES):
            if not self._pass(thorough=thorough):
                break
        members = self._members.values()
        self.resident = sum(each.resident for each in members)
        self.delay = self._delay_of_ended + sum(each.delay for each in members)
        self.cpu.update(sum(each.cpu + each.reaped for each in members))
        self.bytes_read.update(sum(each.bytes_read for each in members))
        self.bytes_written.update(sum(each.bytes_written for each in members))

    def _pass(self, *, thorough: bool) -> bool:
        """Whether a process has ended since the last one."""
        ended = []
        queue = list(self._members.values())
        # The list grows while it is gone through: a new child is read in the same pass, and may
        # have children.
        for process in queue:
            if not process.look(thorough=thorough):
                ended.append(process)
                continue
            for pid in process.new_children(of_all_threads=thorough):
                if pid not in self._members and (child := self._join(pid)):
                    queue.append(child)
        for process in ended:
            del self._members[process.pid]
            self._delay_of_ended += process.delay
        return bool(ended)

    def _join(self, pid: int) -> Process | None:
        with contextlib.suppress(OSError):
            self._members[pid] = Process(pid)
            return self._members[pid]
        return None


_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROCESS_CLOCK = 2  # CPUCLOCK_SCHED of clock_getcpuclockid(3)
# In /proc/PID/stat from the state on.
_REAPED_USER = 13
_REAPED_SYSTEM = 14
_THREADS = 17
_RESIDENT = 21


class Process:
    """One that may end at any time. Its numbers are those of the last look.

    Attributes:
        cpu: nanoseconds of CPU that its threads took; reaped: that children took which it has
            waited for.
        resident: bytes of its resident set.
        delay: nanoseconds that its main thread waited for a CPU.
        bytes_read, bytes_written: of storage; of the children that it has waited for as well.

    Raises:
        OSError: there is none.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # The clock's number as clock_getcpuclockid(3) makes it: reading it takes one call, and no
        # file.
        self._clock = (~pid << 3) | _PROCESS_CLOCK
        self._stat = KernelFile(f"/proc/{pid}/stat")
        self._children = opened(f"/proc/{pid}/task/{pid}/children")
        self._sched = opened(f"/proc/{pid}/schedstat")
        self._io = opened(f"/proc/{pid}/io")
        self._known = b""
        self._ran = True
        self._threads = 1
        # No clock shows this: the first look reads all.
        self.cpu = -1
        self.reaped = self.resident = self.delay = self.bytes_read = self.bytes_written = 0

    def look(self, *, thorough: bool) -> bool:
        """Read what has changed; False where it has ended, and its numbers are then those from
        before.

        A process that has not run since has neither waited for children nor read anything: its
        clock tells that for a tenth of the cost.

        Args:
            thorough: read all in any case, for what others do to it, such as taking its memory.
        """
        try:
            cpu = time.clock_gettime_ns(self._clock)
            self._ran = cpu != self.cpu or thorough
            if not self._ran:
                return True
            self._read_stat()
        except OSError:
            return False
        self.cpu = cpu
        self._read_others()
        return True

    def _read_stat(self) -> None:
        line = self._stat.read()
        # The name, in parentheses, may itself have blanks and parentheses.
        fields = line[line.rindex(b")") + 2 :].split(b" ", _RESIDENT + 1)
        self.reaped = (int(fields[_REAPED_USER]) + int(fields[_REAPED_SYSTEM])) * _TICK
        self._threads = int(fields[_THREADS])
        self.resident = int(fields[_RESIDENT]) * _PAGE

    def _read_others(self) -> None:
        try:
            if self._sched:
                self.delay = int(self._sched.read().split(b" ", 2)[1])
            if self._io:
                text = self._io.read()
                self.bytes_read = number_after(text, b"\nread_bytes: ") or 0
                self.bytes_written = number_after(text, b"\nwrite_bytes: ") or 0
        except OSError:
            self._io = None  # it has changed its user, or has ended, which the next look finds

    def new_children(self, *, of_all_threads: bool) -> list[int]:
        """List its children where they are others than those of the last call, else none.

        Args:
            of_all_threads: Also those that another than the main thread has forked.
        """
        before = self._known
        with contextlib.suppress(OSError):
            # /proc/PID/task/TID/children has what this one thread has forked.
            if self._ran and of_all_threads and self._threads > 1:
                self._known = self._of_threads()
            elif self._ran:
                if self._children:
                    self._known = self._children.read(whole=True)
                else:
                    self._known = b""
        if self._known != before:
            return [int(pid) for pid in self._known.split()]
        return []

    def _of_threads(self) -> bytes:
        folder = f"/proc/{self.pid}/task"
        files = [opened(f"{folder}/{thread}/children") for thread in os.listdir(folder)]
        return b" ".join(file.read(whole=True) for file in files if file)


class Tasks:
    """All that is run on this node for the job's step.

    Args:
        rank: of the task that the supervisor belongs to.
        supervisor: its process id.
        launcher: process id of who has started the tasks; None or 0 where that is not known: then
            there is the supervisor's alone.
        rank_variable: that tells a task its rank.

    Attributes:
        trees: of the tasks found so far, also when they have ended.
        visible: what ``CUDA_VISIBLE_DEVICES`` says to each of them, None where it is not set.
    """

    def __init__(
        self, rank: int, supervisor: int, launcher: int | None, rank_variable: str
    ) -> None:
        self._launcher = launcher or 0
        self._variable = rank_variable
        if launcher and rank_variable:
            self._started = opened(f"/proc/{launcher}/task/{launcher}/children")
        else:
            self._started = None
        self._before = b""
        # Its ancestor, or itself, that is the launcher's child; itself where the launcher is none.
        line = [each for each, _ in ancestors(supervisor)]
        if self._launcher in line[1:]:
            # Upwards from the supervisor, so that the one before the launcher is its child.
            root = line[line.index(self._launcher) - 1]
        else:
            root = supervisor
        self.trees = [ProcessTree(rank, root)]
        # Another one where the ranks of a lost node have come here.
        own = os.environ.get(rank_variable, "")
        self._moved_by = rank - int(own) if own.isdecimal() else 0
        self.visible = {os.environ.get(_VISIBLE)}
        self._known = {root}

    def look(self, *, thorough: bool) -> bool:
        """Take the numbers of now.

        Args:
            thorough: Look for new tasks in any case, and as of :meth:`ProcessTree.look`.

        Returns:
            Whether more tasks have been found.
        """
        before = len(self.trees)
        if self._started and (thorough or self._has_started_others()):
            # A task that is not exec'ed yet has not been told its rank: those without one are
            # looked at again.
            for pid in set(children_of(self._launcher)) - self._known:
                self._add_task(pid)
        for tree in self.trees:
            tree.look(thorough=thorough)
        return len(self.trees) > before

    def _has_started_others(self) -> bool:
        before = self._before
        with contextlib.suppress(OSError):  # it has ended
            if self._started:
                self._before = self._started.read(whole=True)
            else:
                self._before = b""
        return self._before != before

    def _add_task(self, pid: int) -> None:
        variables: dict[str, str] = {}
        with contextlib.suppress(OSError):  # another user's
            variables = environ_of(pid)
        rank = variables.get(self._variable, "")
        if rank.isdecimal():
            self._known.add(pid)
            self.visible.add(variables.get(_VISIBLE))
            self.trees.append(ProcessTree(int(rank) + self._moved_by, pid))

    def rows(self, time: str) -> str:
        """Return a line for each task that has a process."""
        return "".join(
            f"{time},{tree.rank},{tree.cpu.value * _NANO:.3f},{tree.resident},{tree.processes},"
            f"{tree.delay * _NANO:.3f}\n"
            for tree in self.trees
            if tree.processes
        )

    def cpus(self) -> int:
        """Count the CPUs that the affinity masks of the tasks name together."""
        union: set[int] = set()
        for tree in self.trees:
            with contextlib.suppress(OSError):
                union |= os.sched_getaffinity(tree.root)
        return len(union)
