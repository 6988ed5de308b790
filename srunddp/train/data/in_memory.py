"""What of a data set is known without reading from it, so that ranks can compare it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from srunddp.train.data.sampler import hashed


def checksum_of(data: Any) -> int:
    """Return a number within int64 that differs where ranks made different data sets in memory.

    It is of the indices of a subset, as a split without a seed has them, and of some samples of
    tensors and lists. Text does not count: a path may be another one on each node.

    A data set of the user's own is 0. To read from it here would open its files in this process,
    and draw its random numbers.
    """
    parts = list(_parts(data))
    return hashed(tuple(parts)) if parts else 0


def _parts(data: Any) -> Iterator[int]:
    match data:
        case TensorDataset():
            for tensor in data.tensors:
                yield from map(_number_of, _some(tensor))
        case Subset():
            yield hashed(torch.as_tensor(list(data.indices)).numpy().tobytes())
            yield from _parts(data.dataset)
        case ConcatDataset():
            for each in data.datasets:
                yield from _parts(each)
        case list() | tuple():
            yield from map(_number_of, _some(data))


def _some(samples: Sequence[Any] | Tensor) -> Iterator[Any]:
    """The first, two between, and the last."""
    count = len(samples)
    for index in sorted({0, count // 3, 2 * count // 3, count - 1}):
        if 0 <= index < count:
            yield samples[index]


def _number_of(value: Any) -> int:
    """Of the numbers in a sample; 0 of text and of whatever is unknown."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        return hashed(flat.view(torch.uint8).numpy().tobytes())
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # an array of numpy
        return hashed(value.tobytes())
    if isinstance(value, bool | int | float | complex):
        return hashed(value)
    if isinstance(value, Mapping):
        return hashed([_number_of(each) for each in value.values()])
    if isinstance(value, list | tuple):
        return hashed([_number_of(each) for each in value])
    return 0
