"""Measures what the tasks on this node use: CPU time, memory and storage, summed over the processes
of each task. What a process has used stays in the sum after it has ended.
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
_PASSES = 4  # a process that ends during the last pass is accounted for in the next sample
# The kernel rounds the CPU time of waited-for children down to ticks of 10 ms, twice per process. A
# fall by this much (in ns) is no loss.
_ROUNDING = 20_000_000


class MonotonicCounter:
    """Sums counters of processes that start and end. ``value`` never falls: it keeps what an ended
    process has counted, unless the count of its parent now includes it.

    Args:
        rounding: If the sum falls by at most this much, nothing counts as lost.
    """

    def __init__(self, rounding: int = 0) -> None:
        self.value = self._kept = self._last = 0
        self._rounding = rounding

    def update(self, total: int) -> None:
        """Update ``value``.

        Args:
            total: The sum over the processes that exist now.
        """
        if self._last - total > self._rounding:
            self._kept += self._last - total
        self._last = total
        self.value = max(self.value, total + self._kept)


class ProcessTree:
    """A task's first process and all its descendants. Once found, a process is followed to its end,
    even if another process has adopted it.

    The resident sets are summed over the processes, as Slurm's jobacct_gather/linux does, so shared
    pages count once for each process.

    Args:
        rank: The task's rank.
        root: The pid of the task's first process.

    Attributes:
        cpu: Nanoseconds of CPU time.
        resident: Bytes of memory.
        delay: Nanoseconds that the main threads waited for a CPU.
        bytes_read: Bytes read from storage. A child's bytes count as its parent's once the parent
            has waited for it.
        bytes_written: Bytes written to storage, counted in the same way.
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
        """The number of processes that were alive at the last look."""
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
        """Read all processes once and tell whether one of them has ended."""
        ended = []
        queue = list(self._members.values())
        # The loop appends to the list that it walks: a new child is read in the same pass, because
        # it may have children itself.
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
# Fields of /proc/PID/stat, counted from the state.
_REAPED_USER = 13
_REAPED_SYSTEM = 14
_THREADS = 17
_RESIDENT = 21


class Process:
    """A process that may end at any time. Its numbers are those of the last look.

    Attributes:
        cpu: Nanoseconds of CPU time that its threads have used.
        reaped: Nanoseconds of CPU time of the children that it has waited for.
        resident: Bytes of its resident set.
        delay: Nanoseconds that its main thread has waited for a CPU.
        bytes_read: Bytes read from storage, by it and by the children that it has waited for.
        bytes_written: Bytes written to storage, by the same processes.

    Raises:
        OSError: The process does not exist.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # Compute the id of the process's CPU clock as clock_getcpuclockid(3) does: reading that
        # clock takes one system call and no file.
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
        """Read the numbers that have changed. If the process has ended, keep the old ones and
        return False.

        If its CPU clock stands still, the process has neither waited for children nor read
        anything. Reading the clock costs a tenth of reading its files.

        Args:
            thorough: Read everything in any case, because others can change a process that does not
                run, for example by taking its memory.
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
            # The process has changed its user, or has ended, which the next look finds out.
            self._io = None

    def new_children(self, *, of_all_threads: bool) -> list[int]:
        """List the pids of the children if the list has changed since the last call; else return
        none.

        Args:
            of_all_threads: Include children that were forked by a thread other than the main
                thread.
        """
        before = self._known
        with contextlib.suppress(OSError):
            # /proc/PID/task/TID/children lists only the children that this thread has forked.
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
        trees: One for each task found so far, even if it has ended.
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
        # The root is the supervisor's ancestor (or the supervisor itself) that is a child of the
        # launcher. If the launcher is no ancestor, the root is the supervisor.
        line = [each for each, _ in ancestors(supervisor)]
        if self._launcher in line[1:]:
            # ancestors() goes upwards from the supervisor, so the entry before the launcher is its
            # child.
            root = line[line.index(self._launcher) - 1]
        else:
            root = supervisor
        self.trees = [ProcessTree(rank, root)]
        # On a spare node that replaces a lost node, the ranks differ from those in the variable,
        # all by the same number.
        own = os.environ.get(rank_variable, "")
        self._moved_by = rank - int(own) if own.isdecimal() else 0
        self.visible = {os.environ.get(_VISIBLE)}
        self._known = {root}

    def look(self, *, thorough: bool) -> bool:
        """Read the present numbers of all tasks and look for new tasks.

        Args:
            thorough: Look for new tasks even if the launcher has no new children; also passed on to
                :meth:`ProcessTree.look`.

        Returns:
            Whether new tasks have been found.
        """
        before = len(self.trees)
        if self._started and (thorough or self._has_started_others()):
            # A process has no rank in its environment before it executes the task's program. Those
            # without one stay unknown, so the next look sees them again.
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
        """Return one CSV line for each task that still has a process."""
        return "".join(
            f"{time},{tree.rank},{tree.cpu.value * _NANO:.3f},{tree.resident},{tree.processes},"
            f"{tree.delay * _NANO:.3f}\n"
            for tree in self.trees
            if tree.processes
        )

    def cpus(self) -> int:
        """Count the CPUs that occur in the affinity mask of at least one task."""
        union: set[int] = set()
        for tree in self.trees:
            with contextlib.suppress(OSError):
                union |= os.sched_getaffinity(tree.root)
        return len(union)
