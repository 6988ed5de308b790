"""Groups micro-batches into optimizer steps, and computes how much each micro-batch counts."""

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
    """One rank's part of a micro-batch. Tensors, and objects with a ``to(device)``, are on the
    device.

    Attributes:
        data: The output of collate; None on a rank of a sharded data set that never had a sample.
        samples: How many samples of this rank count; 0 if a sample of another rank stands in.
        weight: The weight of the samples: their number, or the result of the user's function.
        scale: A factor for the batch's mean loss before the backward pass: the scaled losses,
            averaged over ranks and summed over the step's batches, are the weighted mean of the
            step. The factor is ``weight * world_size`` divided by the sum of all weights of the
            step, or 0 if that sum is 0.
    """

    data: Any
    samples: int
    weight: float
    scale: float


class StepBatches(NamedTuple):
    """The micro-batches of one optimizer step.

    Attributes:
        batches: The batches of this rank; all ranks have equally many.
        samples: How many samples count, over all ranks and batches.
        weight: The sum of the weights over all ranks and batches.
        copied: A CUDA event that is recorded once the batches are on the device; None if nothing
            has to wait for a copy.
    """

    batches: list[Batch]
    samples: int
    weight: float
    copied: torch.cuda.Event | None = None


def group_steps(
    parts: Iterator[MicroBatch], assignment: ShardAssignment, *, weighted: bool
) -> Iterator[StepBatches]:
    """Group this rank's micro-batches, which are still in the host's memory, into steps.

    If weights are not numbers of samples, or the data set is sharded, this makes an all-reduce on
    the host group for each step.

    Args:
        parts: This rank's micro-batches of an epoch, or of the rest of one.
        assignment: Says how many micro-batches make a step, and whether the last step may be
            smaller.
        weighted: Whether weights are something other than numbers of samples.

    Yields:
        Steps with equally many micro-batches on all ranks.

    Raises:
        ConfigError: A weight is not a finite number of at least 0.
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
        # All ranks have to run equally many forward and backward passes, or the ranks with more
        # passes would wait forever. So a rank whose shard has ended runs its last micro-batch
        # again, with weight 0.
        missing = size.batches - len(step)
        step += [latest._replace(own=0, weight=0.0)] * missing
        batches = [_batch(part, assignment.world_size, size.weight) for part in step]
        yield StepBatches(batches, size.samples, size.weight)


class _StepSize(NamedTuple):
    """The size of a step over all ranks.

    Attributes:
        batches: The number of micro-batches on the rank that has the most.
        samples: How many samples count, over all ranks.
        weight: The sum of the weights over all ranks.
    """

    batches: int
    samples: int
    weight: float


def _size_over_ranks(
    step: Sequence[MicroBatch], assignment: ShardAssignment, *, weighted: bool
) -> _StepSize:
    if assignment.sharded:
        # Ask all ranks, because each rank knows only its own part of the step.
        weight, *counts = _sums(step, assignment)
        batches = sum(1 for count in counts if count)
        return _StepSize(batches, int(sum(counts)), weight)
    samples = sum(part.total for part in step)
    # Data that all ranks read is dealt so that either all ranks have a micro-batch or none has. So
    # either all ranks take part in the all-reduce of _sums(), or none does.
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
    """Return the weight of a step, then for each of its micro-batches the number of samples, over
    all ranks; a collective of the host group.

    A sum on the GPU instead would wait until the GPU has computed the previous step.
    """
    weight = sum(_checked(part.weight) for part in step)
    counts = [0.0] * assignment.gradient_accumulation_steps
    for number, part in enumerate(step):
        counts[number] = float(part.own)
    if assignment.world_size == 1:
        return [weight, *counts]
    # Use float64: above 2**24, float32 cannot hold every number of tokens.
    sums = torch.tensor([weight, *counts], dtype=torch.float64)
    dist.all_reduce(sums, group=host_group())
    return sums.tolist()


def _checked(weight: float | str) -> float:
    # The weight is a text if a worker got something else than a number; the text says what. Raise
    # the error here, in the rank, where a user's mistake can be shown as one line.
    if isinstance(weight, str) or not 0 <= weight < math.inf:
        raise ConfigError(
            f"weight(batch) is {weight}",
            expected="a finite number of at least 0, or a tensor of no dimension with one",
            hint="let it return by how much the batch counts, such as the number of its tokens",
        )
    return weight
