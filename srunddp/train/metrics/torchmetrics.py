"""Metrics that keep a state, such as torchmetrics' ones: their states from all ranks, computed
once.

torchmetrics' own synchronisation takes it that every rank has samples, and for some metrics that
all have as many batches: else it fails or hangs. And what each rank computes for itself may differ
in the last digit, on which the ranks must not decide to stop.
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
    """What we ask of such a metric; torchmetrics' ``Metric`` and ``MetricCollection`` have it."""

    def update(self, outputs: Tensor, targets: Tensor) -> object:
        """Take a batch into account."""

    def compute(self) -> Any:
        """Return the figure, or figures by name, of all batches since the last reset."""

    def reset(self) -> object:
        """Forget all batches."""


def is_stateful(metric: object) -> TypeGuard[TorchMetric]:
    """Return whether a metric is to be updated and computed, rather than called.

    Args:
        metric: The user's.
    """
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def reset_copy(name: str, metric: TorchMetric, world: World) -> TorchMetric:
    """Return a copy of a metric on this rank's device that has seen nothing.

    It calls no collective itself.

    Args:
        name: Of the metric in messages.
        metric: The user's.
        world: The ranks of the training.

    Raises:
        ConfigError: it keeps figures over epochs itself; or on several ranks, where it has no
            states that can be gathered.
    """
    # torchmetrics' MetricTracker, which wants a call at each epoch's begin.
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
    # compute() would gather the states by collectives of its own, of which it makes one for each
    # batch of some metrics: ranks with fewer batches would hang.
    for part in _parts(own):
        part.distributed_available_fn = lambda: False
    return own


def compute(metrics: Mapping[str, TorchMetric], updated: bool, world: World) -> dict[str, float]:
    """Compute each metric over the samples of all ranks; a collective.

    Rank 0 computes, and all get its figures.

    Args:
        metrics: from :func:`reset_copy`; those of rank 0 are of no use afterwards.
        updated: whether this rank has updated them; where no rank has, as after a resume at an
            epoch's very end, the figures are not known.
        world: all of its ranks call this.

    Returns:
        By name, or by ``name/subname`` where a metric has several figures.

    Raises:
        ConfigError: a figure is no number. PeerError on the other ranks, also where computing it
            failed.
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

    # on_rank_zero() turns the limit of --stall-timeout off, and nothing turns it on again before
    # the next step. This does, so that a rank that hangs right after it is noticed.
    with stall_limit_suspended():
        return on_rank_zero(world, compute_all)


def _parts(metric: TorchMetric) -> list[Any]:
    """Return the metrics that keep states themselves: it, and those within it."""
    modules = metric.modules() if isinstance(metric, nn.Module) else [metric]
    return [module for module in modules if isinstance(getattr(module, "_reductions", None), dict)]


def _states(metric: TorchMetric) -> list[dict[str, Any]]:
    """Return the states of a metric and of those within it, on the CPU.

    An unpickled CUDA tensor would go to the GPU number that it came from.
    """
    return [
        {name: _on_cpu(getattr(part, name)) for name in part._reductions} for part in _parts(metric)
    ]


def _on_cpu(state: Any) -> Any:
    if isinstance(state, list):
        return [_on_cpu(value) for value in state]
    # A copy also of a tensor on the CPU: pickle writes all of the memory that a view looks into,
    # such as the whole batch.
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
            # Rank 0 may have seen no sample itself; torchmetrics would warn of a compute() without
            # an update().
            part._update_count = max(part._update_count, 1)
        if isinstance(metric, nn.Module):
            metric.to(world.device)


def _reduced(reduction: Callable[[Any], Any] | None, states: list[Any]) -> Any:
    """Return one state of those of several ranks, as torchmetrics reduces gathered ones.

    But of those ranks only that have been updated: another one's would be a 0 among minima, say.
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
    """Return the numbers of nested mappings by their keys, with a slash between them.

    Args:
        value: What a metric has computed.
        name: Of the value itself.

    Raises:
        ConfigError: It is neither a number nor a mapping of numbers.
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
