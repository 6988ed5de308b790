"""What an epoch came to, and the one line that says so. Nothing else in this package prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EpochRecord:
    """One epoch's means over all samples of all ranks.

    Attributes:
        epoch: counted from 1.
        train: ``loss`` and the metrics, while the parameters were changing.
        test: the same on the test data after the epoch; empty where there is none.
    """

    epoch: int
    train: Mapping[str, float]
    test: Mapping[str, float] = field(default_factory=dict)


def describe(record: EpochRecord) -> str:
    """For example ``Epoch 1 - loss 0.2346, accuracy 92.34 %, test loss 0.1234, test accuracy 97.10 %``."""
    parts = [_part(name, value) for name, value in record.train.items()]
    parts += [f"test {_part(name, value)}" for name, value in record.test.items()]
    return f"Epoch {record.epoch} - {', '.join(parts)}"


def print_epoch(record: EpochRecord) -> None:
    """Print :func:`describe`'s line at once, also where standard output is a job's log file."""
    print(describe(record), flush=True)


def _part(name: str, value: float) -> str:
    if name.endswith("accuracy"):
        return f"{name} {100 * value:.2f} %"
    return f"{name} {value:.4f}"
