"""A user's errors, found before they hang the ranks or make a figure wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import Dataset, IterableDataset

from srunddp.errors import ConfigError
from srunddp.train.config import Config
from srunddp.train.data.order import Order
from srunddp.train.data.sampler import length_of
from srunddp.train.metrics.accumulator import LossFunction, Metric
from srunddp.train.validate.config import check_settings, leaves
from srunddp.train.world import World


def check_parts(
    world: World,
    model: nn.Module,
    optimizer: Optimizer,
    loss_function: LossFunction,
    metrics: Mapping[str, Metric],
    config: Config,
) -> None:
    """What a Trainer is made of fits together.

    Raises:
        ConfigError: it does not.
    """
    check_group(world)
    check_optimizer(optimizer, model)
    check_loss_function(loss_function)
    check_metrics(metrics, config)
    check_settings(config, world)


def check_group(world: World) -> None:
    """The process group is there when there is more than one rank, and is as large as the world."""
    if world.world_size == 1:
        return
    found = dist.get_world_size() if dist.is_initialized() else 0
    if found != world.world_size:
        state = f"one of {found} ranks" if found else "none"
        raise ConfigError(
            f"a world of {world.world_size} ranks, but torch's default process group is {state}",
            expected="both alike",
            hint="build the Trainer inside 'with srunddp.init() as world:'",
        )


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """The optimizer steps this model's parameters, and no others."""
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "the optimizer LBFGS", expected="one that makes a step of one gradient", hint="take another optimizer"
        )
    own = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ConfigError(
            f"{foreign} of the optimizer's parameters are not the model's",
            expected="the same objects",
            hint="build the optimizer from model.parameters(), and pass that model, not wrapped in "
            "DistributedDataParallel or copied",
        )


def check_loss_function(loss_function: LossFunction) -> None:
    """The loss is a mean, as DistributedDataParallel's averaging of gradients and our sums take it."""
    reduction = getattr(loss_function, "reduction", "mean")
    if reduction != "mean":
        raise ConfigError(
            f"a loss function with reduction={reduction!r}", expected="'mean'", hint="use reduction='mean'"
        )


def check_metrics(metrics: Mapping[str, Metric], config: Config) -> None:
    """No metric takes the loss's name, and the one that tells the best model is among them."""
    if "loss" in metrics:
        raise ConfigError("a metric named 'loss'", expected="another name, the loss has that one", hint="rename it")
    if config.best.split("/")[0] not in ("loss", *metrics):
        known = ", ".join(("loss", *metrics))
        raise ConfigError(f"best={config.best}", expected=f"one of {known}", hint="correct it, or pass that metric")


def check_fit(
    world: World, train_data: Dataset[Any], test_data: Dataset[Any] | None, order: Order | None, config: Config
) -> None:
    """There is something to read, and all ranks were given the same.

    Else one rank would wait in a collective that another never enters.
    """
    sizes = {"len(train_data)": _length(train_data), "len(test_data)": _length(test_data)}
    _check_agreement(world, {**sizes, "order": _first_epoch(order), **dict(leaves(config))})
    for name, size in sizes.items():
        if size == 0:
            raise ConfigError(f"{name} is 0", expected="at least 1", hint="check what was passed to fit()")
    if order is not None:
        _check_order(order, sizes["len(train_data)"], train_data)


def _first_epoch(order: Order | None) -> Any:
    return None if order is None else order.indices(1).numpy().tobytes()


def _check_order(order: Order, samples: int, data: Dataset[Any]) -> None:
    if isinstance(data, IterableDataset):
        raise ConfigError(
            "an order, and data that is iterable", expected="data with indices", hint="let it yield in that order"
        )
    indices = order.indices(1)
    if len(indices) == 0 or int(indices.min()) < 0 or int(indices.max()) >= samples:
        found = f"from {int(indices.min())} to {int(indices.max())}" if len(indices) else "none"
        raise ConfigError(
            f"the order's indices: {found}",
            expected=f"some, from 0 to {samples - 1} for {samples} samples",
            hint="make the order of this data set",
        )


def _check_agreement(world: World, values: Mapping[str, Any]) -> None:
    if world.world_size == 1:
        return
    own = torch.tensor([_number(value) for value in values.values()], device=world.device)
    by_rank = [torch.empty_like(own) for _ in range(world.world_size)]
    dist.all_gather(by_rank, own)
    for name, *row in zip(values, *(numbers.tolist() for numbers in by_rank), strict=True):
        if len(set(row)) > 1:
            shown = f": {row}, by rank (-1: none)" if isinstance(values[name], int) else ""
            raise ConfigError(
                f"{name} differs between ranks{shown}",
                expected="the same on all",
                hint="give every rank the whole data sets and the same settings: the Trainer shards",
            )


def _number(value: Any) -> int:
    if isinstance(value, int):
        return value
    data = value if isinstance(value, bytes) else repr(value).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def _length(data: Dataset[Any] | None) -> int:
    if data is None:
        return -1
    length = length_of(data)
    if length is not None:
        return length
    if isinstance(data, IterableDataset):
        return -2
    raise ConfigError(
        f"a data set of {type(data).__name__} without a length",
        expected="__len__ and __getitem__, or an IterableDataset",
        hint="use one of torch.utils.data's kinds",
    )
