"""Records a run with ``--monitor``: each rank has a recorder and each node a sampler, from before
the rendezvous to the end of the run.

The recorder of a rank writes two files: sums over the steps, every few seconds, and single events.
It is a thread of the supervisor, so it loses nothing, however the worker ends. A file that cannot
be written does not end the run.
"""

import contextlib
import itertools
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srunddp.monitor.config import MonitorConfig
from srunddp.supervisor.output.redirect import open_to_append
from srunddp.telemetry import MONITOR_FOLDER, TelemetryPage
from srunddp.util.atomic_file import replace_file
from srunddp.util.console import say_amid_output
from srunddp.util.kernel_file import STARTED, stat_fields
from srunddp.util.sample_files import MARKS, SETTINGS, STEPS

if TYPE_CHECKING:
    from srunddp.monitor.sampler.process import Sampler

RUN = "run.json"
_WITHIN = 0.5  # seconds to write what is pending: the end of a run must not wait for a file system


class Monitor:
    """Records one rank and, if the config says so, samples its node.

    Call the methods in the order in which they are defined. The worker uses only :attr:`page` and
    :meth:`in_worker`.

    Attributes:
        page: The shared page of this rank's supervisor and worker.
    """

    def __init__(self, config: MonitorConfig | None = None) -> None:
        """Open the rank's files.

        Args:
            config: How the rank is monitored; None if it is not. Then there are no files, and all
                methods do nothing.

        Raises:
            ConfigError: The files cannot be written.
        """
        self.page = TelemetryPage(recording=config is not None)
        self._config = config
        self._files = _open_files(config) if config else None
        # How many events of the page have been written to the file.
        self._seen = 0
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._describing: threading.Thread | None = None
        self._sampler: Sampler | None = None

    def start_sampler(self, interface: str, rank_variable: str, launcher: int | None) -> int | None:
        """Fork the node's sampler if this rank is the one that samples its node.

        Call this in the supervisor, before the worker is forked.

        Args:
            interface: Name of the network interface that the run uses.
            rank_variable: The environment variable that holds a process's rank.
            launcher: The pid of the process from which all ranks of this node descend; None if
                unknown.

        Returns:
            The sampler's process id; None if this rank starts no sampler.
        """
        if not self._config or not self._config.samples:
            return None
        # Imported here, because only one rank of each node needs the sampler's module.
        from srunddp.monitor.sampler.process import SamplerConfig, start

        self._sampler = start(
            SamplerConfig(self._config, interface, rank_variable, os.getpid(), launcher)
        )
        return self._sampler.pid

    @property
    def gpu_faults(self) -> Path | None:
        """The path of the file for the faults of this node's GPUs; None if another rank of the node
        writes it, or the run is not monitored.
        """
        if not self._config or not self._config.samples:
            return None
        return self._config.folder / f"{self._config.node}.gpu_faults.csv"

    def export(self) -> None:
        """On rank 0, set the environment variable that names the monitoring folder for the script;
        on other ranks, remove it. Call this before the worker is forked.
        """
        os.environ.pop(MONITOR_FOLDER, None)  # set if a process of another run started this run
        if self._config and self._config.rank == 0:
            # Absolute, because the script may change its working directory.
            os.environ[MONITOR_FOLDER] = str(self._config.folder.absolute())

    def in_worker(self) -> None:
        """Close, in the worker, the files and the socket that belong to the supervisor."""
        for file in self._files or ():
            os.close(file)
        if self._sampler:
            self._sampler.in_worker()

    def start(self) -> None:
        """Start the thread that writes the files; call it in the supervisor after the fork.

        The supervisor itself does not write, because a file system may be slow.
        """
        # /proc gives the start time in clock ticks since boot, which include the time that the node
        # was suspended. CLOCK_BOOTTIME includes it too; time.monotonic() does not.
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(
            stat_fields("self")[STARTED]
        ) / os.sysconf("SC_CLK_TCK")
        self._event(time.time() - age, "process", math.nan)  # when the kernel started this process
        if self._config and self._files:
            # A daemon thread, so that a write that hangs in the file system cannot keep this
            # process from ending.
            self._thread = threading.Thread(
                target=self._run, args=(*self._files, self._config.seconds), daemon=True
            )
            self._thread.start()

    def mark(self, name: str, value: float = math.nan) -> None:
        """Write an event of the supervisor to the marks file, with the present time.

        Args:
            name: One of the names that docs/reference/files.md lists for the marks file.
            value: A number that belongs to the event; nan if there is none.
        """
        self._event(time.time(), name, value)

    def describe(
        self, run: Mapping[str, Any], more: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        """Write run.json, which describes the run, in a thread. Call this on rank 0 after the
        rendezvous.

        Args:
            run: The facts that are known now, by their keys in run.json.
            more: Returns further facts, which take longer to find out; None if there are none. The
                thread calls it, and writes run.json again with these facts added.
        """
        if self._config:
            own = {"script": self._config.script, "seconds": self._config.seconds}
            # Not in the recorder's thread: if it had to wait for the script's folder or the disk,
            # it would lose its last rows at the end of a short run.
            self._describing = threading.Thread(
                target=_describe,
                args=(self._config.folder / RUN, {"version": 1, **run, **own}, more),
                daemon=True,
            )
            self._describing.start()

    def stop_sampler(self) -> str:
        """End the sampler. Call this when the worker has ended, but before the processes that the
        worker has left behind are killed.

        Returns:
            Why the sampler ended too early; empty if it did not.
        """
        if self._sampler:
            return self._sampler.finish(_WITHIN)
        return ""

    def finish(self, code: int, limit: float = _WITHIN) -> None:
        """Write what is still pending, then the ``end`` event, and stop the thread. Wait for
        run.json, too.

        Args:
            code: The exit code with which the supervisor will end.
            limit: How many seconds to wait. What is not written by then is lost.
        """
        if self._files and self._thread:
            until = time.monotonic() + limit
            # Keep this order: the worker's last events, then the ``end`` event, then None, which
            # stops the thread.
            self._tasks.put(partial(self._look, *self._files))
            self.mark("end", code)
            self._tasks.put(None)
            self._thread.join(limit)
            if self._describing:
                self._describing.join(max(0.0, until - time.monotonic()))

    def _event(self, when: float, name: str, value: float) -> None:
        if self._files:
            self._tasks.put(partial(_write, self._files[1], _line(when, name, value)))

    def _run(self, steps: int, events: int, seconds: float) -> None:
        due = time.monotonic()
        while True:
            try:
                task = self._tasks.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                self._look(steps, events)
                # If a write took longer than the interval, skip the rows that were due meanwhile.
                due = max(due + seconds, time.monotonic())
                continue
            if task is None:
                return
            task()

    def _look(self, steps: int, events: int) -> None:
        if self._sampler:
            for note in self._sampler.notes():
                say_amid_output(note)
        new, self._seen = self.page.events(self._seen)
        if new:
            _write(events, "".join(_line(*event) for event in new))
        sums = self.page.snapshot()
        # srunddp.Trainer fills in these sums. A script with its own loop calls srunddp.heartbeat(),
        # which counts only the steps.
        if sums.steps or sums.epoch:
            figures = (
                f"{sums.steps},{sums.samples},{sums.step_s:.6f},{sums.data_s:.6f},{sums.own_s:.6f}"
            )
            row = f"{figures},{sums.longest_step_s:.6f},{sums.epoch}"
        else:
            row = f"{self.page.steps_made()},,,,,,"  # a script with its own loop
        _write(steps, f"{time.time():.3f},{row}\n")


def _open_files(config: MonitorConfig) -> tuple[int, int]:
    """Make the monitoring folder, and open the files for this rank's steps and marks, emptied. On
    rank 0, also remove what an earlier run has left.

    Returns:
        The file descriptors of the steps and of the marks.

    Raises:
        ConfigError: A file cannot be opened.
    """
    name = str(config.folder / f"{config.node}.rank{config.rank}")
    steps = open_to_append(Path(name + ".steps.csv"), "--monitor-dir", STEPS.header)
    marks = open_to_append(Path(name + ".marks.csv"), "--monitor-dir", MARKS.header)
    if config.rank == 0:  # outside Slurm, an earlier run may have used the same folder
        with contextlib.suppress(OSError):
            (config.folder / RUN).unlink()
        with contextlib.suppress(OSError):
            (config.folder / SETTINGS).unlink()
        _set_restarts_aside(config.folder)
    return steps, marks


def _set_restarts_aside(folder: Path) -> None:
    """Rename the folders that belong to restarts of an earlier run: ``monitor.0.1`` beside
    ``monitor.0`` becomes ``earlier.K.monitor.0.1``, with the first free K from 1.

    Otherwise the report would take such a folder for the last start of this run. When this run
    restarts, there is nothing to rename, because its first start has renamed all of them.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(folder.parent):
            first, _, restart = name.rpartition(".")
            if first == folder.name and restart.isdecimal():
                _set_aside(folder.parent / name)


def _set_aside(folder: Path) -> None:
    for number in itertools.count(1):
        earlier = folder.with_name(f"earlier.{number}.{folder.name}")
        if not earlier.exists():
            folder.rename(earlier)
            return


def _line(when: float, name: str, value: float) -> str:
    return f"{when:.3f},{name},{'' if math.isnan(value) else format(value, '.10g')}\n"


def _write(descriptor: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode())


def _describe(
    path: Path, known: Mapping[str, Any], more: Callable[[], Mapping[str, Any]] | None
) -> None:
    _write_json(path, known)
    if more:
        _write_json(path, {**known, **more()})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        replace_file(path, (json.dumps(value, indent=2) + "\n").encode())
