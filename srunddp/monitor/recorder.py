"""Writes what a rank marks, for ``--monitor``: its supervisor does, so that nothing is lost however the rank ends.

Two files of each rank: the sums over its steps every few seconds, and what happened once. What cannot be written ends
nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from srunddp.telemetry import TelemetryPage
from srunddp.util.atomic_file import replace_file
from srunddp.util.kernel_file import stat_fields

STEPS = "time,steps,samples,step_s,data_s,own_s,longest_step_s,epoch\n"
MARKS = "time,mark,value\n"
RUN = "run.json"
_START = 19  # starttime of /proc/PID/stat, counted from the field behind the name


@dataclass
class Recorder:
    """Of one rank, in its supervisor: :meth:`open` before the fork, then :meth:`start`, and :meth:`finish` at the end.

    Attributes:
        folder: of this start of the run; name: before the ends of the files' names.
        seconds: between two looks at what the worker has marked.
        page: shared with the worker.
    """

    folder: Path
    name: str
    seconds: float
    page: TelemetryPage
    _steps: int = -1
    _events: int = -1
    _seen: int = 0
    _count: int = 0
    _tasks: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None

    def open(self) -> None:
        """Make the folder and this rank's files.

        Raises:
            OSError: one cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._steps = _open(self.folder / f"{self.name}.steps.csv", STEPS)
        self._events = _open(self.folder / f"{self.name}.marks.csv", MARKS)

    def in_worker(self) -> None:
        """Close the files there."""
        os.close(self._steps)
        os.close(self._events)

    def start(self) -> None:
        """Write from now on, in a thread: a slow file system must not keep a supervisor from its work."""
        self._tell(_started_at(os.getpid()), "process", math.nan)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def mark(self, name: str, value: float = math.nan) -> None:
        """Something that the supervisor sees now."""
        self._tell(time.time(), name, value)

    def describe(self, run: Mapping[str, Any]) -> None:
        """On rank 0: what is known of the run once all have met."""
        self._tasks.put(partial(_replace, self.folder / RUN, json.dumps(run, indent=2) + "\n"))

    def finish(self, code: int, limit: float) -> None:
        """The worker has ended: write the rest, within so many seconds.

        Args:
            code: the exit code to leave with.
        """
        self._tasks.put(self._look)
        self.mark("end", code)
        self._tasks.put(None)
        if self._thread:
            self._thread.join(limit)

    def _tell(self, when: float, name: str, value: float) -> None:
        self._tasks.put(partial(_write, self._events, _line(when, name, value)))

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                task = self._tasks.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                self._look()
                due = max(due + self.seconds, time.monotonic())
                continue
            if task is None:
                return
            task()

    def _look(self) -> None:
        events, self._seen = self.page.events(self._seen)
        if events:
            _write(self._events, "".join(_line(*event) for event in events))
        steps = self.page.snapshot()
        if steps.steps or steps.epoch:
            figures = f"{steps.steps},{steps.samples},{steps.step_s:.6f},{steps.data_s:.6f},{steps.own_s:.6f}"
            row = f"{figures},{steps.longest_step_s:.6f},{steps.epoch}"
        else:
            # The script has a loop of its own. Where no step is expected for now, nothing is read.
            self._count = self.page.read() or self._count
            row = f"{self._count},,,,,,"
        _write(self._steps, f"{time.time():.3f},{row}\n")


def _line(when: float, name: str, value: float) -> str:
    return f"{when:.3f},{name},{'' if math.isnan(value) else format(value, '.10g')}\n"


def _write(descriptor: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode())


def _replace(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        replace_file(path, text.encode())


def _open(path: Path, header: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    opened = os.open(path, flags, 0o666)
    os.set_blocking(opened, True)
    os.write(opened, header.encode())
    return opened


def _started_at(pid: int) -> float:
    """When a process was started, in Unix time, by the kernel."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat_fields(pid)[_START]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age
