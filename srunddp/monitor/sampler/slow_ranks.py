"""Reports once, while the job runs, which ranks are slower than the others.

The sampler of rank 0's node finds them in the files of all ranks, as the report does after the run.
Each look runs in a process of its own, because it takes some tenths of a second and reads from a
file system that may not answer.
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

# Samples until the first look, which is after two minutes with --monitor's default.
_FIRST_AFTER = 24
_TIMES = 2  # the wait before each look is longer than the one before by this factor
_HAS_SAID = 3  # exit code of a look that has named ranks
_LOWEST_PRIORITY = 19


class SlowRankLooks:
    """Starts looks for slow ranks at growing intervals, until one has named some.

    Args:
        run: The monitoring of the supervisor's own task.
        end: The socket to the supervisor, which prints the line.
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
        """Start a look if it is due, without waiting for its end. Call it at each reading."""
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
                # Python warns about a fork while other threads run. If the child blocks on a lock
                # that one of them held, only this look is lost.
                warnings.simplefilter("ignore")
                pid = os.fork()
        except OSError:
            return  # the limit of processes is reached; the next look may succeed
        if pid == 0:
            _look(sampler, self._folder, self._end)
        self._process = pid


def _look(sampler: int, folder: Path, end: socket.socket) -> NoReturn:
    """Send the supervisor a line that names the slow ranks, if there are any, and end this
    process.
    """
    code = 0
    try:
        die_with_parent(sampler)
        os.nice(_LOWEST_PRIORITY)
        gc.disable()
        # Only this process needs the report.
        from srunddp.report.advice import slow_ranks
        from srunddp.report.run import read
        from srunddp.report.summarize import summary_of

        if found := slow_ranks(summary_of(read(folder))):
            end.sendall(f"{found}\n".encode())
            code = _HAS_SAID
    finally:
        # Never return into the sampler's code.
        os._exit(code)
