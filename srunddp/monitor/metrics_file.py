"""``metrics:`` in ifaces.conf: a file for each run on a node, which node_exporter's textfile
collector reads.

The supervisor of a node's first rank writes it, in a thread: a folder that does not answer keeps
neither the script nor the end of the run waiting. Only a site that has asked for such files imports
this module.

The text is Prometheus' format 0.0.4. node_exporter drops a file with a type of OpenMetrics or with
timestamps, and of two files with one metric the second if its HELP or TYPE is another. So these
stay the same in all versions.
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
_MODE = 0o644  # the exporter is another user
_CLEANS_EVERY = 6  # writes
_OLD = 300.0  # seconds after which a file that is not written again belongs to no running process
_NAME_LETTERS = 200
_ENDED = "ZX"  # states of a process whose parent has not waited for it
_WRITER = re.compile(r"# srunddp \S+, process (\d+) since tick (\d+) of boot (\S+) in (\S+)\n")


@dataclass(frozen=True)
class RunLabels:
    """What tells the metrics of a run on a node from those of others.

    Attributes:
        job: Slurm's number of the job; empty without Slurm.
        step: The number of Slurm's step; without one, the run's token.
        user: The name of the run's user.
        node: The node's name, as the launcher has it.
    """

    job: str
    step: str
    user: str
    node: str

    @property
    def file_name(self) -> str:
        """The name of the run's file. An epilog can find those of a job by their beginning."""
        parts = (self.job or "none", self.step, self.user, self.node)
        name = ".".join(map(plain, parts))
        return f"srunddp-{name[:_NAME_LETTERS]}.prom"

    def text(self) -> str:
        """Return the labels as they stand in each line, with the braces."""
        pairs = (f'{name}="{escaped(value)}"' for name, value in vars(self).items())
        return f"{{{','.join(pairs)}}}"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The values of the metrics; None for one that is not known, and left out.

    Attributes:
        ranks: The ranks on this node.
        steps: How many steps the node's first rank has made in this start.
        restarts: How often the ranks were started again, by Slurm or by ``--restarts``.
        stalls: How many starts of the run have ended with a stall.
        started: Unix time at which the ranks of this start had met.
        stepped: Unix time at which the last step was seen.
        checkpointed: Unix time at which the last checkpoint was whole.
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


# An interface: see the module's docstring before changing a word.
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
    """Return a label's value as the text format has it between quotes; bytes that are not UTF-8
    become question marks.
    """
    text = value.encode(errors="replace").decode()
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def exposition(labels: RunLabels, state: RunState) -> str:
    """Return the metrics of a run in the text format."""
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
    """Return the name of this process's user; its number if it has no name."""
    # A directory service may take long over it, or not answer.
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


class MetricsFile:
    """The file of one run on this node, from the rendezvous to the end of the start."""

    def __init__(
        self,
        folder: Path,
        labels: Callable[[], RunLabels],
        state: Callable[[], RunState],
        *,
        every: float,
        warn: Callable[[str], None],
    ) -> None:
        """Take what the file needs; nothing is written before :meth:`start`.

        Args:
            folder: The folder of the textfile collector, which is never created.
            labels: Returns the run's labels. It is called in the thread, as it may take long.
            state: Returns the values; it is called in the thread.
            every: Seconds between two writes.
            warn: Is given one line if the file cannot be written, once.
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
        """Write the file, and again and again from now on, in a thread."""
        try:
            self._thread.start()
        except RuntimeError as error:  # at the limit of processes, which includes threads
            self._warn(f"no metrics of this run: {error}")

    def finish(self, *, stays: bool) -> None:
        """Write no more, and remove the file; what takes longer than half a second is left undone.

        Args:
            stays: Whether the next start of this process will go on with the file.
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
            # After the write, so that the own file is not among those that are left over.
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
    """Replace a file by a rename in its folder, so that the exporter never reads a part of it.

    It is not synced: after a power cut the run is gone as well.

    Raises:
        OSError: It cannot be written; a file that was there stays.
    """
    temporary = path.with_name(path.name + ".tmp")
    # A killed process may have left it. In a folder of all users it may also be a link that another
    # user has made: O_EXCL fails instead of following it.
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
    """Remove the files of runs that were killed, as far as this user may.

    Whether the process of another user, of a container or of another node runs may not be seen from
    here. Their files are removed once they are old.

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
    # O_NOFOLLOW, as the file may have been replaced since.
    descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, errors="replace") as file:
        written = _WRITER.match(file.readline(_NAME_LETTERS))
    if not written or (written[3], written[4]) != (_boot(), _namespace()):
        return False
    return _start_of(written[1]) != written[2]


def _first_line() -> str:
    """Return the comment that says which process writes the file."""
    pid = os.getpid()
    return (
        f"# srunddp {__version__}, process {pid} since tick {_start_of(str(pid))}"
        f" of boot {_boot()} in {_namespace()}\n"
    )


def _start_of(pid: str) -> str:
    """Return when a process began, in ticks since the boot; empty if it is not there any more."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return ""
    return "" if fields[0] in _ENDED else fields[STARTED]


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    """Return the name of this process's namespace of process ids, such as ``pid:[4026531836]``."""
    return os.readlink("/proc/self/ns/pid")
