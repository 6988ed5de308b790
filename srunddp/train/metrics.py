"""Sums and counts over all ranks, divided once: never a mean of means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from srunddp.train.world import World

Metric: TypeAlias = Callable[[Tensor, Tensor], Tensor | float]
"""``metric(outputs, targets)``: one value per sample, or their sum; not their mean."""

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``loss_function(outputs, targets)``: the mean over the batch, of no dimension."""


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the highest score is the target's class, else 0.

    Args:
        outputs: scores of shape (samples, classes, ...).
        targets: class indices of shape (samples, ...).
    """
    return outputs.argmax(dim=1) == targets


class Sums:
    """The loss and the metrics, summed over samples on the device.

    float64 adds a float32 run's values, and counts, without a rounding that would depend on the order of
    ranks. A batch's loss comes in as its mean in the loss's own precision.
    """

    def __init__(self, loss_function: LossFunction, metrics: Mapping[str, Metric], world: World) -> None:
        self._loss_function = loss_function
        self._metrics = metrics
        self._world = world
        self._count = 0
        self._totals = {name: self._zero() for name in ("loss", *metrics)}

    def add(self, loss: Tensor, outputs: Tensor, targets: Tensor, own: int) -> None:
        """Add a batch's first ``own`` samples; nothing here waits for the device."""
        outputs = outputs.detach()
        if own < len(targets):
            if own == 0:
                return
            outputs, targets = outputs[:own], targets[:own]
            loss = self._loss_function(outputs, targets)
        self._count += own
        self._totals["loss"].add_(loss.detach(), alpha=own)
        for name, metric in self._metrics.items():
            self._totals[name].add_(_total(name, metric(outputs, targets), own))

    def means(self) -> dict[str, float]:
        """Each total over all ranks by the samples of all ranks: one all-reduce, one wait."""
        row = torch.stack([*self._totals.values(), self._zero() + self._count])
        if self._world.world_size > 1:
            dist.all_reduce(row)
        *totals, count = row.tolist()
        return {name: total / count for name, total in zip(self._totals, totals, strict=True)}

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._world.device)


def _total(name: str, value: Tensor | float, own: int) -> Tensor | float:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if len(value) != own:
        raise ValueError(
            f"metric {name!r} returned shape {tuple(value.shape)} for {own} samples; "
            "expected one value per sample, or their sum -> reduce over the other dimensions"
        )
    return value.sum(dtype=torch.float64)
