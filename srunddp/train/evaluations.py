"""Decides when to evaluate, and keeps track of the best evaluation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from srunddp.errors import ConfigError
from srunddp.train.config import Config
from srunddp.train.metrics.accumulator import Metric
from srunddp.train.state import TrainingState

# Endings of figures' names that say whether a smaller or a greater figure is better.
_SMALLER_IS_BETTER = ("loss", "error", "mse", "mae", "rmse", "perplexity")
_GREATER_IS_BETTER = ("accuracy", "f1", "auroc", "precision", "recall", "iou")


def figure_name(of: str, name: str) -> str:
    """Return the name by which a figure of a validation set is reported.

    Args:
        of: The set's name; empty for a single set.
        name: The name of the figure within the set.
    """
    return f"{of}/{name}" if of else name


def _monitored(monitor: str, metrics: Mapping[str, Metric], sets: Sequence[str]) -> tuple[str, str]:
    """Return the names of the validation set and of the figure in it that ``monitor`` asks for.

    If ``monitor`` names no set, this is the first one; without validation sets its name is empty.

    Raises:
        ConfigError: There is no figure of that name.
    """
    of, _, rest = monitor.partition("/")
    # A slash also separates a torchmetrics collection from its part, so compare with the sets'
    # names.
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
    """Return ``min`` or ``max``: whether a smaller or a greater figure is better.

    Args:
        config: The settings, whose ``mode`` decides if it is set.
        figure: The name of the loss or of a metric, or ``name/part``.
        metrics: The metrics by name.

    Raises:
        ConfigError: Neither ``config.mode`` nor the metric nor the figure's name says which is
            better.
    """
    if config.mode is not None:
        return config.mode
    name, _, part = figure.partition("/")
    greater = _says_itself(metrics.get(name), part)
    if greater is not None:
        return "max" if greater else "min"
    # Look at the part first: "errors/accuracy" is an accuracy.
    for word in (figure.lower(), name.lower()):
        if word.endswith(_SMALLER_IS_BETTER):
            return "min"
        if word.endswith(_GREATER_IS_BETTER):
            return "max"
    raise ConfigError(
        f"monitor={config.monitor}, and no mode",
        expected="mode=max if a greater figure is better, else mode=min",
        hint="set it",
    )


def _says_itself(metric: Any, part: str) -> bool | None:
    """Return ``higher_is_better`` of a torchmetrics object, or of a part of a collection.

    None if the object does not set it to True or False.
    """
    if part and hasattr(metric, "items"):
        metric = dict(metric.items()).get(part)
    greater = getattr(metric, "higher_is_better", None)
    return greater if isinstance(greater, bool) else None


class Evaluations:
    """Says when evaluations of one call of ``fit()`` are due, and keeps their latest and best
    figures.
    """

    def __init__(
        self,
        config: Config,
        metrics: Mapping[str, Metric],
        state: TrainingState,
        *,
        sets: Sequence[str],
    ) -> None:
        """Find the figure that ``config.monitor`` names, and whether smaller or greater is better.

        Args:
            config: The settings of the training.
            metrics: The metrics of evaluations by name; without evaluations, those of training.
            state: The state of the training.
            sets: The names of the validation sets; ``""`` for a single set. Empty if there is no
                validation data.

        Raises:
            ConfigError: There is no such figure, or nothing decides whether smaller or greater is
                better.
        """
        self._config = config
        self._of, self._name = _monitored(config.monitor, metrics, sets)
        state.monitor = config.monitor
        state.mode = direction(config, self._name, metrics)
        self._state = state
        self._exist = bool(sets)
        # The step and the figures of the last evaluation in this process; they are not in
        # checkpoints.
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
        """Whether to evaluate at the end of this epoch."""
        every = self._config.evaluate_every_epochs
        return bool(every and self._exist and (self._state.epoch + 1) % every == 0)

    @property
    def latest(self) -> Mapping[str, float]:
        """The figures of the evaluation after the present step; empty if this process has not
        evaluated after this step.
        """
        step, figures = self._latest
        if step == self._state.step:
            return figures
        return {}

    @property
    def early_stopped(self) -> bool:
        """Whether ``patience`` evaluations have passed without a better figure."""
        return 0 < self._config.patience <= self._state.evals_since_best

    def record(self, figures: Mapping[str, float]) -> tuple[float, bool]:
        """Record the figures of an evaluation, or those of training if there is no validation data.

        Args:
            figures: The figures by name, the same on all ranks.

        Returns:
            The figure that ``config.monitor`` names, and whether it is the best so far.

        Raises:
            ConfigError: There is no figure of the name in ``config.monitor``.
        """
        state = self._state
        name = figure_name(self._of, self._name)
        # A torchmetrics collection that has seen no sample is a single figure, NaN, without its
        # parts. A missing part is then not a mistake of the user.
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
        best = math.inf if state.best is None else state.best
        # A comparison with NaN is False, so an evaluation whose figure is NaN is never the best.
        is_best = score < best
        if is_best:
            state.best = score
            state.evals_since_best = 0
        else:
            state.evals_since_best += 1
        return figure, is_best
