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

    Each line is an object with ``kind``, ``step``, ``time`` (ISO 8601, UTC) and the figures. A disk
    error does not end training: ``log`` is called once, and lines that could not be written are
    missing.
    """

    def __init__(self, folder: Path, tensorboard: bool, log: Callable[[str], None]) -> None:
        """Open the file for appending, and drop incomplete lines.

        Args:
            folder: The folder of the files; it is created if it is missing.
            tensorboard: Also write to its subfolder ``tensorboard`` if TensorBoard is installed.
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
        """Write one line; the kernel has it when this returns, so a killed rank loses no lines.

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
            # A metric may have the name of one of our own keys.
            own = f"{name}_" if name in _OURS else name
            line[own] = _number(value)
        # JSON has no NaN: without allow_nan=False Python would write one, and other readers would
        # refuse the line. Figures that are not finite are strings by now.
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
            # Another file has the name now; lines written to the open one would be lost.
            os.close(self._file)
            self._file = _open(self._folder)

    def _add_scalars(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        try:
            with self._ignoring_disk_errors():
                if self._writer is None:
                    # Import at the first figure: it takes a second, and TensorBoard may not be
                    # installed.
                    from torch.utils.tensorboard import SummaryWriter

                    self._writer = SummaryWriter(
                        str(self._folder / "tensorboard"), purge_step=self._purge_step
                    )
                for name, value in figures.items():
                    self._writer.add_scalar(f"{kind}/{name}", value, step)
                return
        except ImportError:
            # TensorBoard is not installed. Do not mention it, because tensorboard=true is the
            # default.
            pass
        # SummaryWriter writes in a thread, which ends at the first disk error: from then on nothing
        # would be written, and its full queue would block training.
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
    # O_APPEND: a second process that writes there by mistake does not overwrite lines. O_CLOEXEC:
    # the script's child processes must not inherit it.
    return os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _link_from_monitor(path: Path) -> None:
    """Let the report of a run with ``--monitor`` find the figures.

    The file may also have figures of earlier runs.
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
