"""One process as /proc shows it: CPU time, memory, storage I/O, and what it has of children that it waited for."""

from __future__ import annotations

import os
import time

from srunddp.monitor.sampler.kernel_file import KernelFile, number_after, opened

_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROCESS_CLOCK = 2  # CPUCLOCK_SCHED of clock_getcpuclockid(3)
_REAPED_USER, _REAPED_SYSTEM, _THREADS, _RESIDENT = 13, 14, 17, 21  # in /proc/PID/stat from the state on


class Process:
    """One that may end at any time. Its numbers are those of the last look.

    Args:
        pid: its process id.

    Attributes:
        cpu: nanoseconds of CPU that its threads took; reaped: that children took which it has waited for.
        resident: bytes of its resident set.
        delay: nanoseconds that its main thread waited for a CPU.
        bytes_read, bytes_written: of storage; of the children that it has waited for as well.

    Raises:
        OSError: there is none.
    """

    __slots__ = (
        "_children",
        "_clock",
        "_io",
        "_known",
        "_ran",
        "_sched",
        "_stat",
        "_threads",
        "bytes_read",
        "bytes_written",
        "cpu",
        "delay",
        "pid",
        "reaped",
        "resident",
    )

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._clock = (~pid << 3) | _PROCESS_CLOCK
        self._stat = KernelFile(f"/proc/{pid}/stat")
        self._children = opened(f"/proc/{pid}/task/{pid}/children")
        self._sched = opened(f"/proc/{pid}/schedstat")
        self._io = opened(f"/proc/{pid}/io")
        self._known, self._ran, self._threads = b"", True, 1
        self.cpu = -1
        self.reaped = self.resident = self.delay = self.bytes_read = self.bytes_written = 0

    def look(self, *, thorough: bool) -> bool:
        """Read what has changed; False where it has ended, and its numbers are then those from before.

        A process that has not run since has neither waited for children nor read anything: its clock tells that for
        a tenth of the cost.

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
        """Process ids of its children where they are others than those of the last call, else none."""
        if not self._ran:
            return []
        try:
            if of_all_threads and self._threads > 1:
                text = self._of_threads()
            else:
                text = self._children.read_all() if self._children else b""
        except OSError:
            return []
        if text == self._known:
            return []
        self._known = text
        return [int(pid) for pid in text.split()]

    def _of_threads(self) -> bytes:
        folder = f"/proc/{self.pid}/task"
        files = [opened(f"{folder}/{thread}/children") for thread in os.listdir(folder)]
        return b" ".join(file.read_all() for file in files if file)
