"""``--monitor``: a recorder for each rank and a sampler for each node, from before the ranks meet
to the end.

The recorder writes two files of each rank: the sums over its steps every few seconds, and what
happened once. It is a thread of the supervisor, so that nothing is lost however the rank ends. What
cannot be written ends nothing.
"""

import contextlib
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
from srunddp.util.kernel_file import stat_fields
from srunddp.util.sample_files import MARKS, STEPS

if TYPE_CHECKING:
    from srunddp.monitor.sampler.process import Sampler

RUN = "run.json"
_START = 19  # starttime of /proc/PID/stat, counted from the field behind the name
_WITHIN = 0.5  # seconds to write the rest: the end of a run must not wait for a file system


class Monitor:
    """Watches one rank and, where the config says so, its node. Methods come in this order; the
    worker has ``page``.
    """

    def __init__(self, config: MonitorConfig | None = None) -> None:
        """Make the files; without ``--monitor`` there are none, and nothing is done here or later.

        Raises:
            ConfigError: they cannot be written.
        """
        self.page = TelemetryPage(recording=config is not None)
        self._config = config
        self._files = _open_files(config) if config else None
        # How many events of the page are written, and how many steps a script's own loop has
        # counted.
        self._seen = 0
        self._count = 0
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._sampler: Sampler | None = None

    def start_sampler(self, interface: str, rank_variable: str, launcher: int | None) -> None:
        """Fork the node's sampler, if this rank has it; in the supervisor, before the worker.

        Args:
            interface: the network interface.
            rank_variable: tells a process of this node its rank.
            launcher: the process whose descendants all ranks of this node are; None where that is
                not known.
        """
        if self._config and self._config.samples:
            # One rank of a node needs it.
            from srunddp.monitor.sampler.process import SamplerConfig, start

            self._sampler = start(
                SamplerConfig(self._config, interface, rank_variable, os.getpid(), launcher)
            )

    def export(self) -> None:
        """Tell rank 0's script the folder, by a variable; in the supervisor, before the fork."""
        os.environ.pop(MONITOR_FOLDER, None)  # of a run that has started this one
        if self._config and self._config.rank == 0:
            # Absolute, as the script may go to another folder.
            os.environ[MONITOR_FOLDER] = str(self._config.folder.absolute())

    def in_worker(self) -> None:
        """Close in the worker what is the supervisor's."""
        for file in self._files or ():
            os.close(file)
        if self._sampler:
            self._sampler.in_worker()

    def start(self) -> None:
        """Begin to write, in the supervisor after the fork.

        A thread does so, as a file system may be slow.
        """
        # The kernel gives the start in ticks since boot, suspended time included, which
        # time.monotonic() leaves out.
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(
            stat_fields("self")[_START]
        ) / os.sysconf("SC_CLK_TCK")
        self._event(time.time() - age, "process", math.nan)  # when the kernel started this one
        if self._config and self._files:
            # A daemon, as a write to a file system that hangs must not hold this process up when it
            # ends.
            self._thread = threading.Thread(
                target=self._run, args=(*self._files, self._config.seconds), daemon=True
            )
            self._thread.start()

    def mark(self, name: str, value: float = math.nan) -> None:
        """Note that something happens in the supervisor now.

        Args:
            name: As in the reference of the files.
            value: A figure that goes with it; nan for none.
        """
        self._event(time.time(), name, value)

    def describe(self, run: Mapping[str, Any]) -> None:
        """Write run.json, on rank 0: what is known of the run after the rendezvous."""
        if self._config:
            own = {"script": self._config.script, "seconds": self._config.seconds}
            text = json.dumps({"version": 1, **run, **own}, indent=2) + "\n"
            # By the thread, as every other write.
            self._tasks.put(partial(_replace, self._config.folder / RUN, text))

    def stop_sampler(self) -> str:
        """End the sampler, once the worker has ended and before what that has left is killed.

        Returns:
            Why the sampler had ended before; empty where it had not.
        """
        if self._sampler:
            return self._sampler.finish(_WITHIN)
        return ""

    def finish(self, code: int, limit: float = _WITHIN) -> None:
        """Write the rest.

        Args:
            code: The exit code to leave with.
            limit: Seconds that this may take; what is not written by then is lost.
        """
        if self._files and self._thread:
            # In this order: what the worker did last, then its end, and then the thread leaves.
            self._tasks.put(partial(self._look, *self._files))
            self.mark("end", code)
            self._tasks.put(None)
            self._thread.join(limit)

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
                # What was due while a write took long is left out, and not made up for at once.
                due = max(due + seconds, time.monotonic())
                continue
            if task is None:
                return
            task()

    def _look(self, steps: int, events: int) -> None:
        new, self._seen = self.page.events(self._seen)
        if new:
            _write(events, "".join(_line(*event) for event in new))
        sums = self.page.snapshot()
        # Of srunddp.Trainer; another loop only counts, by srunddp.heartbeat().
        if sums.steps or sums.epoch:
            figures = (
                f"{sums.steps},{sums.samples},{sums.step_s:.6f},{sums.data_s:.6f},{sums.own_s:.6f}"
            )
            row = f"{figures},{sums.longest_step_s:.6f},{sums.epoch}"
        else:
            # The script has a loop of its own. Where no step is expected for now, nothing is read.
            self._count = self.page.read() or self._count
            row = f"{self._count},,,,,,"
        _write(steps, f"{time.time():.3f},{row}\n")


def _open_files(config: MonitorConfig) -> tuple[int, int]:
    """The descriptors of this rank's files of steps and of marks, in a folder that is made for
    them.
    """
    name = str(config.folder / f"{config.node}.rank{config.rank}")
    steps = open_to_append(Path(name + ".steps.csv"), "--monitor-dir", STEPS.header)
    marks = open_to_append(Path(name + ".marks.csv"), "--monitor-dir", MARKS.header)
    if config.rank == 0:  # of an earlier start in the same folder, as there may be outside Slurm
        with contextlib.suppress(OSError):
            (config.folder / RUN).unlink()
    return steps, marks


def _line(when: float, name: str, value: float) -> str:
    return f"{when:.3f},{name},{'' if math.isnan(value) else format(value, '.10g')}\n"


def _write(descriptor: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode())


def _replace(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        replace_file(path, text.encode())
