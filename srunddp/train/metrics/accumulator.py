"""Sums and counts over all ranks, divided once: never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from srunddp.errors import ConfigError
from srunddp.train.metrics.torchmetrics import TorchMetric, compute, is_stateful, reset_copy
from srunddp.train.world import World

PlainMetric: TypeAlias = Callable[[Tensor, Tensor], Tensor | float]
"""``metric(outputs, targets)``: one value per sample, or their sum; not their mean."""

Metric: TypeAlias = PlainMetric | TorchMetric
"""Or an object of torchmetrics: one of its metrics, or a collection of them."""

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``loss_function(outputs, targets)``: the mean over the batch, of no dimension."""


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the highest score is the target's class, else 0.

    Args:
        outputs: scores of shape (samples, classes, ...).
        targets: class indices of shape (samples, ...); of several per sample the share of right ones counts.
    """
    right = outputs.argmax(dim=1) == targets
    return right.flatten(1).double().mean(dim=1) if right.dim() > 1 else right


class MetricAccumulator:
    """The loss and the metrics over the samples of all ranks.

    All sums are float64: they add a float32 run's values, and counts, without a rounding that would depend on the order
    of ranks. A batch's loss comes in as its mean in the loss's own precision.
    """

    def __init__(self, metrics: Mapping[str, Metric], world: World, resumed: Sequence[Sequence[float]] = ()) -> None:
        """Start from nothing, or from what :meth:`by_rank` gave.

        Args:
            metrics: by name; those with a state are copied, so that other accumulators may have the same ones.
            world: the ranks to sum over.
            resumed: as of a checkpoint, of any number of ranks; metrics with a state start anew all the same.

        Raises:
            ConfigError: a metric with a state cannot be gathered from several ranks.
        """
        self._world = world
        self._plain: dict[str, PlainMetric] = {}
        self._stateful: dict[str, TorchMetric] = {}
        for name, metric in metrics.items():
            if is_stateful(metric):
                self._stateful[name] = reset_copy(name, metric, world)
            else:
                self._plain[name] = cast(PlainMetric, metric)
        self._has_metrics = bool(metrics)
        self._loss = LaggedLoss(world.device)
        self._totals = [torch.zeros((), dtype=torch.float64, device=world.device) for _ in self._plain]
        self._updated = False
        self._begin(resumed)

    def _begin(self, rows: Sequence[Sequence[float]]) -> None:
        """Take this rank's row, so that it goes on to add in the same order; of another world rank 0 takes all."""
        if len(rows) != self._world.world_size:
            rows = [[sum(column) for column in zip(*rows, strict=True)]]
        row = rows[self._world.rank] if self._world.rank < len(rows) else []
        if len(row) == 2 + len(self._totals):
            self._loss.total, self._loss.count = row[0], int(row[1])
            for total, value in zip(self._totals, row[2:], strict=True):
                total.fill_(value)

    def add(self, loss: Tensor, outputs: Any, targets: Any, samples: int) -> float | None:
        """Add a batch; nothing here waits for what the device computes now.

        Args:
            loss: the mean over the batch.
            outputs, targets: of the batch.
            samples: in it; 0 where they belong to another rank.

        Returns:
            The loss of the batch before; None at first.

        Raises:
            ConfigError: a metric gives neither a value per sample nor their sum.
        """
        if self._has_metrics and samples:
            self._add(outputs.detach() if isinstance(outputs, Tensor) else outputs, targets, samples)
        return self._loss.push(loss, samples)

    @torch.no_grad()
    def _add(self, outputs: Any, targets: Any, samples: int) -> None:
        self._updated = True
        for total, (name, metric) in zip(self._totals, self._plain.items(), strict=True):
            total.add_(_total(name, metric(outputs, targets), samples))
        for stateful in self._stateful.values():
            stateful.update(outputs, targets)

    def by_rank(self) -> list[list[float]]:
        """The sums of each rank so far, float64; a collective."""
        own = self._own()
        rows = [own.clone() for _ in range(self._world.world_size)]
        if self._world.world_size > 1:
            dist.all_gather(rows, own)
        return [row.tolist() for row in rows]

    def _own(self) -> Tensor:
        self._loss.flush()
        own = torch.tensor([self._loss.total, self._loss.count], dtype=torch.float64)
        return torch.cat([own.to(self._world.device), *(total.reshape(1) for total in self._totals)])

    def means(self) -> dict[str, float]:
        """Each total over all ranks by the samples of all ranks; a collective: one all-reduce, one wait.

        Metrics with a state take a gather and a broadcast besides.

        Returns:
            ``loss`` and the metrics; NaN for those of no sample at all.

        Raises:
            ConfigError: a metric with a state computes no number.
        """
        row = self._own()
        if self._world.world_size > 1:
            dist.all_reduce(row)
        loss, count, *totals = row.tolist()
        if not count:
            return dict.fromkeys(("loss", *self._plain, *self._stateful), math.nan)
        figures = {name: total / count for name, total in zip(("loss", *self._plain), (loss, *totals), strict=True)}
        if self._stateful:
            figures |= compute(self._stateful, self._updated, self._world)
        return figures


def _total(name: str, value: Tensor | float, samples: int) -> Tensor | float:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.dim() != 1 or len(value) != samples:
        raise ConfigError(
            f"metric {name!r} returned shape {tuple(value.shape)} for {samples} samples",
            expected="one value per sample, or their sum",
            hint="reduce over the other dimensions",
        )
    return value.sum(dtype=torch.float64)


class LaggedLoss:
    """Reads each loss when the next one comes, and sums them.

    On a GPU the loss is copied to page-locked memory behind the step's work, while the next step is prepared already.
    A push waits, at most, for the step before: with ``push`` called last in a step, the GPU has work to do then.

    Attributes:
        total: the sum of ``loss * samples`` over the losses read so far, in float64.
        count: their samples.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: where the losses will be."""
        self.total = 0.0
        self.count = 0
        self._copy = _PinnedCopy() if device.type == "cuda" else _HostCopy()
        self._samples = 0

    def push(self, loss: Tensor, samples: int) -> float | None:
        """Take a step's loss, and read the one before.

        Args:
            loss: the mean over its samples, of no dimension.
            samples: that it counts for; may be 0.

        Returns:
            The loss that was pushed before; None at first.
        """
        before = self._add(self._copy.swap(loss))
        self._samples = samples
        return before

    def flush(self) -> float | None:
        """Read the last loss, waiting for its step; None where it has been read already."""
        return self._add(self._copy.last())

    def _add(self, loss: float | None) -> float | None:
        if loss is not None:
            self.total += loss * self._samples
            self.count += self._samples
        return loss


class _HostCopy:
    """On the CPU the loss is there when it is pushed, and reading it waits for nothing."""

    _value: float | None = None

    def swap(self, loss: Tensor) -> float | None:
        """Take a loss; the one before, if that was not read by :meth:`last`."""
        before, self._value = self._value, loss.item()
        return before

    def last(self) -> float | None:
        """Read the loss that was taken last; None where there is none, or it was read."""
        last, self._value = self._value, None
        return last


class _PinnedCopy(_HostCopy):
    """Two page-locked numbers in turn, each with an event that says when its copy is there."""

    def __init__(self) -> None:
        # Waits without spinning: the core is the loader workers' meanwhile.
        self._events = tuple(torch.cuda.Event(blocking=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._slots: tuple[Tensor, ...] = ()
        self._turn = 0
        self._pending = False

    def swap(self, loss: Tensor) -> float | None:
        loss = loss.detach()
        if not self._slots:
            self._slots = tuple(torch.empty((), dtype=loss.dtype, pin_memory=True) for _ in self._events)
        self._turn = 1 - self._turn
        self._slots[self._turn].copy_(loss, non_blocking=True)
        self._events[self._turn].record()
        before = self._read(1 - self._turn) if self._pending else None
        self._pending = True
        return before

    def last(self) -> float | None:
        if not self._pending:
            return None
        self._pending = False
        return self._read(self._turn)

    def _read(self, turn: int) -> float:
        self._events[turn].synchronize()
        return float(self._slots[turn])
