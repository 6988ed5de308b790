"""The base class of user callbacks, with one method for each event of a training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from srunddp.train.progress import EpochRecord

if TYPE_CHECKING:
    from srunddp.train.trainer import Trainer


class Callback:
    """Base class of callbacks. Override the methods you need; the others cost nothing.

    All methods run on every rank, so they may use collectives, except ``on_checkpoint``, which runs
    on rank 0 only. An exception in a method ends the training. A method may take any time:
    ``--stall-timeout`` is suspended meanwhile.
    """

    def on_fit_start(self, trainer: Trainer) -> None:
        """Called before the first step of ``fit()``, after a checkpoint was loaded.

        Args:
            trainer: The trainer whose training begins.
        """

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        """Called before each step of the optimizer.

        The gradients are the means over all ranks, unscaled, not yet clipped.

        Args:
            trainer: The trainer that makes the step.
        """

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        """Called after each optimizer step.

        Args:
            trainer: The trainer that made the step.
            step: The number of the step, counted over all epochs.
            loss: The loss of this rank's last micro-batch, on the device; ``float(loss)`` waits for
                the device. None if this rank had no samples.
        """

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Called after each evaluation.

        Args:
            trainer: The trainer whose model was evaluated.
            figures: The results by name, the same on all ranks.
        """

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        """Called after each epoch and its evaluation.

        Args:
            trainer: The trainer that finished the epoch.
            record: The results of the epoch, the same on all ranks except for the throughput.
        """

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Called on rank 0 only, once a checkpoint is complete; do not use collectives here.

        Args:
            trainer: The trainer that saved the checkpoint.
            path: The checkpoint file.
        """

    def on_fit_end(self, trainer: Trainer) -> None:
        """Called when training is over, and the last checkpoint is written.

        Args:
            trainer: The trainer whose training is over.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this callback for a checkpoint: tensors and plain values.

        The state of rank 0 is saved.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint; called on all ranks.

        Args:
            state: The return value of rank 0's ``state_dict()``.
        """
