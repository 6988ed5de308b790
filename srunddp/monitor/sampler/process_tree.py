"""The processes of one rank: what they have taken together is kept when some of them end."""

from __future__ import annotations

import contextlib

from srunddp.monitor.sampler.proc import Process

_PASSES = 4
# The kernel rounds the CPU time of children that were waited for down to two ticks of 10 ms: that is not lost.
_ROUNDING = 20_000_000


class Rising:
    """A sum of counters whose owners come and go: it never falls, and keeps what no one has taken over.

    Args:
        rounding: a fall by so much is no loss.

    Attributes:
        value: the sum so far.
    """

    def __init__(self, rounding: int = 0) -> None:
        self.value = self._kept = self._last = 0
        self._rounding = rounding

    def is_now(self, total: int) -> None:
        """What those that are there add up to."""
        if self._last - total > self._rounding:
            self._kept += self._last - total
        self._last = total
        self.value = max(self.value, total + self._kept)


class Tree:
    """A task's first process and all that descend from it. One that was found once is followed to its end, whoever
    has adopted it meanwhile.

    The resident sets are summed over the processes, as Slurm's jobacct_gather/linux does: pages that they share count
    for each.

    Args:
        rank: the task's.
        root: its first process.

    Attributes:
        cpu: nanoseconds of CPU; resident: bytes; delay: nanoseconds that main threads waited for a CPU.
        bytes_read, bytes_written: of storage, a child's when it has been waited for as its parent's.
    """

    def __init__(self, rank: int, root: int) -> None:
        self.rank = rank
        self.root = root
        self.cpu, self.bytes_read, self.bytes_written = Rising(_ROUNDING), Rising(), Rising()
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
            thorough: read all of every process, and find also what other threads than the main one have forked.
        """
        # A parent is read before its children: nothing counts twice, but one that ended in between is missing until
        # its parent is read once more.
        for _ in range(_PASSES):
            if not self._pass(thorough=thorough):
                break
        self._add_up()

    def _pass(self, *, thorough: bool) -> bool:
        """Whether a process has ended since the last one."""
        ended = []
        queue = list(self._members.values())
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

    def _add_up(self) -> None:
        cpu = resident = bytes_read = bytes_written = 0
        delay = self._delay_of_ended
        for process in self._members.values():
            cpu += process.cpu + process.reaped
            resident += process.resident
            delay += process.delay
            bytes_read += process.bytes_read
            bytes_written += process.bytes_written
        self.resident, self.delay = resident, delay
        self.cpu.is_now(cpu)
        self.bytes_read.is_now(bytes_read)
        self.bytes_written.is_now(bytes_written)
