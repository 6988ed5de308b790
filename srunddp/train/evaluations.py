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
    """Return what an evaluation calls a figure of a validation set.

    Args:
        of: The set's name; empty for one that was passed alone.
        name: Of the figure.
    """
    return f"{of}/{name}" if of else name


def _monitored(monitor: str, metrics: Mapping[str, Metric], sets: Sequence[str]) -> tuple[str, str]:
    """Return the validation set that ``monitor`` names, or the first one, and the figure of it.

    Raises:
        ConfigError: There is no such figure.
    """
    of, _, rest = monitor.partition("/")
    # A slash also divides a torchmetrics collection from its part: only the name of a set counts as
    # one.
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
    # The part first: "errors/accuracy" is an accuracy.
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
    """Return whether a torchmetrics object, or one of a collection, says that greater is better.

    None where it says nothing.
    """
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
        # The last evaluation's step, and its figures, in this process: a checkpoint does not have
        # them.
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
        """The figures of this very step; empty where it was not evaluated in this run."""
        step, figures = self._latest
        if step == self._state.step:
            return figures
        return {}

    @property
    def early_stopped(self) -> bool:
        """Whether the figures have not become better for as long as the configuration allows."""
        return 0 < self._config.patience <= self._state.evals_since_best

    def record(self, figures: Mapping[str, float]) -> tuple[float, bool]:
        """Take the figures of an evaluation, or those of training without validation data.

        Args:
            figures: By name, the same on all ranks.

        Returns:
            The figure that ``config.monitor`` names, and whether it is the best so far.

        Raises:
            ConfigError: There is none of this name.
        """
        state = self._state
        name = figure_name(self._of, self._name)
        # A collection that has seen no sample computes nothing, and is one figure, NaN. Its parts
        # are missing then, and no one's mistake.
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
        # Any comparison with NaN is False: an evaluation that came to it is never the best.
        is_best = score < best
        if is_best:
            state.best = score
            state.evals_since_best = 0
        else:
            state.evals_since_best += 1
        return figure, is_best
