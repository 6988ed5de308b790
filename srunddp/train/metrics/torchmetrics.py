"""Metrics that keep a state, such as those of torchmetrics: gathers their states from all ranks,
and computes once.

torchmetrics' own synchronisation assumes that every rank has samples, and for some metrics that all
ranks have equally many batches; otherwise it fails or hangs. Also, if each rank computed for
itself, results could differ in the last digit, and ranks could decide differently whether to stop.
"""

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from srunddp.errors import ConfigError
from srunddp.telemetry import stall_limit_suspended
from srunddp.train.world import World, on_rank_zero


class TorchMetric(Protocol):
    """A metric that keeps a state, such as torchmetrics' ``Metric`` and ``MetricCollection``."""

    def update(self, outputs: Tensor, targets: Tensor) -> object:
        """Add a batch to the state."""

    def compute(self) -> Any:
        """Return the figure of all batches since the last reset, or several figures by name."""

    def reset(self) -> object:
        """Forget all batches, so that the state is that of a new metric."""


def is_stateful(metric: object) -> TypeGuard[TorchMetric]:
    """Return whether a metric keeps a state: it is then updated and computed instead of called.

    Args:
        metric: The user's metric.
    """
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def reset_copy(name: str, metric: TorchMetric, world: World) -> TorchMetric:
    """Return a copy of a metric, reset and on this rank's device.

    The copy calls no collectives itself.

    Args:
        name: The name of the metric in messages.
        metric: The user's metric.
        world: The ranks of the training.

    Raises:
        ConfigError: The metric keeps figures over several epochs; or there are several ranks, and
            it has no states that can be gathered.
    """
    # Refuse torchmetrics' MetricTracker, which has increment() and needs a call of it at the
    # beginning of each epoch.
    if callable(getattr(metric, "increment", None)):
        raise ConfigError(
            f"metric {name!r} is a {type(metric).__name__}",
            expected="a metric of one epoch, whose figures trainer.state.records keeps",
            hint="pass the metric that it tracks",
        )
    own = copy.deepcopy(metric)
    own.reset()
    if isinstance(own, nn.Module):
        own.to(world.device)
    if world.world_size > 1 and not any(part._reductions for part in _parts(own)):
        raise ConfigError(
            f"metric {name!r} of {type(metric).__name__} has update() and compute(), but no states",
            expected="states of torchmetrics' add_state(), which can be gathered from all ranks",
            hint="derive it from torchmetrics.Metric, or pass a function of (outputs, targets)",
        )
    # Keep compute() from gathering the states by its own collectives: some metrics make one for
    # each batch, so ranks with fewer batches would hang.
    for part in _parts(own):
        part.distributed_available_fn = lambda: False
    return own


def compute(metrics: Mapping[str, TorchMetric], updated: bool, world: World) -> dict[str, float]:
    """Compute each metric over the samples of all ranks; a collective.

    Rank 0 computes, and all ranks get its figures.

    Args:
        metrics: Metrics from :func:`reset_copy`; those of rank 0 cannot be used afterwards.
        updated: Whether this rank has updated the metrics. If no rank has, for example after a
            resume at the very end of an epoch, the figures are NaN.
        world: The ranks, all of which call this.

    Returns:
        The figures by name, or by ``name/subname`` if a metric has several.

    Raises:
        ConfigError: A figure is not a number. The other ranks raise PeerError if rank 0 raises this
            or any other error.
    """
    unknown = dict.fromkeys(metrics, math.nan)
    if world.world_size == 1:
        return _figures(metrics) if updated else unknown
    by_rank: list[Any] = [None] * world.world_size
    if updated:
        states = {name: _states(metric) for name, metric in metrics.items()}
    else:
        states = None
    dist.gather_object(states, by_rank if world.rank == 0 else None)

    def compute_all() -> dict[str, float]:
        known = [states for states in by_rank if states is not None]
        if not known:
            return unknown
        _merge(metrics, known, world)
        return _figures(metrics)

    # on_rank_zero() turns the limit of --stall-timeout off until the next step. This context turns
    # it on again at its end, so that a rank that hangs right afterwards is noticed.
    with stall_limit_suspended():
        return on_rank_zero(world, compute_all)


def _parts(metric: TorchMetric) -> list[Any]:
    """Return the metrics that have states of torchmetrics, among ``metric`` and those within it."""
    modules = metric.modules() if isinstance(metric, nn.Module) else [metric]
    return [module for module in modules if isinstance(getattr(module, "_reductions", None), dict)]


def _states(metric: TorchMetric) -> list[dict[str, Any]]:
    """Return the states of a metric and of the metrics within it, on the CPU.

    They are copied to the CPU because rank 0 would unpickle a CUDA tensor to the GPU number from
    which it came.
    """
    return [
        {name: _on_cpu(getattr(part, name)) for name in part._reductions} for part in _parts(metric)
    ]


def _on_cpu(state: Any) -> Any:
    if isinstance(state, list):
        return [_on_cpu(value) for value in state]
    # Copy tensors on the CPU too: pickle writes all of the memory that a view refers to, such as
    # the whole batch.
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    return state


def _merge(
    metrics: Mapping[str, TorchMetric], by_rank: Sequence[Mapping[str, Any]], world: World
) -> None:
    for name, metric in metrics.items():
        of_parts = zip(*(states[name] for states in by_rank), strict=True)
        for part, states in zip(_parts(metric), of_parts, strict=True):
            for state, reduction in part._reductions.items():
                setattr(part, state, _reduced(reduction, [of_rank[state] for of_rank in states]))
            # Let the metric seem updated: if rank 0 itself has seen no sample, torchmetrics would
            # warn that compute() is called before update().
            part._update_count = max(part._update_count, 1)
        if isinstance(metric, nn.Module):
            metric.to(world.device)


def _reduced(reduction: Callable[[Any], Any] | None, states: list[Any]) -> Any:
    """Reduce the states of several ranks to one, as torchmetrics does.

    ``states`` are only the states of ranks that have updated the metric. The state of another rank
    might change the result: it may be a 0, for example, and the result a minimum.
    """
    if len(states) == 1:
        return states[0]
    if isinstance(states[0], list):
        values = [value for state in states for value in state]
        if reduction and values:
            return reduction(values)
        return values
    stacked = torch.stack(states)
    return reduction(stacked) if reduction else stacked


def _figures(metrics: Mapping[str, TorchMetric]) -> dict[str, float]:
    return _flat({name: metric.compute() for name, metric in metrics.items()})


def _flat(value: Any, name: str = "") -> dict[str, float]:
    """Return the numbers in nested mappings by name; the keys are joined with slashes.

    Args:
        value: The result of a metric, or a part of it.
        name: The name of the value, before its keys; empty for none.

    Raises:
        ConfigError: The value is neither a number nor a mapping of numbers.
    """
    if isinstance(value, Mapping):
        parts = [_flat(part, f"{name}/{key}" if name else key) for key, part in value.items()]
        return dict(itertools.chain.from_iterable(part.items() for part in parts))
    if isinstance(value, Tensor) and value.numel() == 1:
        return {name: float(value.item())}
    if isinstance(value, int | float):
        return {name: float(value)}
    if isinstance(value, Tensor):
        shape = f"tensor of shape {tuple(value.shape)}"
    else:
        shape = type(value).__name__
    raise ConfigError(
        f"metric {name!r} computes a {shape}",
        expected="one number, or a dict of numbers",
        hint=(
            "let it average, as by average='macro', or name its parts by torchmetrics'"
            " ClasswiseWrapper"
        ),
    )
