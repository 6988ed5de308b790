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
        """Called before the first step of ``fit()``, after a checkpoint was loaded.

        Args:
            trainer: whose training begins.
        """

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        """Called before each step of the optimizer.

        The gradients are the means over all ranks, unscaled, not yet clipped.

        Args:
            trainer: whose step it is.
        """

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        """Called after each step.

        Args:
            trainer: whose step it was.
            step: counted over all epochs.
            loss: of this rank's last micro-batch, on the device: ``float(loss)`` waits for it. None
                where this rank had no samples.
        """

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Called after each evaluation.

        Args:
            trainer: whose model was evaluated.
            figures: by name, the same on all ranks.
        """

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        """Called after each epoch and its evaluation.

        Args:
            trainer: whose epoch it was.
            record: the same on all ranks but for its throughput.
        """

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Called on rank 0 alone, once a checkpoint is whole: no collectives here.

        Args:
            trainer: whose checkpoint it is.
            path: of the file.
        """

    def on_fit_end(self, trainer: Trainer) -> None:
        """Called when training is over, and the last checkpoint is written.

        Args:
            trainer: whose training is over.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint is to hold of this callback: tensors and plain values.

        Rank 0's is saved.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; called on all ranks.

        Args:
            state: what rank 0's ``state_dict()`` gave.
        """
