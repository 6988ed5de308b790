"""Ranks that made different data sets of what they were given are told, without reading from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from srunddp.train.data.in_memory import fingerprint_in_memory
from srunddp.train.data.loader import DistributedDataLoader
from tests.support.facts import tells
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import classes, message


class Own(Dataset[Any]):
    """A user's, of which nothing is read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise AssertionError


def tensors(number: float = 1.0) -> TensorDataset:
    return TensorDataset(torch.full((9, 2), number), torch.arange(9))


DATA: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "tensors": (tensors, lambda: tensors(2.0)),
    "halves": (
        lambda: TensorDataset(torch.ones(9, dtype=torch.bfloat16)),
        lambda: TensorDataset(torch.zeros(9, dtype=torch.bfloat16)),
    ),
    "a split": (lambda: Subset(tensors(), range(4)), lambda: Subset(tensors(), [0, 1, 2, 4])),
    "a split of one's own": (lambda: Subset(Own(), [1, 2]), lambda: Subset(Own(), [2, 1])),
    "several": (
        lambda: ConcatDataset([tensors(), tensors()]),
        lambda: ConcatDataset([tensors(), tensors(2.0)]),
    ),
    "a list of arrays": (
        lambda: [(numpy.ones(3), "a path", 1)] * 9,
        lambda: [(numpy.zeros(3), "a path", 1)] * 9,
    ),
    "a list of mappings": (
        lambda: [{"tokens": [1, 2], "text": "a"}] * 9,
        lambda: [{"tokens": [2, 1], "text": "a"}] * 9,
    ),
}


@pytest.mark.parametrize("kind", DATA)
def test_other_numbers_have_another_checksum(kind: str) -> None:
    first, other = DATA[kind]
    assert fingerprint_in_memory(first()) == fingerprint_in_memory(first())
    assert fingerprint_in_memory(first()) != fingerprint_in_memory(other())


@pytest.mark.parametrize("data", [Own(), [], TensorDataset(torch.ones(0, 3))])
def test_what_is_not_in_memory_is_not_compared(data: Any) -> None:
    assert fingerprint_in_memory(data) is None


def test_text_does_not_count() -> None:
    """It may be a path of this node."""
    assert fingerprint_in_memory([("/scratch/1", 3)] * 4) == fingerprint_in_memory(
        [("/scratch/2", 3)] * 4
    )


def split_without_a_seed(world: LocalWorld, differs: bool) -> str:
    generator = torch.Generator().manual_seed(world.rank if differs else 0)
    train, _ = torch.utils.data.random_split(classes(32), [24, 8], generator)
    return message(lambda: DistributedDataLoader(train, world, batch_size=4))


@pytest.mark.parametrize("differs", [True, False])
def test_a_split_that_differs_between_ranks_is_refused(differs: bool, tmp_path: Path) -> None:
    for text in run_ranks(2, tmp_path, split_without_a_seed, differs):
        if differs:
            assert tells(text, "samples of data differ between ranks", "; expected ")
        else:
            assert text == "no error"
