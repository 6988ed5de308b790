"""Ranks that were given different data are told; those whose data draws numbers of its own are
not. What is read for that changes nothing.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset

from srunddp.train import DistributedDataLoader
from srunddp.train.data.fingerprint import fingerprint_of
from tests.train.data.test_loader import Augmented, RandomStream, loader_of
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import message, trainer_of

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Item:
    x: Any
    path: str


class Made(Dataset[Any]):
    """Samples that a function of the index makes."""

    def __init__(self, make: Callable[[int], Any], samples: int = 9) -> None:
        self.make = make
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class MadeInBatches(Made):
    """As those of Hugging Face are read."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(index) for index in indices]


class MadeStream(IterableDataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(9))


class Words(Dataset[Any]):
    """With a vocabulary in the order of a set, which differs between processes."""

    def __init__(self, rank: int) -> None:
        self.texts = ["a b", "b c", "c d", "d a"]
        words = ["a", "b", "c", "d"]
        self.vocabulary = {word: number for number, word in enumerate(words[rank:] + words[:rank])}

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.vocabulary[word] for word in self.texts[index].split()])


class Split(Dataset[Any]):
    """The training part of data that it splits by random numbers without a seed."""

    def __init__(self, rank: int) -> None:
        self.rows = numpy.random.default_rng(rank).permutation(90)[:60]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = int(self.rows[index])
        return torch.full((3,), row / 90), f"/data/{row}"


def image(number: int) -> Any:
    return Image.fromarray(numpy.full((8, 8, 3), number, dtype=numpy.uint8))


def objects(*values: Any) -> Any:
    array = numpy.empty(len(values), dtype=object)
    array[:] = values
    return array


DIFFERENT: dict[str, Callable[[int], Any]] = {
    "a vocabulary": Words,
    "a split": Split,
    "classes by number": lambda rank: Made(lambda index: (torch.ones(3), (index + rank) % 3)),
    "one sample": lambda rank: Made(lambda index: torch.tensor(rank), 1),
    "two samples": lambda rank: Made(lambda index: torch.tensor(index * rank), 2),
    "three samples": lambda rank: Made(lambda index: torch.tensor(index * rank), 3),
    "a number": lambda rank: Made(lambda index: index + rank),
    "a floating-point number": lambda rank: Made(lambda index: index + 0.1 * rank),
    "a mapping": lambda rank: Made(lambda index: {"x": torch.tensor(index + rank), "text": "a"}),
    "a named tuple": lambda rank: Made(lambda index: Pair(torch.ones(2), [index, rank])),
    "a dataclass": lambda rank: Made(lambda index: Item(numpy.ones(2) * rank, "a")),
    "numpy's numbers": lambda rank: Made(lambda index: numpy.int64(index + rank)),
    "an array of objects": lambda rank: Made(lambda index: objects("a", numpy.ones(2) + rank)),
    "an image": lambda rank: Made(lambda index: (image(50 * rank), 1)),
    "bfloat16": lambda rank: Made(lambda index: torch.ones(20, dtype=torch.bfloat16) + rank),
    "complex numbers": lambda rank: Made(lambda index: torch.ones(20) + rank * 1j),
    "read in batches": lambda rank: MadeInBatches(lambda index: index * 2 + rank),
    "a part": lambda rank: Subset(Made(lambda index: index + rank), [1, 2, 3]),
    "a stream": lambda rank: MadeStream(lambda index: torch.tensor(2 * index + rank)),
    "a stream of text": lambda rank: MadeStream(lambda index: f"text {2 * index + rank}"),
    "a stream of bytes": lambda rank: MadeStream(lambda index: {"jpg": b"%d" % (index + rank)}),
    "a stream's later samples": lambda rank: MadeStream(lambda index: index and rank),
}


def own_flip(chance: float) -> Callable[[int], Any]:
    """Augments by a generator of its own, as albumentations does."""
    generator = numpy.random.default_rng()
    return lambda index: -1.0 - index if generator.random() < chance else 1.0 + index


class Broken(Made):
    """A sample that the order never comes to cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            raise OSError
        return torch.tensor(index)


def mapping_in_the_order_of(names: list[str]) -> Callable[[int], Any]:
    return lambda index: {name: len(name) for name in names}


def noise_of_rounding(rank: int) -> torch.Tensor:
    values = torch.linspace(-1, 1, 3000)
    return values * (1 + 1e-6 * rank) + 1e-7 * rank


HEALTHY: dict[str, Callable[[int], Any]] = {
    "torch's, Python's and numpy's random numbers": lambda rank: Augmented(9),
    "own random numbers": lambda rank: Made(own_flip(0.5)),
    "own random numbers now and then": lambda rank: Made(own_flip(0.1)),
    "own random numbers of each rank": lambda rank: Made(
        partial_draw(numpy.random.default_rng(rank))
    ),
    "own random numbers in a stream": lambda rank: MadeStream(own_flip(0.5)),
    "a stream in a random order": lambda rank: RandomStream(9),
    "text": lambda rank: Made(lambda index: f"text of {rank}"),
    "a path on each node": lambda rank: Made(lambda index: (index, f"/scratch/{rank}/{index}")),
    "a stream of paths": lambda rank: MadeStream(lambda index: (index, f"/tmp/{rank}/{index}")),
    "keys in another order": lambda rank: Made(
        mapping_in_the_order_of(["a", "bb"] if rank else ["bb", "a"])
    ),
    "another processor's rounding": lambda rank: Made(lambda index: noise_of_rounding(rank)),
    "a sample that one rank cannot read": lambda rank: (
        Broken(lambda index: index) if rank else Made(torch.tensor)
    ),
}


def partial_draw(generator: numpy.random.Generator) -> Callable[[int], Any]:
    return lambda index: float(generator.random()) + index


class NoFirst:
    """An order without the sample 0."""

    def __len__(self) -> int:
        return 8

    def indices(self, epoch: int) -> torch.Tensor:
        return torch.arange(1, 9)


def read_all(
    world: LocalWorld, cases: dict[str, Callable[[int], Any]], workers: int
) -> dict[str, str]:
    found = {}
    for name, make in cases.items():
        data = make(world.rank)
        options: dict[str, Any] = {
            "num_workers": workers,
            "persistent_workers": workers == 2,
            "collate": list,
            "batch_size": 2,
        }
        if isinstance(data, Broken) or name == "a sample that one rank cannot read":
            options["order"] = NoFirst()

        def read(data: Any = data, options: Any = options) -> None:
            loader = loader_of(data, world, **options)
            for _ in range(2):
                assert sum(step.samples for step in loader.steps()) > 0

        found[name] = message(read)
    return found


def different(world: LocalWorld, workers: int) -> dict[str, str]:
    return read_all(world, chosen(DIFFERENT, workers), workers)


def healthy(world: LocalWorld, workers: int) -> dict[str, str]:
    return read_all(world, chosen(HEALTHY, workers), workers)


def chosen(cases: dict[str, Callable[[int], Any]], workers: int) -> dict[str, Callable[[int], Any]]:
    """All are read by the rank, and some of each kind by workers."""
    some = ("a vocabulary", "read in batches", "a stream", "own random numbers", "in a stream")
    return {name: make for name, make in cases.items() if not workers or name.endswith(some)}


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (2, 2), (3, 1)])
def test_ranks_with_different_data_are_told(ranks: int, workers: int, tmp_path: Path) -> None:
    for found in run_ranks(ranks, tmp_path, different, workers):
        for name, text in found.items():
            assert text.startswith("the samples of data differ between ranks; expected "), name
            assert ("sharded=True" in text) == ("stream" in name)


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (2, 2), (3, 1)])
def test_nothing_is_said_of_data_that_is_the_same_or_random(
    ranks: int, workers: int, tmp_path: Path
) -> None:
    for found in run_ranks(ranks, tmp_path, healthy, workers):
        assert set(found.values()) == {"no error"}, found


def epochs(loader: DistributedDataLoader, number: int) -> list[Any]:
    """One epoch read so many times, each from the same random numbers on."""
    found = []
    for _ in range(number):
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
        loader.set_epoch(1)
        batches = [batch.data.tolist() for batch in loader]
        found.append([batches, torch.rand(()).item(), random.random(), numpy.random.randn()])
    return found


def epochs_of(world: LocalWorld, workers: int) -> list[Any]:
    return [
        epochs(loader_of(data(18), world, num_workers=workers), 2)
        for data in (Augmented, RandomStream)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_of_an_epoch_are_as_without_the_look(workers: int, tmp_path: Path) -> None:
    """Only in the first of the two were some samples of a data set with indices looked at."""
    for kinds in run_ranks(2, tmp_path, epochs_of, workers):
        for first, second in kinds:
            assert first == second


class Counting(Made):
    """Notes what is read."""

    def __init__(self) -> None:
        super().__init__(torch.tensor, 8)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def reads(world: LocalWorld) -> list[int]:
    data = Counting()
    loader = loader_of(data, world)
    counts = []
    for _ in range(3):
        list(loader)
        counts.append(len(data.read))
        data.read.clear()
    return counts


def test_a_few_samples_are_read_once_more_and_none_alone(tmp_path: Path) -> None:
    assert reads(LocalWorld()) == [8, 8, 8]
    for first, *others in run_ranks(2, tmp_path, reads):
        assert 4 < first <= 4 + 5
        assert others == [4, 4]


def fit(world: LocalWorld, differs: str) -> str:
    def data(name: str) -> Any:
        number = world.rank if name == differs else 0
        return Made(lambda index: (torch.full((8,), 1.0 + number), index % 4))

    return message(lambda: trainer_of(world=world).fit(data("train_data"), data("val_data")))


@pytest.mark.parametrize("differs", ["train_data", "val_data"])
def test_fit_says_which_data_differ(differs: str, tmp_path: Path) -> None:
    for text in run_ranks(2, tmp_path, fit, differs):
        assert text.startswith(f"the samples of {differs} differ between ranks; expected ")


def printed_by_fit(world: LocalWorld, kind: str, number: int, folder: Path, epochs: int) -> str:
    makes: dict[str, Callable[[int], Any]] = {
        "random": lambda index: (torch.rand(8), index % 4),
        "own random": lambda index: (torch.from_numpy(numpy.random.default_rng().random(8)), 0),
    }

    def own(index: int) -> Any:
        return torch.full((8,), 1.0 + number), index % 4

    data: Any = Made(makes.get(kind, own))
    if kind == "list":
        data = [data[index] for index in range(9)]
    model = nn.Linear(8, 4).to(data[0][0].dtype)
    trainer = trainer_of(
        model=model, world=world, output_dir=str(folder), epochs=epochs, resume="auto"
    )
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        trainer.fit(data)
    return errors.getvalue()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("data of one's own", 1), ("list", 1), ("random", 0), ("own random", 0)],
)
def test_a_resume_with_other_samples_says_so_once(kind: str, expected: int, tmp_path: Path) -> None:
    for epoch, (number, lines) in enumerate(((0, 0), (0, 0), (1, expected)), 1):
        printed = run_ranks(2, tmp_path, printed_by_fit, kind, number, tmp_path / "out", epoch)
        note = "the samples of train_data are not those that the run began with"
        assert [text.count(note) for text in printed] == [lines, 0]


def test_other_data_in_memory_are_noticed_by_one_rank_alone() -> None:
    said: list[str] = []
    states: list[dict[str, Any]] = []
    for data in ([1, 2, 3], [1, 2, 3], [1, 2, 4]):
        loader = loader_of(data, log=said.append)
        if states:
            loader.load_state_dict(states[0])
        list(loader)
        states.append(loader.state_dict())
    assert len(said) == 1


def plus(number: int) -> Callable[[int], Any]:
    return lambda index: index + number


@pytest.mark.parametrize(("makes", "lines"), [((plus(0), plus(1)), 1), ((own_flip(0.2),) * 2, 0)])
def test_a_resume_amid_an_epoch_of_a_stream_knows_its_first_samples(
    makes: tuple[Callable[[int], Any], ...], lines: int
) -> None:
    same, other = makes
    for _ in range(10):  # as those that are random differ from time to time
        said: list[str] = []
        state: Any = {"epoch": 4, "samples_seen": 0}
        for make in (same, same, other):
            loader = loader_of(MadeStream(make), log=said.append)
            loader.load_state_dict(state)
            next(iter(loader.steps()))
            state = loader.state_dict()
        assert len(said) == lines


def test_samples_are_told_apart_by_their_numbers() -> None:
    """However a tensor is stored."""
    rows = torch.arange(12.0).view(3, 4)
    same = [{"x": rows[1], "y": 3}, {"x": rows[1].clone(), "y": 3}, {"y": 3, "x": rows[1]}]
    assert len({fingerprint_of([sample]) for sample in same}) == 1
    others = [{"x": rows[2], "y": 3}, {"x": rows[1], "y": 4}, {"x": rows[1, :3], "y": 3}]
    first = fingerprint_of(same[:1])
    assert first is not None
    for other in others:
        found = fingerprint_of([other])
        assert found is not None
        assert not first.is_like(found)


def test_samples_of_zeros_alone_are_alike() -> None:
    """As masks and padding are: of nothing no difference is allowed, and there is none."""
    zeros = fingerprint_of([{"mask": torch.zeros(8)}])
    again = fingerprint_of([{"mask": torch.zeros(8)}])
    other = fingerprint_of([{"mask": torch.ones(8)}])
    assert zeros is not None
    assert again is not None
    assert other is not None
    assert zeros.is_like(again)
    assert not zeros.is_like(other)
