"""Reports once, while the job runs, which ranks are slower than the others.

The sampler of rank 0's node finds the slow ranks in the files of all ranks, as the report does
after the run. Each look at the files runs in a separate process, because it takes some tenths of a
second and reads from a file system that may not answer.
"""

from __future__ import annotations

import gc
import os
import socket
import time
import warnings
from pathlib import Path
from typing import NoReturn

from srunddp.monitor.config import MonitorConfig
from srunddp.supervisor.signals import die_with_parent

# The number of readings before the first look. With the default interval of --monitor, the first
# look comes after two minutes.
_FIRST_AFTER = 24
_TIMES = 2  # each wait for the next look is this many times as long as the previous wait
_HAS_SAID = 3  # exit code of a look that has named ranks
_LOWEST_PRIORITY = 19


class SlowRankLooks:
    """Starts looks for slow ranks at growing intervals, until one has named some.

    Args:
        run: How the supervisor's own task is monitored.
        end: The socket to the supervisor, which prints the line that names the slow ranks.
    """

    def __init__(self, run: MonitorConfig, end: socket.socket) -> None:
        self._folder = run.folder
        self._end = end
        self._wait = _FIRST_AFTER * run.seconds
        self._due = time.monotonic() + self._wait
        self._process: int | None = None
        # Only rank 0's node looks, so that each line is printed once.
        self._is_over = run.rank != 0

    def tick(self) -> None:
        """Start a look if one is due, without waiting until it ends. Call this after each
        reading.
        """
        if self._is_over:
            return
        if self._process is not None:
            self._note_end(self._process)
        elif time.monotonic() >= self._due:
            self._wait *= _TIMES
            self._due = time.monotonic() + self._wait
            self._begin()

    def _note_end(self, process: int) -> None:
        try:
            ended, status = os.waitpid(process, os.WNOHANG)
        except ChildProcessError:
            self._process = None
            return
        if ended:
            self._process = None
            self._is_over = os.waitstatus_to_exitcode(status) == _HAS_SAID

    def _begin(self) -> None:
        sampler = os.getpid()
        try:
            with warnings.catch_warnings():
                # Python warns about a fork while other threads run, because a lock that another
                # thread held could block the child forever. Then slow ranks are named only in the
                # report, and nothing else is lost.
                warnings.simplefilter("ignore")
                pid = os.fork()
        except OSError:
            return  # the limit of processes is reached; the next look may succeed
        if pid == 0:
            _look(sampler, self._folder, self._end)
        self._process = pid


def _look(sampler: int, folder: Path, end: socket.socket) -> NoReturn:
    """Look for slow ranks, send the supervisor a line that names them if there are any, and end
    this process.

    Args:
        sampler: The pid of the sampler, with which this process ends.
        folder: The monitoring folder, with the files of all ranks.
        end: The socket to the supervisor.
    """
    code = 0
    try:
        die_with_parent(sampler)
        os.nice(_LOWEST_PRIORITY)
        gc.disable()
        # Imported here, because only this process needs the report's modules.
        from srunddp.report.advice import slow_ranks
        from srunddp.report.run import read
        from srunddp.report.summarize import summary_of

        if found := slow_ranks(summary_of(read(folder))):
            end.sendall(f"{found}\n".encode())
            code = _HAS_SAID
    finally:
        # Never return into the sampler's code, which runs in the parent process.
        os._exit(code)
