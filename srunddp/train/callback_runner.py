"""The callbacks of a Trainer, called at their moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from srunddp.telemetry import stall_limit_suspended
from srunddp.train.callback import Callback
from srunddp.train.progress import EpochRecord
from srunddp.train.rng import StepRng

if TYPE_CHECKING:
    from srunddp.train.trainer import Trainer


class CallbackRunner:
    """Calls the methods that a user's callbacks override, in the callbacks' order.

    While they run ``--stall-timeout`` does not count, and what they draw at random is the same on
    all ranks.
    """

    def __init__(self, trainer: Trainer, step_rng: StepRng) -> None:
        """Look up which methods are overridden.

        Args:
            trainer: Passed to each of them; it has the callbacks.
            step_rng: The random numbers of the steps, which the callbacks do not draw from.
        """
        self._trainer = trainer
        self._step_rng = step_rng
        self.refresh()

    def refresh(self) -> None:
        """Look up again which methods are overridden that are called in each step.

        A script may have given the Trainer other callbacks since it was made, or a callback another
        method. The methods of rarer moments are looked up at each call.
        """
        self._on_before_optimizer_step = self._overrides_of(Callback.on_before_optimizer_step)
        self._on_step = self._overrides_of(Callback.on_step)

    def _overrides_of(self, default: Callable[..., None]) -> list[Callable[..., Any]]:
        """Return the callbacks' methods in the place of one of ``Callback``'s own."""
        methods = [getattr(callback, default.__name__) for callback in self._trainer.callbacks]
        # A method is bound anew at each look-up, so that only its function can be compared. A plain
        # function that was put on the instance has no __func__, and counts as an override.
        return [method for method in methods if getattr(method, "__func__", None) is not default]

    @property
    def read_gradients(self) -> bool:
        """Whether one of them is called between the backward pass and the optimizer's step."""
        return bool(self._on_before_optimizer_step)

    @property
    def follow_steps(self) -> bool:
        """Whether one of them is called after each step."""
        return bool(self._on_step)

    @property
    def follow_evaluations(self) -> bool:
        """Whether one of them is called after each evaluation."""
        return bool(self._overrides_of(Callback.on_evaluation))

    def fit_start(self) -> None:
        """Call ``on_fit_start``."""
        self._call(self._overrides_of(Callback.on_fit_start))

    def before_optimizer_step(self) -> None:
        """Call ``on_before_optimizer_step``."""
        self._call(self._on_before_optimizer_step)

    def step(self, step: int, loss: Tensor | None) -> None:
        """Call ``on_step``; which parameters are trained may have changed when this returns.

        Args:
            step: Counted over all epochs.
            loss: Of this rank's last micro-batch; None where this rank had no samples.
        """
        self._call(self._on_step, step, loss)

    def evaluation(self, figures: Mapping[str, float]) -> None:
        """Call ``on_evaluation``; which parameters are trained may have changed afterwards.

        Args:
            figures: The same on all ranks.
        """
        self._call(self._overrides_of(Callback.on_evaluation), figures)

    def epoch(self, record: EpochRecord) -> None:
        """Call ``on_epoch``.

        Args:
            record: Of the epoch.
        """
        self._call(self._overrides_of(Callback.on_epoch), record)

    def checkpoint(self, path: Path) -> None:
        """Call ``on_checkpoint``; on rank 0 alone.

        Args:
            path: Of the checkpoint.
        """
        self._call(self._overrides_of(Callback.on_checkpoint), path)

    def fit_end(self) -> None:
        """Call ``on_fit_end``."""
        self._call(self._overrides_of(Callback.on_fit_end))

    def _call(self, methods: Sequence[Callable[..., Any]], *args: Any) -> None:
        if not methods:
            return
        # outside(): steps draw from a sequence of random numbers that is another one on each rank.
        # A callback that makes a new layer there would begin with other weights on each of them.
        with stall_limit_suspended(), self._step_rng.outside():
            for method in methods:
                method(self._trainer, *args)
