"""Measures what the tasks on this node use: CPU time, memory and storage, summed over the processes
of each task. After a process has ended, the sum still contains its CPU time and what it has read
and written.
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
_PASSES = 4  # a process that ends during the last pass is accounted for in the next reading
# In nanoseconds. The kernel rounds the CPU time of waited-for children down to ticks of 10 ms,
# twice per process, so the sum may fall by this much although no process is missing from it.
_ROUNDING = 20_000_000


class MonotonicCounter:
    """Sums counters of processes that start and end. ``value`` never falls: it keeps what an ended
    process has counted, unless the count of its parent now includes it.

    Args:
        rounding: If the sum falls by at most this much, the cause is rounding, and not a process
            that has ended.

    Attributes:
        value: The sum of all counts.
    """

    def __init__(self, rounding: int = 0) -> None:
        self.value = self._kept = self._last = 0
        self._rounding = rounding

    def update(self, total: int) -> None:
        """Update ``value`` from the present counts.

        Args:
            total: The sum over the processes that exist now.
        """
        if self._last - total > self._rounding:
            self._kept += self._last - total
        self._last = total
        self.value = max(self.value, total + self._kept)


class ProcessTree:
    """A task's first process and all its descendants. Once found, a process is measured until it
    ends, even if its parent ends before and another process adopts it.

    The resident sets of all processes are added, as Slurm's jobacct_gather/linux adds them, so
    memory that processes share counts once for each of them.

    Args:
        rank: The task's rank.
        root: The pid of the task's first process.

    Attributes:
        cpu: The counter of CPU time, in nanoseconds.
        resident: Bytes of memory at the last look.
        delay: Nanoseconds that the main threads have waited for a CPU.
        bytes_read: The counter of bytes read from storage. The bytes of a child count as bytes of
            its parent once the parent has waited for the child.
        bytes_written: The counter of bytes written to storage, counted in the same way.
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
        """The number of processes that were running at the last look."""
        return len(self._members)

    def look(self, *, thorough: bool) -> None:
        """Read the present numbers of all processes.

        Args:
            thorough: Read even processes that have not run since the last look, and find the
                children that were forked by any of their threads, not only the main thread.
        """
        # Read a parent before its children, so that nothing counts twice. If a child ends in
        # between, its numbers are missing until its parent is read once more.
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
        """Read all processes once, and return whether one of them has ended."""
        ended = []
        queue = list(self._members.values())
        # The loop appends new children to the list that it walks, so that each is read in the same
        # pass: it may have children itself.
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
# Numbers of fields in /proc/PID/stat. Field 0 here is the process's state, which follows its name.
_REAPED_USER = 13
_REAPED_SYSTEM = 14
_THREADS = 17
_RESIDENT = 21


class Process:
    """A process that may end at any time. The attributes have their values of the last look.

    Attributes:
        cpu: Nanoseconds of CPU time that the process's threads have used.
        reaped: Nanoseconds of CPU time of the children that the process has waited for.
        resident: Bytes of the process's resident set.
        delay: Nanoseconds that the process's main thread has waited for a CPU.
        bytes_read: Bytes that the process, and the children that it has waited for, have read from
            storage.
        bytes_written: Bytes that these processes have written to storage.

    Raises:
        OSError: The process does not exist.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # Compute the id of the process's CPU clock as clock_getcpuclockid(3) does. Reading this
        # clock takes one system call, and no file has to be opened.
        self._clock = (~pid << 3) | _PROCESS_CLOCK
        self._stat = KernelFile(f"/proc/{pid}/stat")
        self._children = opened(f"/proc/{pid}/task/{pid}/children")
        self._sched = opened(f"/proc/{pid}/schedstat")
        self._io = opened(f"/proc/{pid}/io")
        self._known = b""
        self._ran = True
        self._threads = 1
        # No clock ever shows -1, so the first look reads everything.
        self.cpu = -1
        self.reaped = self.resident = self.delay = self.bytes_read = self.bytes_written = 0

    def look(self, *, thorough: bool) -> bool:
        """Read the process's CPU clock and, if the process has run since the last look, its files.

        A process whose CPU clock stands still has neither waited for children nor read or written
        anything, and reading the clock costs a tenth of reading the files.

        Args:
            thorough: Whether to read the files even if the process has not run. Its memory may have
                changed all the same, for example because the kernel has taken pages from it.

        Returns:
            Whether the process still exists. If not, the attributes keep their values.
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
        # The process name, in parentheses, may itself contain blanks and parentheses.
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
            # The process has changed its user, or has ended. The next look finds out if it has
            # ended.
            self._io = None

    def new_children(self, *, of_all_threads: bool) -> list[int]:
        """Return the pids of all children if the children have changed since the last call; else an
        empty list.

        Args:
            of_all_threads: Whether to include children that were forked by other threads than the
                main thread.
        """
        before = self._known
        with contextlib.suppress(OSError):
            # /proc/PID/task/TID/children lists only the children that the thread TID has forked.
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
    """All tasks of the job step that run on this node.

    Args:
        rank: The rank of the supervisor's own task.
        supervisor: The supervisor's pid.
        launcher: The pid of the process that started the tasks. If it is None or 0 (unknown), only
            the supervisor's own task is watched.
        rank_variable: The environment variable that holds a task's rank.

    Attributes:
        trees: The processes of each task that was found so far, even if the task has ended.
        visible: The values of ``CUDA_VISIBLE_DEVICES`` among the tasks; None stands for unset.
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
        # The root of this task is the child of the launcher from which the supervisor descends, or
        # the supervisor itself if it does not descend from the launcher.
        line = [each for each, _ in ancestors(supervisor)]
        if self._launcher in line[1:]:
            # ancestors() goes upwards from the supervisor, so the entry before the launcher is the
            # launcher's child.
            root = line[line.index(self._launcher) - 1]
        else:
            root = supervisor
        self.trees = [ProcessTree(rank, root)]
        # On a spare node that replaces a lost node, the tasks have different ranks from those in
        # the launcher's variable. The difference is the same for all tasks of the node.
        own = os.environ.get(rank_variable, "")
        self._moved_by = rank - int(own) if own.isdecimal() else 0
        self.visible = {os.environ.get(_VISIBLE)}
        self._known = {root}

    def look(self, *, thorough: bool) -> bool:
        """Look for new tasks, and read the present numbers of all tasks.

        Args:
            thorough: Whether to look for new tasks even if the launcher has no new children. It is
                also the argument of :meth:`ProcessTree.look`.

        Returns:
            Whether new tasks have been found.
        """
        before = len(self.trees)
        if self._started and (thorough or self._has_started_others()):
            # A child of the launcher has no rank in its environment before it executes the task's
            # program. It stays unknown until then, so that the next look reads it again.
            for pid in set(children_of(self._launcher)) - self._known:
                self._add_task(pid)
        for tree in self.trees:
            tree.look(thorough=thorough)
        return len(self.trees) > before

    def _has_started_others(self) -> bool:
        before = self._before
        with contextlib.suppress(OSError):  # the launcher has ended
            if self._started:
                self._before = self._started.read(whole=True)
            else:
                self._before = b""
        return self._before != before

    def _add_task(self, pid: int) -> None:
        variables: dict[str, str] = {}
        with contextlib.suppress(OSError):  # the process has ended or belongs to another user
            variables = environ_of(pid)
        rank = variables.get(self._variable, "")
        if rank.isdecimal():
            self._known.add(pid)
            self.visible.add(variables.get(_VISIBLE))
            self.trees.append(ProcessTree(int(rank) + self._moved_by, pid))

    def rows(self, time: str) -> str:
        """Return one CSV line for each task that still has a process.

        Args:
            time: The first column of each line, in Unix time.
        """
        return "".join(
            f"{time},{tree.rank},{tree.cpu.value * _NANO:.3f},{tree.resident},{tree.processes},"
            f"{tree.delay * _NANO:.3f}\n"
            for tree in self.trees
            if tree.processes
        )

    def cpus(self) -> int:
        """Return the number of CPUs on which the affinity mask of at least one task allows it to
        run; 0 if no task still runs.
        """
        union: set[int] = set()
        for tree in self.trees:
            with contextlib.suppress(OSError):
                union |= os.sched_getaffinity(tree.root)
        return len(union)
