"""What of a data set is known without reading from it, so that ranks can compare it."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from srunddp.train.data.fingerprint import Fingerprint, fingerprint_of, some_indices


def fingerprint_in_memory(data: Any) -> Fingerprint | None:
    """Return what differs where ranks made different data sets in memory; None where that is not
    known.

    It is of the indices of a subset, as a split without a seed has them, and of some samples of
    tensors and lists. A data set of the user's own is not read: that would open its files in this
    process, and draw its random numbers.

    Args:
        data: The user's.
    """
    samples = list(_known(data))
    return fingerprint_of(samples) if samples else None


def _known(data: Any) -> Iterator[Any]:
    match data:
        case TensorDataset():
            for tensor in data.tensors:
                yield from _some(tensor)
        case Subset():
            # All indices as one array, which is hashed whole: a few of them could agree by chance.
            yield numpy.asarray(data.indices)
            yield from _known(data.dataset)
        case ConcatDataset():
            for each in _some(data.datasets):
                yield from _known(each)
        case list() | tuple():
            yield from _some(data)


def _some(samples: Sequence[Any] | Tensor) -> Iterator[Any]:
    """Yield the first sample, two between, and the last."""
    for index in some_indices(len(samples)):
        yield samples[index]
