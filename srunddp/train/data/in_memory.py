"""Fingerprints of data sets that are in memory, which ranks can compare without reading samples."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from srunddp.train.data.fingerprint import Fingerprint, fingerprint_of, some_indices


def fingerprint_in_memory(data: Any) -> Fingerprint | None:
    """Return a fingerprint of the parts of a data set that are in memory; None if there are none.

    These parts are the indices of a subset, which differ between ranks after a split without a
    seed, and some samples of tensors and lists. A data set of a class of the user is not read,
    because that would open its files in this process and draw random numbers.

    Args:
        data: The user's data set.
    """
    samples = list(_known(data))
    return fingerprint_of(samples) if samples else None


def _known(data: Any) -> Iterator[Any]:
    match data:
        case TensorDataset():
            for tensor in data.tensors:
                yield from _some(tensor)
        case Subset():
            # Yield all indices as one array, of which one hash is made: some of them could be the
            # same by chance.
            yield numpy.asarray(data.indices)
            yield from _known(data.dataset)
        case ConcatDataset():
            for each in _some(data.datasets):
                yield from _known(each)
        case list() | tuple():
            yield from _some(data)


def _some(samples: Sequence[Any] | Tensor) -> Iterator[Any]:
    """Yield the first sample, the last, and two in between."""
    for index in some_indices(len(samples)):
        yield samples[index]
