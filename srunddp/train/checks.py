"""A user's errors, found before they hang the ranks or make a figure wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from srunddp.train.metrics import LossFunction, Metric
from srunddp.train.world import World


def check_group(world: World) -> None:
    """The process group is there when there is more than one rank, and is as large as the world."""
    if world.world_size == 1:
        return
    found = dist.get_world_size() if dist.is_initialized() else 0
    if found != world.world_size:
        state = f"one of {found} ranks" if found else "none"
        raise ValueError(
            f"a world of {world.world_size} ranks, but torch's default process group is {state}; "
            "expected both alike -> build the Trainer inside 'with srunddp.init() as world:'"
        )


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """The optimizer steps this model's parameters, and no others."""
    own = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ValueError(
            f"{foreign} of the optimizer's parameters are not the model's; expected the same objects -> "
            "build the optimizer from model.parameters(), and pass that model, not wrapped in "
            "DistributedDataParallel or copied"
        )


def check_loss_function(loss_function: LossFunction) -> None:
    """The loss is a mean, as DistributedDataParallel's averaging of gradients and our sums take it."""
    reduction = getattr(loss_function, "reduction", "mean")
    if reduction != "mean":
        raise ValueError(f"a loss function with reduction={reduction!r}; expected 'mean' -> use reduction='mean'")


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    """No metric takes the loss's name."""
    if "loss" in metrics:
        raise ValueError("a metric named 'loss'; expected another name, the loss has that one -> rename it")


def check_fit(
    world: World,
    train_data: Dataset[Any],
    test_data: Dataset[Any] | None,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
) -> None:
    """There is something to do, and all ranks were given the same.

    Else one rank would wait in a collective that another never enters.
    """
    sizes = {"len(train_data)": _length(train_data), "len(test_data)": _length(test_data)}
    counts = {**sizes, "epochs": epochs, "batch_size": batch_size}
    _check_agreement(world, {**counts, "seed": seed})
    for name, number in counts.items():
        if number == 0 or (number < 0 and name not in sizes):
            raise ValueError(f"{name} is {number}; expected at least 1 -> check what was passed to fit()")


def _check_agreement(world: World, numbers: Mapping[str, int]) -> None:
    if world.world_size == 1:
        return
    own = torch.tensor(list(numbers.values()), device=world.device)
    by_rank = [torch.empty_like(own) for _ in range(world.world_size)]
    dist.all_gather(by_rank, own)
    for name, *values in zip(numbers, *(row.tolist() for row in by_rank), strict=True):
        if len(set(values)) > 1:
            raise ValueError(
                f"{name} differs between ranks: {values}, by rank (-1: none); expected one number -> "
                "give every rank the whole data sets and the same settings: the Trainer shards"
            )


def _length(data: Dataset[Any] | None) -> int:
    if data is None:
        return -1
    if not isinstance(data, Sized):
        raise ValueError(
            f"a data set of {type(data).__name__} without a length; expected __len__ and __getitem__ -> "
            "use a map-style data set: its indices can be sharded"
        )
    return len(data)
