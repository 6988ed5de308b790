"""Prints the progress of training: a bar or lines during an epoch, and a line with its results.

Nothing else in this package prints. Errors of printing do not end training.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from torch import Tensor
    from tqdm import tqdm

# Seconds between updates of the bar, and between lines in a log.
_BAR_EVERY = 0.1
_LINE_EVERY = 30.0


@dataclass(frozen=True)
class EpochRecord:
    """One epoch's means over all samples of all ranks.

    Attributes:
        epoch: The number of the epoch, from 1.
        train: ``loss`` and the metrics by name, while the parameters were changing.
        val: ``loss`` and the metrics by name, on the validation data after the epoch; empty if
            there was no evaluation.
        samples_per_second: The throughput of training, over all ranks; 0 if it is not known.
        world_size: The number of ranks.
        device: The type of the ranks' devices, as torch names it.
    """

    epoch: int
    train: Mapping[str, float]
    val: Mapping[str, float] = field(default_factory=dict)
    samples_per_second: float = field(default=0.0, compare=False)
    world_size: int = field(default=1, compare=False)
    device: str = field(default="cpu", compare=False)

    @property
    def samples_per_second_per_gpu(self) -> float:
        """The throughput of one rank, which has one GPU."""
        return self.samples_per_second / self.world_size


def describe(record: EpochRecord) -> str:
    """Return the line that reports an epoch.

    For example ``Epoch 1 - loss 0.2346, accuracy 92.34 %, val loss 0.1234, 12345 samples/s (6172
    per GPU)``.

    Args:
        record: The results of the epoch.
    """
    parts = [_part(name, value) for name, value in record.train.items()]
    parts += [f"val {_part(name, value)}" for name, value in record.val.items()]
    if record.samples_per_second:
        parts.append(_throughput(record))
    return f"Epoch {record.epoch} - {', '.join(parts)}"


class SilentProgress:
    """Counts the samples and the time of an epoch, and prints nothing: for the ranks other than 0.

    Methods that print on rank 0 do so in the subclass :class:`Progress` only.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin to count samples and time.

        Args:
            clock: Returns the time in seconds, from any beginning.
        """
        self._clock = clock
        self._samples = 0
        self._began = clock()
        self._idle = 0.0
        self._paused_at: float | None = None

    @property
    def samples_per_second(self) -> float:
        """The throughput since the start of the epoch, without pauses; 0 before the first step."""
        end = self._clock() if self._paused_at is None else self._paused_at
        seconds = end - self._began - self._idle
        return self._samples / seconds if seconds > 0 else 0.0

    def start_epoch(self, epoch: int, epochs: int, steps: int | None, done: int) -> None:
        """Begin to count the samples and the time of an epoch; on rank 0, show a new bar.

        Args:
            epoch: The number of the epoch, from 1.
            epochs: The number of epochs of the whole training; 0 if it is not known.
            steps: The number of steps of this epoch; None if it is not known.
            done: How many steps of this epoch were made before a resume.
        """
        self._samples = 0
        self._idle = 0.0
        self._began = self._clock()

    def step(self, samples: int, loss: Tensor | None) -> None:
        """Count a step; on rank 0, show it if the last update was long enough ago.

        Args:
            samples: The number of samples in the step, over all ranks.
            loss: The loss of this rank, a scalar; None if this rank had no samples. Its value is
                read only when it is shown.
        """
        self._samples += samples

    def end_epoch(self, record: EpochRecord) -> None:
        """Print, on rank 0, the line of a finished epoch on standard output.

        Args:
            record: The results of the epoch.
        """

    def log(self, text: str) -> None:
        """Print, on rank 0, a line on standard error.

        Args:
            text: The line, without ``srunddp:`` before it.
        """

    def close(self) -> None:
        """Remove the bar, if there is one, because its epoch or the training is over."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the throughput, because the block is not training."""
        # A callback may evaluate during an evaluation: the outer pause then covers both blocks.
        if self._paused_at is not None:
            yield
            return
        self._paused_at = self._clock()
        try:
            yield
        finally:
            self._idle += self._clock() - self._paused_at
            self._paused_at = None


class Progress(SilentProgress):
    """Prints progress on rank 0: a bar on standard error if that is a terminal, else a line every
    30 s; and a line on standard output for each epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._draws = False
        # sys.stderr is None if the descriptor was closed before Python began.
        with contextlib.suppress(OSError, ValueError):
            self._draws = sys.stderr is not None and sys.stderr.isatty()
        self._every = _LINE_EVERY
        self._bar: tqdm[None] | None = None
        self._epoch = 0
        self._epochs = 0
        self._done = 0
        self._steps: int | None = None
        self._loss: Tensor | None = None
        self._due = 0.0

    def start_epoch(self, epoch: int, epochs: int, steps: int | None, done: int) -> None:
        super().start_epoch(epoch, epochs, steps, done)
        self.close()
        self._epoch = epoch
        self._epochs = epochs
        self._steps = steps
        self._done = done
        self._loss = None
        if self._draws:
            with contextlib.suppress(OSError, ValueError):
                name = f"epoch {epoch}/{epochs}" if epochs else f"epoch {epoch}"
                self._bar = _bar(name, steps, done)
        self._every = _LINE_EVERY if self._bar is None else _BAR_EVERY
        self._due = self._began + self._every

    def step(self, samples: int, loss: Tensor | None) -> None:
        self._samples += samples
        self._done += 1
        if loss is not None:
            self._loss = loss
        if (now := self._clock()) >= self._due:
            self._due = now + self._every
            self._show()

    def end_epoch(self, record: EpochRecord) -> None:
        self.close()
        _write(sys.stdout, describe(record))

    def log(self, text: str) -> None:
        if self._bar is None:
            _write(sys.stderr, f"srunddp: {text}")
            return
        # tqdm removes the bar, writes the line, and draws the bar again below.
        with contextlib.suppress(OSError, ValueError):
            self._bar.write(f"srunddp: {text}", file=sys.stderr)

    def close(self) -> None:
        # Forget the bar first: if closing it fails, nothing more may be drawn on it.
        bar = self._bar
        self._bar = None
        with contextlib.suppress(OSError, ValueError):
            if bar is not None:
                bar.close()

    def _show(self) -> None:
        # float() waits for the GPU, which is still computing the loss. So call this method only
        # when an update is due.
        if self._loss is None:
            figures = []
        else:
            figures = [f"loss {float(self._loss):.4f}"]
        figures.append(f"{self.samples_per_second:.0f} samples/s")
        if self._bar is None:
            if self._epochs:
                epoch = f"epoch {self._epoch} of {self._epochs}"
            else:
                epoch = f"epoch {self._epoch}"
            self.log(", ".join([epoch, self._share(), *figures]))
            return
        with contextlib.suppress(OSError, ValueError):
            self._bar.set_postfix_str(", ".join(figures), refresh=False)
            self._bar.n = self._done
            self._bar.refresh()

    def _share(self) -> str:
        if self._steps is None:
            return f"step {self._done}"
        return (
            f"step {self._done} of {self._steps} ({100 * self._done / max(self._steps, 1):.0f} %)"
        )


def _bar(description: str, steps: int | None, done: int) -> tqdm[None]:
    # Import tqdm only here, because most ranks draw no bar.
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        # Progress.step() decides when to draw. So tqdm need not start its monitoring thread, nor
        # use its lock that is shared with forked processes.
        monitor_interval = 0
        _lock = threading.RLock()

    # Give tqdm a size if the terminal does not report one: otherwise it would draw nothing.
    known = os.get_terminal_size(sys.stderr.fileno()).columns > 0
    size = {"dynamic_ncols": True} if known else {"ncols": 80, "nrows": 24}
    return Bar(
        total=steps,
        initial=done,
        desc=description,
        file=sys.stderr,
        unit="step",
        leave=False,
        **size,
    )


def _write(stream: TextIO | None, line: str) -> None:
    # Python raises a ValueError for a stream that the script has closed.
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            stream.write(line + "\n")
            stream.flush()


def _throughput(record: EpochRecord) -> str:
    text = f"{record.samples_per_second:.0f} samples/s"
    if record.world_size == 1:
        return text
    return (
        f"{text} ({record.samples_per_second_per_gpu:.0f} per"
        f" {'GPU' if record.device == 'cuda' else 'rank'})"
    )


def _part(name: str, value: float) -> str:
    if name.endswith("accuracy"):
        return f"{name} {100 * value:.2f} %"
    return f"{name} {value:.4f}"
