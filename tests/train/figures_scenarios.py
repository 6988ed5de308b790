"""Figures of one data set whose samples three ranks share, and of the same alone; part of ``scenarios.py``'s start."""

from __future__ import annotations

import tests.train.torchmetrics_here  # noqa: F401

# isort: split
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import MeanMetric, MeanSquaredError, Metric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import AUROC, Accuracy, Precision, Recall
from torchmetrics.retrieval import RetrievalMAP

from srunddp.train import Trainer, accuracy
from srunddp.train.data.workers import share
from srunddp.train.metrics.accumulator import MetricAccumulator
from tests.train.problems import Numbered, Scale, distance, settings
from tests.train.worlds import StandIn

# By (samples, samples per batch): the ranks' batches differ in number, and with 2 and 1 samples some ranks have none.
SPLITS = [(10, 1), (10, 2), (10, 4), (11, 3), (2, 1), (1, 1)]


def scored(samples: int) -> tuple[Tensor, Tensor]:
    """Scores of shape (samples, 3) whose squares float32 adds exactly; classes."""
    generator = torch.Generator().manual_seed(samples)
    scores = torch.stack([torch.randperm(16, generator=generator)[:3] for _ in range(samples)]) / 16
    return scores, torch.arange(samples) % 3


class Range(Metric):
    """States that are no sums; and one that is a mean of ranks, of which those that saw nothing must not count."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.zeros(()), dist_reduce_fx="max")
        self.add_state("smallest", torch.full((), 1000.0), dist_reduce_fx="min")
        self.add_state("two", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.largest = torch.maximum(self.largest, outputs.max())
        self.smallest = torch.minimum(self.smallest, outputs.min())
        self.two = torch.full((), 2.0)

    def compute(self) -> dict[str, Tensor]:
        return {"range": self.largest - self.smallest, "two": self.two}


class OfFirstClass(Metric):
    """Gives the first class's score to a metric of one column, as a wrapper of torchmetrics would."""

    def __init__(self, inner: Metric) -> None:
        super().__init__()
        self.inner = inner

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.inner.update(outputs[:, 0], (targets == 0).to(outputs.dtype))

    def compute(self) -> Tensor:
        return self.inner.compute()

    def reset(self) -> None:
        super().reset()
        self.inner.reset()


class Retrieved(OfFirstClass):
    """Keeps lists of one tensor per batch, which are gathered uncatenated."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.inner.update(outputs[:, 0], targets == 0, indexes=torch.zeros_like(targets))


class MeanTop(OfFirstClass):
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.inner.update(outputs.max(dim=1).values)


def squared(outputs: Tensor, targets: Tensor) -> float:
    return outputs.square().sum().item()


def every_metric() -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "squared": squared,
        "theirs": Accuracy(task="multiclass", num_classes=3),
        "auroc": AUROC(task="multiclass", num_classes=3),
        "mse": OfFirstClass(MeanSquaredError()),
        "top": MeanTop(MeanMetric()),
        "retrieved": Retrieved(RetrievalMAP()),
        "scores": Range(),
        "twice": OfFirstClass(MeanSquaredError()) * 2.0,
        "group": MetricCollection(
            {
                "precision": Precision(task="multiclass", num_classes=3, average="macro"),
                "recall": Recall(task="multiclass", num_classes=3, average="macro"),
                "auroc": AUROC(task="multiclass", num_classes=3),
            }
        ),
    }


def batches_of(world: StandIn, samples: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    scores, classes = scored(samples)
    own = range(world.rank, samples, world.world_size)
    for start in range(0, len(own), batch_size):
        rows = list(own[start : start + batch_size])
        yield scores[rows], classes[rows]


def summed(world: StandIn, samples: int, batch_size: int, metrics: Mapping[str, Any]) -> dict[str, float]:
    sums = MetricAccumulator(metrics, world)
    for outputs, targets in batches_of(world, samples, batch_size):
        sums.add((outputs[:, 0] * 192).mean(), outputs, targets, len(targets))
    return sums.means()


def figures(world: StandIn, folder: Path) -> Any:
    metrics = every_metric()
    return {split: summed(world, *split, metrics) for split in SPLITS}


class OfTwoColumns(OfFirstClass):
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.inner.update(outputs[:, 0], outputs[:, 1])


def pearson(world: StandIn, folder: Path) -> Any:
    return summed(world, 10, 4, {"r": OfTwoColumns(PearsonCorrCoef())})["r"]


def collectives(world: StandIn, folder: Path) -> Any:
    """The means, also from the sums in a checkpoint of this world and of another; how many all-reduces they take."""
    calls, real = [], dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return real(*args, **options)

    dist.all_reduce = counted
    try:
        metrics = {"accuracy": accuracy, "squared": squared}
        sums = MetricAccumulator(metrics, world)
        for outputs, targets in batches_of(world, 10, 2):
            sums.add(torch.ones(()), outputs, targets, len(targets))
        rows = sums.by_rank()
        means = [
            sums.means(),
            MetricAccumulator(metrics, world, rows).means(),
            MetricAccumulator(metrics, world, [*rows, [0.0] * 4]).means(),
        ]
        return means, len(calls)
    finally:
        dist.all_reduce = real


class Several(Metric):
    """Computes a tensor of three."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(3), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen += 1

    def compute(self) -> Tensor:
        return self.seen


class Failing(Several):
    def compute(self) -> Tensor:
        raise ZeroDivisionError("no good")


class Stateless:
    def update(self, outputs: Tensor, targets: Tensor) -> None: ...

    def compute(self) -> float:
        return 0.0

    def reset(self) -> None: ...


def refused(world: StandIn, folder: Path) -> Any:
    """Each rank's error, by name and text."""
    said = []
    for metric in (Several(), Failing(), Stateless()):
        try:
            summed(world, 10, 4, {"wrong": metric})
        except Exception as error:
            said.append((type(error).__name__, str(error)))
    return said


def trained(world: StandIn, folder: Path) -> Any:
    """One metric for training and tests, through two epochs of the Trainer; then as the user left it."""
    model, metric = Scale(), MeanSquaredError()
    metric.update(torch.ones(1), torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = settings(epochs=2, batch_size=2)
    trainer = Trainer(model, optimizer, distance, config, world=world, metrics={"mse": metric})
    history = trainer.fit(Numbered(10), Numbered(4))
    metric.sync_on_compute = metric._to_sync = False
    return [(record.train["mse"], record.test["mse"]) for record in history], metric.compute().item()


def shares(world: StandIn, folder: Path) -> Any:
    """CPUs of each rank: all with one mask of 9, with two masks of 8 and 6, each on its node, and with few CPUs."""
    of_rank = [
        (range(9), "one"),
        (range(8) if world.rank < 2 else range(8, 14), "one"),
        (range(8), f"node{world.rank}"),
        (range(2), "one"),
    ]
    found = []
    for mask, node in of_rank:
        allowed = mock.patch("os.sched_getaffinity", return_value=set(mask))
        with allowed, mock.patch("socket.gethostname", return_value=node):
            found.append(share(world))
    return found


FIGURES = (figures, pearson, collectives, refused, trained, shares)
