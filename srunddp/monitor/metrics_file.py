"""Writes the metrics files that a site asks for by ``metrics:`` in ifaces.conf: one for each run on
a node. The textfile collector of node_exporter reads them.

The supervisor of a node's first rank writes the file in a thread, so a folder that does not answer
delays neither the script nor the end of the run. This module is imported only if ifaces.conf has
``metrics:``.

The text is Prometheus' text format 0.0.4. node_exporter drops a file that has timestamps or a type
which only OpenMetrics has. If two files have the same metric with a different HELP or TYPE, it
drops the second file. So HELP and TYPE of a metric stay the same in all versions of srunddp.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from srunddp._version import __version__
from srunddp.util.atomic_file import plain
from srunddp.util.kernel_file import STARTED, stat_fields

_WITHIN = 0.5  # seconds to remove the file: the end of a run must not wait for a file system
_MODE = 0o644  # the exporter runs as another user, and has to read the file
_CLEANS_EVERY = 6  # left-over files are removed after the first write, and then at each sixth
_OLD = 300.0  # seconds; a file that was not written for so long belongs to no running process
_NAME_LETTERS = 200
_ENDED = "ZX"  # states in /proc/PID/stat: zombie and dead
_WRITER = re.compile(r"# srunddp \S+, process (\d+) since tick (\d+) of boot (\S+) in (\S+)\n")


@dataclass(frozen=True)
class RunLabels:
    """The labels that distinguish the metrics of one run on one node from all others.

    Attributes:
        job: Slurm's job id; empty without Slurm.
        step: The id of the job step; outside a job step, the run's token.
        user: The name of the run's user.
        node: The node's name, as the launcher uses it.
    """

    job: str
    step: str
    user: str
    node: str

    @property
    def file_name(self) -> str:
        """The name of the run's file. It begins with ``srunddp-JOB.``, so that a Slurm epilog can
        find the files of a job.
        """
        parts = (self.job or "none", self.step, self.user, self.node)
        name = ".".join(map(plain, parts))
        return f"srunddp-{name[:_NAME_LETTERS]}.prom"

    def text(self) -> str:
        """Return the labels in braces, as they follow a metric's name in the text format."""
        pairs = (f'{name}="{escaped(value)}"' for name, value in vars(self).items())
        return f"{{{','.join(pairs)}}}"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The values of the metrics. A metric whose value is None is left out of the file.

    Attributes:
        ranks: The number of ranks on this node.
        steps: How many steps the node's first rank has made in this start.
        restarts: How often Slurm or ``--restarts`` has restarted the run.
        stalls: How many starts of the run have ended with a stall.
        started: Unix time at which the rendezvous of this start ended.
        stepped: Unix time at which the last step was seen; None before the first step.
        checkpointed: Unix time at which the last checkpoint was complete; None before the first
            checkpoint.
    """

    ranks: int
    steps: int
    restarts: int
    stalls: int
    started: float
    stepped: float | None = None
    checkpointed: float | None = None


@dataclass(frozen=True)
class _Metric:
    name: str
    kind: str
    help: str
    value: Callable[[RunState], float | None]


# Sites' dashboards use the names, and node_exporter compares HELP and TYPE between files (see the
# docstring of the module): do not change a word.
_METRICS = (
    _Metric("srunddp_ranks", "gauge", "Ranks of the run on this node.", lambda run: run.ranks),
    _Metric(
        "srunddp_steps_total",
        "counter",
        "Steps of the first rank on this node, since the last restart.",
        lambda run: run.steps,
    ),
    _Metric(
        "srunddp_restarts_total",
        "counter",
        "Restarts of the run, by Slurm and by --restarts.",
        lambda run: run.restarts,
    ),
    _Metric(
        "srunddp_stalls_total",
        "counter",
        "Restarts of the run after a stall or a hang.",
        lambda run: run.stalls,
    ),
    _Metric(
        "srunddp_start_timestamp_seconds",
        "gauge",
        "Unix time of the last start of the ranks.",
        lambda run: run.started,
    ),
    _Metric(
        "srunddp_last_step_timestamp_seconds",
        "gauge",
        "Unix time of the last step of the first rank on this node.",
        lambda run: run.stepped,
    ),
    _Metric(
        "srunddp_last_checkpoint_timestamp_seconds",
        "gauge",
        "Unix time of the last checkpoint of srunddp.Trainer, on rank 0's node.",
        lambda run: run.checkpointed,
    ),
)


def escaped(value: str) -> str:
    """Escape a label's value, so that the text format can have it between quotes. Bytes that are
    not UTF-8 become question marks.
    """
    text = value.encode(errors="replace").decode()
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def exposition(labels: RunLabels, state: RunState) -> str:
    """Return the metrics of a run in Prometheus' text format, with HELP and TYPE lines."""
    own = labels.text()
    lines = []
    for metric in _METRICS:
        value = metric.value(state)
        if value is not None:
            lines.append(f"# HELP {metric.name} {metric.help}\n")
            lines.append(f"# TYPE {metric.name} {metric.kind}\n")
            lines.append(f"{metric.name}{own} {value:.15g}\n")
    return "".join(lines)


def user_name() -> str:
    """Return the name of this process's effective user, or the uid if it has no name.

    This may block for long: a directory service may be slow, or may not answer.
    """
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


class MetricsFile:
    """Writes the metrics of one run on this node to a file, from the end of the rendezvous to the
    end of the start.
    """

    def __init__(
        self,
        folder: Path,
        labels: Callable[[], RunLabels],
        state: Callable[[], RunState],
        *,
        every: float,
        warn: Callable[[str], None],
    ) -> None:
        """Set up the file. Nothing is written before :meth:`start`.

        Args:
            folder: The folder of the textfile collector. It must exist: it is never created.
            labels: Returns the run's labels. It may take long, so the thread calls it.
            state: Returns the values of the metrics. The thread calls it before each write.
            every: Seconds between two writes.
            warn: Prints a line for the user. It is called at most once, if the file cannot be
                written.
        """
        self._folder = folder
        self._labels = labels
        self._state = state
        self._every = every
        self._warn = warn
        self._over = threading.Event()
        self._stays = False
        self._has_warned = False
        # A daemon thread, so that a write that hangs cannot keep this process from ending.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start the thread that writes the file at once and then at regular intervals. If no thread
        can be started, warn the user and go on without the file.
        """
        try:
            self._thread.start()
        except RuntimeError as error:  # at the limit of processes, which includes threads
            self._warn(f"no metrics of this run: {error}")

    def finish(self, *, stays: bool) -> None:
        """Make the thread remove the file and end. Wait for that for half a second at most.

        Args:
            stays: Whether the file stays, because this process begins the next start of the run,
                which writes to the same file.
        """
        self._stays = stays
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_WITHIN)

    def _run(self) -> None:
        try:
            self._write_until_over()
        except OSError as error:  # /proc cannot be read
            self._warn(f"no metrics of this run: {error}")

    def _write_until_over(self) -> None:
        labels = self._labels()
        path = self._folder / labels.file_name
        first_line = _first_line()
        writes = 0
        while True:
            self._write(path, first_line + exposition(labels, self._state()))
            # Remove left-over files only after the write. Until then the first line of this run's
            # own file may name an earlier process, so the file would be removed.
            if writes % _CLEANS_EVERY == 0:
                with suppress(OSError):
                    remove_left_over(self._folder)
            writes += 1
            if self._over.wait(self._every):
                break
        if not self._stays:
            with suppress(OSError):
                path.unlink()

    def _write(self, path: Path, text: str) -> None:
        try:
            _replace(path, text.encode())
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(
                    f"no metrics of this run: {path} cannot be written: {error.strerror} -> tell"
                    " the site: `metrics:` in ifaces.conf names a folder that users may write to"
                )


def _replace(path: Path, content: bytes) -> None:
    """Replace a file by a rename in its folder, so that the exporter never reads half a file.

    There is no fsync(): a power failure ends the run too, and then nobody needs the file.

    Raises:
        OSError: The file cannot be written; an existing one stays as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    # A killed process may have left a temporary file. In a folder that all users may write to, it
    # may also be a symbolic link by another user: O_EXCL (mode "x") fails instead of following it.
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb", buffering=0) as file:
            os.fchmod(file.fileno(), _MODE)  # whatever the user's umask
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def remove_left_over(folder: Path) -> None:
    """Remove the metrics files of runs that were killed, as far as this user has the permission.

    The file of a process of this user, on this node and in this container, is removed once the
    process has ended. Whether any other process still runs cannot be seen from here, so its file is
    removed once it has not been written for five minutes.

    Args:
        folder: The folder of the textfile collector.

    Raises:
        OSError: The folder cannot be read.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if re.fullmatch(r"srunddp-.+\.prom(\.tmp)?", entry.name):
                with suppress(OSError):
                    if _is_left_over(entry):
                        os.unlink(entry.path)


def _is_left_over(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        return False
    if time.time() - status.st_mtime > _OLD:
        return True
    if status.st_uid != os.geteuid() or not entry.name.endswith(".prom"):
        return False
    # O_NOFOLLOW, because another process may just have replaced the file by a symbolic link.
    descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, errors="replace") as file:
        written = _WRITER.match(file.readline(_NAME_LETTERS))
    if not written or (written[3], written[4]) != (_boot(), _namespace()):
        return False
    return _start_of(written[1]) != written[2]


def _first_line() -> str:
    """Return the comment line that identifies the process that writes the file."""
    pid = os.getpid()
    return (
        f"# srunddp {__version__}, process {pid} since tick {_start_of(str(pid))}"
        f" of boot {_boot()} in {_namespace()}\n"
    )


def _start_of(pid: str) -> str:
    """Return when a process started, in clock ticks since boot; empty if the process has ended."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return ""
    return "" if fields[0] in _ENDED else fields[STARTED]


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    """Return the name of this process's PID namespace, such as ``pid:[4026531836]``."""
    return os.readlink("/proc/self/ns/pid")
