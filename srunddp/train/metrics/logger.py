"""Writes the figures of a run as lines of JSON and for TensorBoard."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from srunddp.errors import file_errors
from srunddp.telemetry import MONITOR_FOLDER
from srunddp.util.atomic_file import append_whole, replace_file

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE = "metrics.jsonl"
_OURS = ("kind", "step", "time")


class MetricsLogger:
    """Appends to ``metrics.jsonl`` and to TensorBoard's event files; only for rank 0.

    Each line is a JSON object with ``kind``, ``step``, ``time`` (ISO 8601, UTC) and the figures. A
    disk error does not end training: it is reported once by ``log``, and lines that could not be
    written are missing.
    """

    def __init__(self, folder: Path, tensorboard: bool, log: Callable[[str], None]) -> None:
        """Open the file for appending, and drop incomplete lines.

        Args:
            folder: The folder of the files; it is created if it is missing.
            tensorboard: Whether to write event files too, to the subfolder ``tensorboard``, if
                TensorBoard is installed.
            log: Prints a line for the user.

        Raises:
            ConfigError: The folder or the file cannot be written to.
        """
        self._folder = folder
        self._log = log
        self._tensorboard = tensorboard
        self._reported = False
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None
        with file_errors(
            str(folder / FILE),
            expected="a folder that rank 0 may write to",
            hint="correct output_dir",
        ):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _open(folder)
            self._keep_steps_to(math.inf)
            _link_from_monitor(folder / FILE)

    def add(self, kind: str, step: int, /, **figures: float) -> None:
        """Write one line, which the kernel has when this returns, so that a rank that is killed
        loses no lines.

        Args:
            kind: ``step``, ``epoch``, ``evaluation`` or ``log``.
            step: The number of the step, counted over all epochs.
            figures: The figures; one that is not finite is written as ``"NaN"``, ``"Infinity"`` or
                ``"-Infinity"``.
        """
        line = {
            "kind": kind,
            "step": step,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        for name, value in figures.items():
            # A figure may have the name of one of the three other keys of a line.
            own = f"{name}_" if name in _OURS else name
            line[own] = _number(value)
        # Figures that are not finite are strings by now, because JSON has no NaN. allow_nan=False
        # makes Python raise instead of writing one, which other programs would refuse to read.
        with self._ignoring_disk_errors():
            append_whole(self._file, json.dumps(line, allow_nan=False).encode() + b"\n")
        if self._tensorboard:
            self._add_scalars(kind, step, figures)

    def rewind(self, step: int) -> None:
        """Drop lines that an earlier run wrote for later steps, because this run continues after
        ``step``.

        Args:
            step: The last step whose lines are kept.
        """
        with self._ignoring_disk_errors():
            self._keep_steps_to(step)
        # TensorBoard's files can only be appended to. If a writer begins with a purge_step,
        # TensorBoard hides everything in older files from that step on.
        self._close_writer()
        self._purge_step = step + 1

    def close(self) -> None:
        """Flush and close the files."""
        self._close_writer()
        with self._ignoring_disk_errors():
            os.close(self._file)

    def _keep_steps_to(self, step: float) -> None:
        path = self._folder / FILE
        lines = path.read_bytes().splitlines(keepends=True)
        # A line without a line end was cut off by a kill or by a full disk.
        kept = [line for line in lines if _step(line) <= step and line.endswith(b"\n")]
        if len(kept) < len(lines):
            replace_file(path, b"".join(kept))
            # The open file has no name any more, so lines written to it would be lost: open the new
            # file.
            os.close(self._file)
            self._file = _open(self._folder)

    def _add_scalars(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        try:
            with self._ignoring_disk_errors():
                if self._writer is None:
                    # Import SummaryWriter only at the first figure, because the import takes a
                    # second.
                    from torch.utils.tensorboard import SummaryWriter

                    self._writer = SummaryWriter(
                        str(self._folder / "tensorboard"), purge_step=self._purge_step
                    )
                for name, value in figures.items():
                    self._writer.add_scalar(f"{kind}/{name}", value, step)
                return
        except ImportError:
            # TensorBoard is not installed. Do not report this, because tensorboard=true is the
            # default.
            pass
        # Stop using SummaryWriter after a disk error. It writes in a thread, which ends at the
        # first disk error, and once its queue is full it would block training.
        self._tensorboard = False
        self._writer = None

    def _close_writer(self) -> None:
        writer = self._writer
        self._writer = None
        with self._ignoring_disk_errors():
            if writer is not None:
                writer.close()

    @contextlib.contextmanager
    def _ignoring_disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._reported:
                self._reported = True
                self._log(
                    f"figures are missing from {self._folder}: {os.strerror(error.errno or 0)}"
                )


def _open(folder: Path) -> int:
    # O_APPEND: if a second process writes to the file by mistake, neither overwrites lines of the
    # other. O_CLOEXEC: programs that the script starts must not inherit the open file.
    return os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _link_from_monitor(path: Path) -> None:
    """Make a link to ``metrics.jsonl`` in the folder of ``--monitor``, for the report of the run;
    do nothing without ``--monitor``.

    The file may also have figures of earlier runs.

    Args:
        path: The path of ``metrics.jsonl``.
    """
    folder = os.environ.get(MONITOR_FOLDER)
    if folder:
        link = Path(folder, FILE)
        with contextlib.suppress(OSError):
            if link.is_symlink():
                link.unlink()
            link.symlink_to(path.absolute())


def _step(line: bytes) -> float:
    """Return the step of a line; NaN, which is never <= a step, if it is not one of our lines."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return float(json.loads(line)["step"])
    return math.nan


def _number(value: float) -> float | int | str:
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else json.dumps(number)
