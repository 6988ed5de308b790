"""Micro-batches put together to optimizer steps, and how much each counts."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from srunddp.errors import ConfigError
from srunddp.train.data.sampler import MicroBatch, ShardAssignment
from srunddp.train.world import host_group


class Batch(NamedTuple):
    """One rank's part of a micro-batch, on the device: its tensors, and what has a ``to(device)``.

    Attributes:
        data: what collate made of the samples; None on a rank of a sharded data set that never had
            one.
        samples: those of this rank that count; 0 where another rank's stand in.
        weight: theirs.
        scale: times the batch's mean loss; averaged over ranks and summed over the step's batches
            that is the mean over all weights of the step. It is ``weight * world_size`` by the sum
            of these, or 0 where that is 0.
    """

    data: Any
    samples: int
    weight: float
    scale: float


class StepBatches(NamedTuple):
    """The micro-batches of one optimizer step.

    Attributes:
        batches: of this rank; all ranks have equally many.
        samples: of all ranks and batches that count.
        weight: theirs.
        copied: when the batches are on the device; None where they are now.
    """

    batches: list[Batch]
    samples: int
    weight: float
    copied: torch.cuda.Event | None = None


def group_steps(
    parts: Iterator[MicroBatch], assignment: ShardAssignment, *, weighted: bool
) -> Iterator[StepBatches]:
    """The steps of this rank's micro-batches, still in the host's memory.

    Where a weight is not the number of samples, or a sharded data set decides how many there are,
    each step costs one all-reduce on the host group.
    """
    number = assignment.gradient_accumulation_steps
    ranks = assignment.world_size
    sharded = assignment.sharded
    last = MicroBatch(None, 0, 0)
    while True:
        step = list(itertools.islice(parts, number))
        count = len(step)
        samples = sum(part.total for part in step)
        whole = float(samples)
        if sharded or (weighted and step):
            whole, *counts = _sums(step, assignment)
            if sharded:
                samples = int(sum(counts))
                count = number - counts.count(0.0)
        if count == 0 or (assignment.drop_last and samples < number * assignment.global_batch_size):
            return
        last = step[-1] if step else last
        if len(step) < count:
            step += [last._replace(own=0, weight=0.0)] * (count - len(step))
        yield StepBatches([_batch(part, ranks, whole) for part in step], samples, whole)


def _batch(part: MicroBatch, ranks: int, whole: float) -> Batch:
    weight = float(part.weight)
    return Batch(part.samples, part.own, weight, weight * ranks / whole if whole else 0.0)


def _sums(step: list[MicroBatch], assignment: ShardAssignment) -> list[float]:
    """Over ranks: the weight of the step, and the samples of each of its micro-batches."""
    counts = [part.own for part in step] + [0] * (
        assignment.gradient_accumulation_steps - len(step)
    )
    own = [sum(_checked(part.weight) for part in step), *map(float, counts)]
    if assignment.world_size == 1:
        return own
    sums = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(sums, group=host_group())
    return sums.tolist()


def _checked(weight: float | str) -> float:
    if isinstance(weight, str) or not 0 <= weight < math.inf:
        raise ConfigError(
            f"weight(batch) is {weight}",
            expected="a finite number of at least 0, or a tensor of no dimension with one",
            hint="let it return by how much the batch counts, such as the number of its tokens",
        )
    return weight
