"""What a user may have called at the moments of a training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from srunddp.train.progress import EpochRecord

if TYPE_CHECKING:
    from srunddp.train.trainer import Trainer


class Callback:
    """Override what is wanted; the rest costs nothing.

    All methods run on every rank, so that they may use collectives, but ``on_checkpoint``, which
    runs on rank 0 alone. What one raises ends the training of ``trainer``. They may take any time:
    ``--stall-timeout`` does not count.
    """

    def on_fit_start(self, trainer: Trainer) -> None:
        """Before the first step of ``fit()``, after a checkpoint was loaded."""

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        """Before each step of the optimizer: the gradients are the means over all ranks, unscaled,
        not yet clipped.
        """

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        """After each step.

        Args:
            trainer: whose step it was.
            step: counted over all epochs.
            loss: of this rank's last micro-batch, on the device: ``float(loss)`` waits for it. None
                where this rank had no samples.
        """

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """After each evaluation; the figures are the same on all ranks."""

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        """After each epoch and its evaluation; the record is the same on all ranks but for its
        throughput.
        """

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """On rank 0 alone, once the checkpoint at ``path`` is whole: no collectives here."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """When training is over, and the last checkpoint is written."""

    def state_dict(self) -> dict[str, Any]:
        """What of this callback a checkpoint is to hold: tensors and plain values. Rank 0's is
        saved.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, which rank 0's ``state_dict()`` gave; called on all ranks."""
