"""Micro-batches put together to optimizer steps, and how much each counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from srunddp.errors import ConfigError
from srunddp.train.data.sampler import MicroBatch, ShardAssignment
from srunddp.train.world import host_group

Step = tuple[list[MicroBatch], int, float]  # this rank's micro-batches, and the samples and the weight of all ranks


class StepGrouper:
    """Puts the micro-batches of an epoch together to steps.

    Where the samples are weighted, or a sharded data set decides how many there are, each step costs one all-reduce on
    the host group.
    """

    def __init__(
        self, assignment: ShardAssignment, accumulation: int, *, drop_last: bool, sharded: bool, weighted: bool
    ) -> None:
        """All ranks make it, with the same arguments.

        Args:
            assignment: of samples to the ranks.
            accumulation: micro-batches per step.
            drop_last: leave out steps that are not full on every rank.
            sharded: each rank has a stream of its own, which may be longer or shorter than the others'.
            weighted: micro-batches have weights that are not their samples.
        """
        self._accumulation, self._full = accumulation, accumulation * assignment.global_batch_size
        self._drop_last, self._sharded, self._weighted = drop_last, sharded, weighted
        self._ranks = assignment.world_size
        self._group = host_group() if (sharded or weighted) and self._ranks > 1 else None

    def steps(self, parts: Iterator[MicroBatch]) -> Iterator[Step]:
        """Of the micro-batches of this rank."""
        return self._of_shards(parts) if self._sharded else self._dealt(parts)

    def _dealt(self, parts: Iterator[MicroBatch]) -> Iterator[Step]:
        while step := list(itertools.islice(parts, self._accumulation)):
            samples = sum(part.total for part in step)
            if samples == self._full or not self._drop_last:
                yield step, samples, self._sums(step)[0] if self._weighted else float(samples)

    def _of_shards(self, parts: Iterator[MicroBatch]) -> Iterator[Step]:
        stand_in = MicroBatch(None, 0, 0)
        while True:
            step = list(itertools.islice(parts, self._accumulation))
            weight, *counts = self._sums(step)
            samples, number = int(sum(counts)), self._accumulation - counts.count(0.0)
            if number == 0 or (self._drop_last and samples < self._full):
                return
            if step:
                stand_in = MicroBatch(step[-1].samples, 0, 0)
            yield step + [stand_in] * (number - len(step)), samples, weight

    def _sums(self, step: list[MicroBatch]) -> list[float]:
        """Over ranks: the weight of the step, and the samples of each of its micro-batches."""
        weight = sum(_checked(part.weight) for part in step)
        own = [weight, *(part.own for part in step), *[0.0] * (self._accumulation - len(step))]
        if self._ranks == 1:
            return own
        sums = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(sums, group=self._group)
        return sums.tolist()


def _checked(weight: float | str) -> float:
    if isinstance(weight, str) or not 0 <= weight < math.inf:
        raise ConfigError(
            f"weight(batch) is {weight}",
            expected="a finite number of at least 0, or a tensor of no dimension with one",
            hint="let it return by how much the batch counts, such as the number of its tokens",
        )
    return weight
