"""When a training is evaluated, and which of its evaluations was the best."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from srunddp.errors import ConfigError
from srunddp.train.config import Config
from srunddp.train.metrics.accumulator import Metric
from srunddp.train.state import TrainingState

# By the last word of a figure's name.
_SMALLER_IS_BETTER = ("loss", "error", "mse", "mae", "rmse", "perplexity")
_GREATER_IS_BETTER = ("accuracy", "f1", "auroc", "precision", "recall", "iou")


def figure_name(of: str, name: str) -> str:
    """Return what an evaluation calls a figure of a validation set that has this name."""
    return f"{of}/{name}" if of else name


def _monitored(monitor: str, metrics: Mapping[str, Metric], sets: Sequence[str]) -> tuple[str, str]:
    """Return the validation set that ``monitor`` names, or the first one, and the figure of it.

    Raises:
        ConfigError: There is no such figure.
    """
    of, _, rest = monitor.partition("/")
    if not of or of not in sets:
        of = sets[0] if sets else ""
        rest = monitor
    if rest.split("/")[0] not in ("loss", *metrics):
        known = [figure_name(each, name) for each in sets or ("",) for name in ("loss", *metrics)]
        raise ConfigError(
            f"monitor={monitor}",
            expected=f"one of {', '.join(known)}",
            hint="correct it, or pass that metric; val_metrics need val_data",
        )
    return of, rest


def direction(config: Config, figure: str, metrics: Mapping[str, Metric]) -> Literal["min", "max"]:
    """Return whether a smaller or a greater figure is better.

    Args:
        config: Its ``mode`` says it, if set.
        figure: The loss or a metric, by its name, or a part of one.
        metrics: By name.

    Raises:
        ConfigError: Neither ``config.mode`` nor the metric nor its name says it.
    """
    if config.mode is not None:
        return config.mode
    name, _, part = figure.partition("/")
    greater = _says_itself(metrics.get(name), part)
    if greater is not None:
        return "max" if greater else "min"
    for word in (figure.lower(), name.lower()):
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
    """The evaluations of one training by a configuration."""

    def __init__(
        self,
        config: Config,
        metrics: Mapping[str, Metric],
        state: TrainingState,
        *,
        sets: Sequence[str],
    ) -> None:
        """Find the figure that ``config.monitor`` names.

        Args:
            config: Of the training.
            metrics: By name, those that evaluations compute; those of training where there are
                none.
            state: Of the training.
            sets: The names of the validation sets; ``""`` is that of one which was passed alone.
                Empty where there is no validation data.

        Raises:
            ConfigError: There is no such figure, or nothing says whether a greater or a smaller one
                is better.
        """
        self._config = config
        self._of, self._name = _monitored(config.monitor, metrics, sets)
        state.monitor = config.monitor
        state.mode = direction(config, self._name, metrics)
        self._state = state
        self._exist = bool(sets)
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
        name = figure_name(self._of, self._name)
        # One figure for all of a metric's is that it is not known: nothing was evaluated.
        whole = figures.get(figure_name(self._of, self._name.split("/")[0]), 0.0)
        if name not in figures and not math.isnan(whole):
            raise ConfigError(
                f"monitor={self._config.monitor}",
                expected=f"one of {', '.join(figures)}",
                hint="correct it",
            )
        self._latest = (state.step, figures)
        state.evaluated = state.step
        figure = figures.get(name, math.nan)
        score = figure if state.mode == "min" else -figure
        if not math.isnan(score):
            state.scores[state.step] = score
        if is_best := score < (math.inf if state.best is None else state.best):
            state.best = score
        state.evals_since_best = 0 if is_best else state.evals_since_best + 1
        return figure, is_best
