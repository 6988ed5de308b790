"""Computes the means of the loss and the metrics from sums over all ranks, which are divided once
by the sum of the weights, so that no mean of means is taken.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from srunddp.errors import ConfigError
from srunddp.train.metrics.torchmetrics import TorchMetric, compute, is_stateful, reset_copy
from srunddp.train.world import World

PlainMetric: TypeAlias = Callable[[Any, Any], Tensor | int]
"""``metric(outputs, targets)``: one value per sample, of shape (samples,); or a count, an integer
scalar.
"""

Metric: TypeAlias = PlainMetric | TorchMetric
"""``metric(outputs, targets)``, which returns one value per sample or a count; or a metric or
collection of torchmetrics.
"""


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return, for each sample, 1 if the target's class has the highest score, else 0.

    Args:
        outputs: Scores of shape (samples, classes, ...).
        targets: Class indices of shape (samples, ...). With several per sample, the result is the
            share of correct ones.

    Returns:
        A tensor of shape (samples,).

    Raises:
        ConfigError: The shapes do not match, for example with one score per sample, or with classes
            as the last dimension; or one of the two is no tensor.
    """
    for name, value in {"outputs": outputs, "targets": targets}.items():
        # A step of the script may return outputs of any type. If a batch is not a pair, the targets
        # may be the batch itself.
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"accuracy of {name} of type {type(value).__name__}",
                expected="a tensor",
                hint="take it out in a metric of your own, such as"
                ' lambda outputs, batch: accuracy(outputs, batch["label"])',
            )
    # Scores of one dimension have no classes, and are refused below with a hint.
    found = outputs.argmax(dim=1) if outputs.dim() > 1 else outputs
    if found.shape != targets.shape or outputs.dim() < 2 or outputs.shape[1] < 2:
        shapes = (
            f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
        )
        expected = "(samples, classes, ...) and (samples, ...), at least two classes"
        if targets.shape == outputs.shape and outputs.dim() > 1:
            hint = (
                "for targets that are mixed in training, as by MixUp, pass the metric as one of"
                " val_metrics"
            )
        else:
            hint = (
                "for one score per sample pass lambda outputs, targets: (outputs > 0) == targets,"
                " flattened; for a language model pass outputs.transpose(1, 2)"
            )
        raise ConfigError(f"accuracy of {shapes}", expected=expected, hint=hint)
    right = found == targets
    if right.dim() > 1:
        return right.flatten(1).double().mean(dim=1)
    return right


class MetricAccumulator:
    """Accumulates the loss and the metrics over the batches of all ranks.

    All sums are float64, so that values of a float32 run, and counts, add up without rounding that
    would depend on the order of ranks. Of each batch the mean loss is added, in the precision of
    the loss. The sums stay on the device, and only :meth:`means` and :meth:`by_rank` wait until the
    device has computed them.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], world: World, resumed: Sequence[Sequence[float]] = ()
    ) -> None:
        """Start from zero, or from the result of :meth:`by_rank`.

        Args:
            metrics: The metrics by name; those with a state are copied, so that other accumulators
                may use the same metrics.
            world: The ranks to sum over.
            resumed: The result of :meth:`by_rank`, of any number of ranks, for example from a
                checkpoint; empty to start from zero. Metrics with a state always start from zero.

        Raises:
            ConfigError: The state of a metric cannot be gathered from several ranks.
        """
        self._world = world
        self._stateful = {
            name: reset_copy(name, each, world)
            for name, each in metrics.items()
            if is_stateful(each)
        }
        self._plain = {
            name: cast(PlainMetric, each)
            for name, each in metrics.items()
            if name not in self._stateful
        }
        self._updated = False
        self._weight = 0.0
        self._samples = 0
        # The sum of the loss, then for each metric the sum of its values per sample and the sum of
        # its counts. A metric returns only one of the two, so its other sum stays 0.
        self._sums = torch.zeros(1 + 2 * len(self._plain), dtype=torch.float64, device=world.device)
        self._loss = self._sums[0]
        self._values = self._sums[1::2]
        self._counts = self._sums[2::2]
        # Create this zero only once, because a copy from the host to a GPU waits for the GPU.
        self._zero = torch.zeros(1, device=world.device)
        self._begin(resumed)

    def _begin(self, rows: Sequence[Sequence[float]]) -> None:
        """Continue from the rows of :meth:`by_rank`.

        Each rank continues with its own row, so that sums are the same to the last bit as without a
        stop. If the number of ranks has changed, rank 0 continues with the sum of all rows, and the
        other ranks start from zero.
        """
        if len(rows) != self._world.world_size:
            rows = [[sum(column) for column in zip(*rows, strict=True)]]
        if self._world.rank < len(rows):
            row = rows[self._world.rank]
        else:
            row = []
        # If the script has other metrics now, the row has another length: the figures of the epoch
        # then start from zero.
        if len(row) == 2 + len(self._sums):
            self._weight = row[0]
            self._samples = int(row[1])
            self._sums.copy_(torch.tensor(row[2:], dtype=torch.float64))

    def add(self, loss: Tensor, outputs: Any, targets: Any, *, samples: int, weight: float) -> None:
        """Add a batch.

        Args:
            loss: The mean loss of the batch, a scalar.
            outputs: The outputs of the batch, for the metrics.
            targets: The targets of the batch, for the metrics.
            samples: The number of samples that count on this rank; 0 if the batch has only samples
                of another rank.
            weight: The weight of the batch's mean loss. With 0 the samples count in the metrics,
                but the loss, which may be NaN, does not count.

        Raises:
            ConfigError: A metric returned neither a value per sample nor a count.
        """
        self._samples += samples
        # Do not multiply by 0: the mean over no labels is NaN, and NaN times 0 is NaN too.
        if weight:
            self._weight += weight
            self._loss.add_(loss.detach(), alpha=weight)
        if self.needs_outputs(samples):
            # Detach the outputs: otherwise a metric that keeps them would keep the graph of each
            # batch in memory.
            if isinstance(outputs, Tensor):
                outputs = outputs.detach()
            self._add(outputs, targets, samples)

    def needs_outputs(self, samples: int) -> bool:
        """Return whether metrics need the outputs of a batch, whatever the weight of the batch.

        A batch has weight 0 if, for example, all of its labels are ignored. Its samples count in
        the metrics all the same: which samples share a batch depends on the number of ranks, and
        the results of metrics must not depend on it.

        Args:
            samples: The number of this rank's samples in the batch.
        """
        return bool(samples and (self._plain or self._stateful))

    @torch.no_grad()
    def _add(self, outputs: Any, targets: Any, samples: int) -> None:
        self._updated = True
        rows = []
        for index, (name, metric) in enumerate(self._plain.items()):
            value = metric(outputs, targets)
            if _is_count(name, value, samples):
                self._counts[index].add_(value)
                # The count is added. Put zeros into the metric's row of values, because one
                # operation sums the rows of all metrics.
                value = self._zero.expand(samples)
            rows.append(cast(Tensor, value))
        if rows:
            self._values.add_(_sum_rows(rows, self._world.device))
        for stateful in self._stateful.values():
            stateful.update(outputs, targets)

    def by_rank(self) -> list[list[float]]:
        """Return the sums of each rank so far, for a checkpoint; a collective.

        Returns:
            One row per rank: the weight, the number of samples, then the sums. Metrics with a state
            are not included.
        """
        own = self._own()
        rows = [own.clone() for _ in range(self._world.world_size)]
        if self._world.world_size > 1:
            dist.all_gather(rows, own)
        return [row.tolist() for row in rows]

    def _own(self) -> Tensor:
        host = torch.tensor([self._weight, self._samples], dtype=torch.float64)
        return torch.cat([host.to(self._world.device), self._sums])

    def means(self) -> dict[str, float]:
        """Compute the means over all ranks; a collective.

        The loss and counts are divided by the sum of the weights, values per sample by the number
        of samples. This takes one all-reduce, and one wait for the device. Metrics with a state are
        gathered on rank 0, which computes them.

        Returns:
            ``loss`` and the metrics by name; NaN for those without any sample.

        Raises:
            ConfigError: A metric with a state did not compute a number.
        """
        row = self._own()
        if self._world.world_size > 1:
            dist.all_reduce(row)
        weight, samples, loss, *sums = row.tolist()
        figures = {"loss": loss / weight if weight else math.nan}
        for name, values, counts in zip(self._plain, sums[::2], sums[1::2], strict=True):
            if not samples:
                figures[name] = math.nan
                continue
            # A metric returns either values per sample or counts, so one of its two sums is 0.
            figures[name] = values / samples
            if weight:
                figures[name] += counts / weight
        if self._stateful:
            figures |= compute(self._stateful, self._updated, self._world)
        return figures


def _sum_rows(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of each row, in float64.

    Stack the rows and sum them in two operations: on a GPU, launching an operation for each row
    would cost more than summing a small row.
    """
    if len(rows) == 1:
        return rows[0].sum(dtype=torch.float64)
    if len({row.dtype for row in rows}) == 1:
        kind = rows[0].dtype
    else:
        kind = torch.float64
    return torch.stack([row.to(device, kind) for row in rows]).sum(dim=1, dtype=torch.float64)


def _is_count(name: str, value: Tensor | int, samples: int) -> bool:
    """Return True if a metric's value is a count, and False if it is one value per sample.

    Raises:
        ConfigError: The value is neither.
    """
    if isinstance(value, Tensor) and value.dim() == 1 and len(value) == samples:
        return False
    if isinstance(value, int) or (
        isinstance(value, Tensor) and not value.dim() and not value.is_floating_point()
    ):
        return True
    if isinstance(value, Tensor):
        found = f"shape {tuple(value.shape)}, {value.dtype}"
    else:
        found = repr(value)
    raise ConfigError(
        f"metric {name!r} returned {found} for {samples} samples",
        expected=f"one value per sample, of shape ({samples},), or a count, an integer",
        hint="leave out mean() or sum(): the mean over all batches and ranks is taken here",
    )
