"""When a training is evaluated, and which of its evaluations was the best."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from srunddp.errors import ConfigError
from srunddp.train.config import Config
from srunddp.train.metrics.accumulator import Metric
from srunddp.train.state import TrainingState

# By the last word of a figure's name.
_SMALLER_IS_BETTER = ("loss", "error", "mse", "mae", "rmse", "perplexity")
_GREATER_IS_BETTER = ("accuracy", "f1", "auroc", "precision", "recall", "iou")


def direction(config: Config, metrics: Mapping[str, Metric]) -> Literal["min", "max"]:
    """Return whether a smaller or a greater figure of ``config.monitor`` is better.

    Raises:
        ConfigError: Neither ``config.mode`` nor the metric nor its name says it.
    """
    if config.mode is not None:
        return config.mode
    name, _, part = config.monitor.partition("/")
    greater = _says_itself(metrics.get(name), part)
    if greater is not None:
        return "max" if greater else "min"
    for word in (config.monitor.lower(), name.lower()):
        if word.endswith(_SMALLER_IS_BETTER):
            return "min"
        if word.endswith(_GREATER_IS_BETTER):
            return "max"
    raise ConfigError(
        f"monitor={config.monitor}, and no mode",
        expected="mode=max where a greater figure is better, else mode=min",
        hint="set it",
    )


def _says_itself(metric: Any, part: str) -> bool | None:
    """What a torchmetrics object says, or one of a collection; None where it says nothing."""
    if part and hasattr(metric, "items"):
        metric = dict(metric.items()).get(part)
    greater = getattr(metric, "higher_is_better", None)
    return greater if isinstance(greater, bool) else None


class Evaluations:
    """The evaluations of one training by a configuration; ``exist``: there is validation data."""

    def __init__(
        self, config: Config, metrics: Mapping[str, Metric], state: TrainingState, *, exist: bool
    ) -> None:
        """``metrics``: by name, as of :class:`srunddp.train.Trainer`.

        Raises:
            ConfigError: Nothing says whether a greater or a smaller figure is better.
        """
        self._config = config
        state.monitor = config.monitor
        state.mode = direction(config, metrics)
        self._state = state
        self._exist = exist
        # An evaluation's step, and its figures.
        self._latest: tuple[int, Mapping[str, float]] = (0, {})

    @property
    def due(self) -> bool:
        """Whether to evaluate after this step."""
        every = self._config.evaluate_every_steps
        state = self._state
        return bool(
            every and self._exist and state.step % every == 0 and state.evaluated < state.step
        )

    @property
    def due_at_epochs_end(self) -> bool:
        """The same at the end of this epoch."""
        every = self._config.evaluate_every_epochs
        return bool(every and self._exist and (self._state.epoch + 1) % every == 0)

    @property
    def latest(self) -> Mapping[str, float]:
        """The figures of this very step; empty where it was not evaluated in this run."""
        step, figures = self._latest
        if step == self._state.step:
            return figures
        return {}

    @property
    def early_stopped(self) -> bool:
        """The figures have not become better for as long as the configuration allows."""
        return 0 < self._config.patience <= self._state.evals_since_best

    def record(self, figures: Mapping[str, float]) -> tuple[float, bool]:
        """Take the figures of an evaluation, or those of training where there is no validation
        data.

        Returns:
            The figure that ``config.monitor`` names, and whether it is the best so far.

        Raises:
            ConfigError: there is none of this name.
        """
        state = self._state
        config = self._config
        # One figure for all of a metric's is that it is not known: nothing was evaluated.
        if config.monitor not in figures and not math.isnan(
            figures.get(config.monitor.split("/")[0], 0.0)
        ):
            raise ConfigError(
                f"monitor={config.monitor}",
                expected=f"one of {', '.join(figures)}",
                hint="correct it",
            )
        self._latest = (state.step, figures)
        state.evaluated = state.step
        figure = figures.get(config.monitor, math.nan)
        score = figure if state.mode == "min" else -figure
        if not math.isnan(score):
            state.scores[state.step] = score
        if is_best := score < (math.inf if state.best is None else state.best):
            state.best = score
        state.evals_since_best = 0 if is_best else state.evals_since_best + 1
        return figure, is_best
