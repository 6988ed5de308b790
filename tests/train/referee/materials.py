"""What the referee's programs are made of: data and models.

What is drawn at random is drawn by a sample's index, so that it does not matter which rank draws.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import Dataset, IterableDataset, TensorDataset

INPUTS = 6
CLASSES = 4
WORDS = 9
IGNORED = -100
SAMPLES = 50  # steps of 12: the last one of an epoch has 2 samples, so that a third rank has none
STEPS = 5  # of an epoch of so many
VALIDATION = 17
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 5.0, 9.0], dtype=torch.float64)


# Data.


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def labelled(seed: int, samples: int) -> TensorDataset:
    """Inputs and the class of each."""
    inputs = drawn(seed, samples, INPUTS)
    return TensorDataset(inputs, (inputs @ drawn(0, INPUTS, CLASSES)).argmax(dim=1))


def measured(seed: int, samples: int) -> TensorDataset:
    """Inputs and a value for each."""
    inputs = drawn(seed, samples, INPUTS)
    return TensorDataset(inputs, (inputs @ drawn(0, INPUTS, 1)).tanh())


def partly_labelled(seed: int, samples: int) -> TensorDataset:
    """Two of three labels are ignored, and all of the first six samples."""
    data = labelled(seed, samples)
    labels = data.tensors[1].clone()
    labels[::3] = IGNORED
    labels[1::3] = IGNORED
    labels[:6] = IGNORED
    return TensorDataset(data.tensors[0], labels)


class Sentences(Dataset[Tensor]):
    """Words of 2 to 12 each."""

    def __init__(self, seed: int, samples: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 13, (samples,), generator=generator).tolist()
        self._sentences = [torch.randint(WORDS, (size,), generator=generator) for size in lengths]

    def __len__(self) -> int:
        return len(self._sentences)

    def __getitem__(self, index: int) -> Tensor:
        return self._sentences[index]


def padded(sentences: list[Tensor]) -> dict[str, Tensor]:
    """A batch of ``words`` and ``labels``, which are the next words."""
    whole = nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=IGNORED)
    return {"words": whole[:, :-1].clamp(min=0), "labels": whole[:, 1:]}


class Named(Dataset[dict[str, Tensor]]):
    """Samples that are mappings."""

    def __init__(self, seed: int, samples: int) -> None:
        self._data = labelled(seed, samples)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, label = self._data[index]
        return {"inputs": inputs, "labels": label}


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise that is drawn by the epoch and the sample's index."""

    def __init__(self) -> None:
        self._data = labelled(1, SAMPLES)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = self._data[index]
        return inputs + 0.3 * drawn(1000 * self._epoch + index, INPUTS), label


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Another order in each epoch, and no length."""

    def __init__(self) -> None:
        self._data = labelled(1, SAMPLES)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._data[index] for index in rotated(self._epoch))


def rotated(epoch: int) -> list[int]:
    """An order of the samples that begins elsewhere in each epoch."""
    start = 7 * epoch % SAMPLES
    return [*range(start, SAMPLES), *range(start)]


@dataclass(frozen=True)
class Rotated:
    """The same as an order of the Trainer's."""

    def __len__(self) -> int:
        return SAMPLES

    def indices(self, epoch: int) -> Tensor:
        return torch.tensor(rotated(epoch))


def balanced(labels: Sequence[int], epoch: int) -> list[int]:
    """Draws in which each class is as likely, by a table of where the draws of a sample end."""
    weights = [1 / labels.count(label) for label in labels]
    ends = list(itertools.accumulate(weights))
    generator = torch.Generator().manual_seed(epoch)
    draws = torch.rand(len(labels), dtype=torch.float64, generator=generator).tolist()
    return [bisect.bisect_right(ends, draw * ends[-1]) for draw in draws]


# Models.


def network(outputs: int = CLASSES) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def regression() -> nn.Module:
    return network(1)


def half_frozen() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)
    return model


class LanguageModel(nn.Module):
    """Predicts the next word; the words' vectors may be those of the outputs, too."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vectors = nn.Embedding(WORDS, 8)
        self.body = nn.Linear(8, 8)
        self.scores = nn.Linear(8, WORDS, bias=False)
        if tied:
            self.scores.weight = self.vectors.weight
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        outputs: Tensor = self.scores(self.body(self.vectors(words)).tanh())
        return outputs


class SparseVectors(nn.Module):
    """Classes by the sum of three words' vectors, whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vectors = nn.Embedding(WORDS, 8, sparse=True)
        self.scores = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        outputs: Tensor = self.scores(self.vectors(words).sum(dim=1).tanh())
        return outputs


def three_words(seed: int, samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (samples, 3), generator=generator)
    return TensorDataset(words, words.sum(dim=1) % CLASSES)


class ReturnsLoss(nn.Module):
    """As Hugging Face's models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(inputs)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class HeadBySample(nn.Module):
    """A sample's first input decides which head it goes through; the last one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(INPUTS, 8)
        self.heads = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(4))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.trunk(inputs).tanh()
        outputs = features.new_zeros(len(inputs), CLASSES)
        chosen = self.choices(inputs)
        for number in chosen.unique().tolist():
            here = chosen == number
            outputs = outputs.index_put((here,), self.heads[number](features[here]))
        return outputs

    def choices(self, inputs: Tensor) -> Tensor:
        """Seldom the third."""
        return (inputs[:, 0] > 0).long() + (inputs[:, 0] > 1.7).long()


class DropoutByIndex(nn.Module):
    """The first input is the sample's index, by which its mask is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[:2](inputs[:, 1:])
        if self.training:
            masks = [drawn(int(index), 8) > -0.5 for index in inputs[:, 0]]
            hidden = hidden * torch.stack(masks) / 0.7
        outputs: Tensor = self.layers[2](hidden)
        return outputs


def indexed(seed: int, samples: int) -> TensorDataset:
    data = labelled(seed, samples)
    indices = torch.arange(samples, dtype=torch.float64)
    return TensorDataset(torch.cat([indices[:, None], data.tensors[0]], dim=1), data.tensors[1])


class Block(nn.Module):
    """A layer with GroupNorm, beside which its inputs go on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        change: Tensor = self.norm(self.layer(inputs)).tanh()
        return inputs + change


def blocks() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(INPUTS, 8), Block(), Block(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


class Complex(nn.Module):
    """Two layers of complex weights; the outputs are magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.complex(drawn(1, INPUTS, 8), drawn(2, INPUTS, 8)) / 3)
        self.second = nn.Parameter(torch.complex(drawn(3, 8, CLASSES), drawn(4, 8, CLASSES)) / 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.to(torch.complex128) @ self.first
        return (hidden.tanh() @ self.second).abs()


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(INPUTS, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def with_frozen_statistics() -> nn.Module:
    model = normalised()
    model.get_buffer("1.running_mean").copy_(drawn(5, 8))
    model[1].eval()
    return model


class Counting(nn.Module):
    """A buffer counts the steps, and the outputs grow with it."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        outputs: Tensor = self.layers(inputs)
        return outputs * (1 + 0.05 * self.count)


class Distilled(nn.Module):
    """With a teacher that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = normalised().requires_grad_(False).eval()
        self.student = network()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(inputs), self.teacher(inputs)


class Recurrent(nn.Module):
    """Classes by the last state of a GRU over three words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vectors = nn.Embedding(WORDS, 5, padding_idx=0)
        self.states = nn.GRU(5, 8, batch_first=True)
        self.scores = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        _, last = self.states(self.vectors(words))
        outputs: Tensor = self.scores(last[0])
        return outputs


def with_spectral_norm() -> nn.Module:
    model = network()
    spectral_norm(model[0])
    weight_norm(model[2])
    return model


class Tempered(nn.Module):
    """A loss function that learns by how much to multiply the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs * self.log_scale.exp(), targets)
