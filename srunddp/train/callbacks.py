"""A user's own code at the loop's events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srunddp.errors import ConfigError, Scope

if TYPE_CHECKING:
    from srunddp.train.progress import EpochRecord
    from srunddp.train.trainer import Trainer


class Callback:
    """Override what is wanted; the rest costs nothing.

    All methods run on every rank, so that they may use collectives, but :meth:`on_checkpoint`, which runs on rank 0
    alone. What one raises ends training.
    """

    def on_step(self, trainer: Trainer, step: int, loss: float | None) -> None:
        """After each step.

        Args:
            trainer: whose step it was.
            step: counted over all epochs.
            loss: this rank's, of the micro-batch before the last: reading the last would wait for the GPU. None at
                first, and after a checkpoint.
        """

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """After each evaluation; the figures are the same on all ranks."""

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        """After each epoch and its evaluation; the record is the same on all ranks but for its throughput."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """On rank 0 alone, once the checkpoint is whole: no collectives here."""


def overriding(callbacks: Sequence[Callback], name: str) -> list[Callable[..., Any]]:
    """The callbacks' methods of this name, without those that are :class:`Callback`'s own and do nothing.

    Raises:
        ConfigError: one of them is no Callback; a class instead of its instance, say.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"{callback!r} among the callbacks",
                expected="instances of srunddp.train.Callback",
                cure="derive its class from Callback, and pass an instance",
                scope=Scope.JOB,
            )
    methods = [getattr(callback, name) for callback in callbacks]
    own = getattr(Callback, name)
    return [method for method in methods if getattr(method, "__func__", None) is not own]
