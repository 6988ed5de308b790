"""Calls the callbacks of a Trainer."""

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
    """Calls the methods that a user's callbacks override, in the order of the callbacks.

    While they run, ``--stall-timeout`` is suspended, and random numbers that they draw are the same
    on all ranks.
    """

    def __init__(self, trainer: Trainer, step_rng: StepRng) -> None:
        """Look up which methods are overridden.

        Args:
            trainer: Has the callbacks, and is passed to each method.
            step_rng: The random numbers of the steps; callbacks do not draw from them.
        """
        self._trainer = trainer
        self._step_rng = step_rng
        self.refresh()

    def refresh(self) -> None:
        """Look up again which of the methods that are called in each step are overridden.

        The script may have changed the Trainer's callbacks since it was made, or a callback's
        methods. Methods that are called less often are looked up at each call.
        """
        self._on_before_optimizer_step = self._overrides_of(Callback.on_before_optimizer_step)
        self._on_step = self._overrides_of(Callback.on_step)

    def _overrides_of(self, default: Callable[..., None]) -> list[Callable[..., Any]]:
        """Return the callbacks' own versions of the method ``default`` of ``Callback``, in the
        order of the callbacks; callbacks that do not override it have none.
        """
        methods = [getattr(callback, default.__name__) for callback in self._trainer.callbacks]
        # Each look-up makes a new bound method, so only its function can be compared. A plain
        # function that was set on the instance has no __func__ and counts as an override.
        return [method for method in methods if getattr(method, "__func__", None) is not default]

    @property
    def read_gradients(self) -> bool:
        """Whether any callback is called between the backward pass and the optimizer's step."""
        return bool(self._on_before_optimizer_step)

    @property
    def follow_steps(self) -> bool:
        """Whether any callback is called after each step."""
        return bool(self._on_step)

    @property
    def follow_evaluations(self) -> bool:
        """Whether any callback is called after each evaluation."""
        return bool(self._overrides_of(Callback.on_evaluation))

    def fit_start(self) -> None:
        """Call ``on_fit_start`` of each callback that overrides it."""
        self._call(self._overrides_of(Callback.on_fit_start))

    def before_optimizer_step(self) -> None:
        """Call ``on_before_optimizer_step`` of each callback that overrides it."""
        self._call(self._on_before_optimizer_step)

    def step(self, step: int, loss: Tensor | None) -> None:
        """Call ``on_step`` of each callback that overrides it; a callback may freeze or unfreeze
        parameters.

        Args:
            step: The number of the step, counted over all epochs.
            loss: The loss of this rank's last micro-batch; None if this rank had no samples.
        """
        self._call(self._on_step, step, loss)

    def evaluation(self, figures: Mapping[str, float]) -> None:
        """Call ``on_evaluation`` of each callback that overrides it; a callback may freeze or
        unfreeze parameters.

        Args:
            figures: The results by name, the same on all ranks.
        """
        self._call(self._overrides_of(Callback.on_evaluation), figures)

    def epoch(self, record: EpochRecord) -> None:
        """Call ``on_epoch`` of each callback that overrides it.

        Args:
            record: The results of the epoch.
        """
        self._call(self._overrides_of(Callback.on_epoch), record)

    def checkpoint(self, path: Path) -> None:
        """Call ``on_checkpoint`` of each callback that overrides it; only rank 0 calls this.

        Args:
            path: The checkpoint file.
        """
        self._call(self._overrides_of(Callback.on_checkpoint), path)

    def fit_end(self) -> None:
        """Call ``on_fit_end`` of each callback that overrides it."""
        self._call(self._overrides_of(Callback.on_fit_end))

    def _call(self, methods: Sequence[Callable[..., Any]], *args: Any) -> None:
        if not methods:
            return
        # Use outside(), because the random numbers of the steps differ between ranks: a new layer
        # that a callback makes from them would begin with different weights on each rank.
        with stall_limit_suspended(), self._step_rng.outside():
            for method in methods:
                method(self._trainer, *args)
