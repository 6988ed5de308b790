"""Micro-batches put together to optimizer steps, and how much each counts."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from srunddp.errors import ConfigError
from srunddp.train.data.sampler import MicroBatch, ShardAssignment
from srunddp.train.world import host_group


class Batch(NamedTuple):
    """One rank's part of a micro-batch, on the device: its tensors, and what has a ``to(device)``.

    Attributes:
        data: What collate made of the samples; None on a rank of a sharded data set that never had
            one.
        samples: How many of this rank's count; 0 where another rank's stand in.
        weight: Of these samples: their number, or what the user's function says.
        scale: The batch's mean loss is multiplied by it before the backward pass. Averaged over
            ranks and summed over the step's batches, that is the mean over all weights of the step.
            It is ``weight * world_size`` divided by the sum of these weights, or 0 where that is 0.
    """

    data: Any
    samples: int
    weight: float
    scale: float


class StepBatches(NamedTuple):
    """The micro-batches of one optimizer step.

    Attributes:
        batches: Of this rank; all ranks have equally many.
        samples: How many count, of all ranks and batches.
        weight: The sum of the weights of all ranks and batches.
        copied: Comes when the batches are on the device; None where they are there now.
    """

    batches: list[Batch]
    samples: int
    weight: float
    copied: torch.cuda.Event | None = None


def group_steps(
    parts: Iterator[MicroBatch], assignment: ShardAssignment, *, weighted: bool
) -> Iterator[StepBatches]:
    """Put this rank's micro-batches, still in the host's memory, together to steps.

    Where a weight is not the number of samples, or a sharded data set decides how many there are,
    each step costs one all-reduce on the host group.

    Args:
        parts: This rank's micro-batches of an epoch, or of what is left of it.
        assignment: How many micro-batches make a step, and whether the last step may be smaller.
        weighted: Whether a weight is something else than the number of samples.

    Yields:
        Steps with equally many micro-batches on all ranks.

    Raises:
        ConfigError: A weight is no finite number of at least 0.
    """
    accumulation = assignment.gradient_accumulation_steps
    full = accumulation * assignment.global_batch_size
    latest = MicroBatch(None, 0, 0)
    while True:
        step = list(itertools.islice(parts, accumulation))
        size = _size_over_ranks(step, assignment, weighted=weighted)
        if size.batches == 0:
            return
        if assignment.drop_last and size.samples < full:
            return
        if step:
            latest = step[-1]
        # All ranks have to run equally many forward and backward passes, or those with more would
        # wait for ever. A rank whose shard has ended runs its latest micro-batch again, which does
        # not count.
        missing = size.batches - len(step)
        step += [latest._replace(own=0, weight=0.0)] * missing
        batches = [_batch(part, assignment.world_size, size.weight) for part in step]
        yield StepBatches(batches, size.samples, size.weight)


class _StepSize(NamedTuple):
    """What a step comes to over all ranks.

    Attributes:
        batches: Micro-batches of the rank that has the most.
        samples: How many count.
        weight: The sum of their weights.
    """

    batches: int
    samples: int
    weight: float


def _size_over_ranks(
    step: Sequence[MicroBatch], assignment: ShardAssignment, *, weighted: bool
) -> _StepSize:
    if assignment.sharded:
        # Each rank knows its own part alone.
        weight, *counts = _sums(step, assignment)
        batches = sum(1 for count in counts if count)
        return _StepSize(batches, int(sum(counts)), weight)
    samples = sum(part.total for part in step)
    # Data that all ranks read is dealt so that all have a micro-batch or none has: they come to
    # this all-reduce together, or leave it out together.
    if weighted and step:
        weight, *_ = _sums(step, assignment)
    else:
        weight = float(samples)
    return _StepSize(len(step), samples, weight)


def _batch(part: MicroBatch, ranks: int, weight_of_step: float) -> Batch:
    weight = float(part.weight)
    if weight_of_step:
        scale = weight * ranks / weight_of_step
    else:
        scale = 0.0
    return Batch(part.samples, part.own, weight, scale)


def _sums(step: Sequence[MicroBatch], assignment: ShardAssignment) -> list[float]:
    """Return the weight of the step over all ranks, and the samples of each of its micro-batches.

    A collective of the host group, as the batches are still in the host's memory: a sum on the GPU
    would wait for what it computes of the step before.
    """
    weight = sum(_checked(part.weight) for part in step)
    counts = [0.0] * assignment.gradient_accumulation_steps
    for number, part in enumerate(step):
        counts[number] = float(part.own)
    if assignment.world_size == 1:
        return [weight, *counts]
    # float32 has no room for a number of tokens above 2**24.
    sums = torch.tensor([weight, *counts], dtype=torch.float64)
    dist.all_reduce(sums, group=host_group())
    return sums.tolist()


def _checked(weight: float | str) -> float:
    # A text is what a worker found instead of a number: it says it here, where an error of the
    # user's can be shown as one line.
    if isinstance(weight, str) or not 0 <= weight < math.inf:
        raise ConfigError(
            f"weight(batch) is {weight}",
            expected="a finite number of at least 0, or a tensor of no dimension with one",
            hint="let it return by how much the batch counts, such as the number of its tokens",
        )
    return weight
