"""The figures of a run, as lines of JSON and for TensorBoard."""

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
    """Appends to ``metrics.jsonl`` and to TensorBoard's event files; for rank 0 alone.

    Each line is an object with ``kind``, ``step``, ``time`` (ISO 8601, UTC) and the figures. A disk
    that fails while training ends nothing: ``log`` is called once, and what could not be written is
    missing.
    """

    def __init__(self, folder: Path, tensorboard: bool, log: Callable[[str], None]) -> None:
        """Open the file, behind the lines that are there.

        Args:
            folder: is made if it is missing.
            tensorboard: write to its subfolder ``tensorboard`` too, where TensorBoard is installed.
            log: takes a line for the user.

        Raises:
            ConfigError: the folder or the file cannot be written to.
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
        """One line, on disk at once so far as the kernel goes.

        Args:
            kind: ``step``, ``epoch``, ``evaluation`` or ``log``.
            step: counted over all epochs.
            figures: one that is no number is written as ``"NaN"``, ``"Infinity"`` or
                ``"-Infinity"``.
        """
        line = {
            "kind": kind,
            "step": step,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        for name, value in figures.items():
            own = f"{name}_" if name in _OURS else name
            line[own] = _number(value)
        with self._ignoring_disk_errors():
            append_whole(self._file, json.dumps(line, allow_nan=False).encode() + b"\n")
        if self._tensorboard:
            self._add_scalars(kind, step, figures)

    def rewind(self, step: int) -> None:
        """Before a run goes on behind this step: drop what the one before it wrote for later
        ones.
        """
        with self._ignoring_disk_errors():
            self._keep_steps_to(step)
        self._close_writer()
        self._purge_step = step + 1

    def close(self) -> None:
        """Write what is left."""
        self._close_writer()
        with self._ignoring_disk_errors():
            os.close(self._file)

    def _keep_steps_to(self, step: float) -> None:
        path = self._folder / FILE
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _step(line) <= step and line.endswith(b"\n")]
        if len(kept) < len(lines):
            replace_file(path, b"".join(kept))
            os.close(self._file)
            self._file = _open(self._folder)

    def _add_scalars(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        try:
            with self._ignoring_disk_errors():
                if self._writer is None:
                    from torch.utils.tensorboard import SummaryWriter

                    self._writer = SummaryWriter(
                        str(self._folder / "tensorboard"), purge_step=self._purge_step
                    )
                for name, value in figures.items():
                    self._writer.add_scalar(f"{kind}/{name}", value, step)
                return
        except ImportError:  # it is not installed
            pass
        # Its writing thread ends with the first error: it would never write again.
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
    return os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _link_from_monitor(path: Path) -> None:
    """Let the report of a run with ``--monitor`` find the figures; they may be of another run
    too.
    """
    if folder := os.environ.get(MONITOR_FOLDER):
        link = Path(folder, FILE)
        with contextlib.suppress(OSError):
            if link.is_symlink():
                link.unlink()
            link.symlink_to(path.absolute())


def _step(line: bytes) -> float:
    """NaN, which no step is at or after, for what is no line of ours."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return float(json.loads(line)["step"])
    return math.nan


def _number(value: float) -> float | int | str:
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else json.dumps(number)
