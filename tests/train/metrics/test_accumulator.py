"""The loss and the metrics over the samples of all ranks, and nothing but these samples."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import (
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MetricTracker,
    PearsonCorrCoef,
)
from torchmetrics.classification import AUROC, Accuracy, Precision, Recall
from torchmetrics.functional import auroc, mean_squared_error
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_precision
from torchmetrics.retrieval import RetrievalMAP

from srunddp.errors import ConfigError
from srunddp.train import Trainer, accuracy
from srunddp.train.metrics.accumulator import MetricAccumulator
from tests.support.facts import tells
from tests.train.conftest import run_python
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import Numbered, Scale, counting, distance, settings

# By (samples, samples per batch): the ranks' batches differ in number, and with 2 and 1 samples
# some ranks have none.
SPLITS = [(10, 1), (10, 2), (10, 4), (11, 3), (2, 1), (1, 1)]


def scored(samples: int) -> tuple[Tensor, Tensor]:
    """Scores of shape (samples, 3) whose squares float32 adds exactly; classes."""
    generator = torch.Generator().manual_seed(samples)
    scores = torch.stack([torch.randperm(16, generator=generator)[:3] for _ in range(samples)]) / 16
    return scores, torch.arange(samples) % 3


class Range(Metric):
    """States that are no sums; and one that is a mean of ranks, of which those that saw nothing
    must not count.
    """

    full_state_update = False
    largest: Tensor
    smallest: Tensor
    two: Tensor

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


class Adapted(Metric):
    """Gives another metric what it takes, as a wrapper of torchmetrics would."""

    def __init__(
        self, inner: Metric, adapt: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    ) -> None:
        super().__init__()
        self.inner = inner
        self.adapt = adapt

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.inner.update(*self.adapt(outputs, targets))

    def compute(self) -> Tensor:
        computed: Tensor = self.inner.compute()
        return computed

    def reset(self) -> None:
        super().reset()
        self.inner.reset()


def first_class(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs[:, 0], (targets == 0).to(outputs.dtype)


def retrieved(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For a metric that keeps lists of one tensor per batch, which are gathered uncatenated."""
    return outputs[:, 0], targets == 0, torch.zeros_like(targets)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().sum(1)


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    """A count."""
    return (outputs.argmax(1) == targets).sum()


def every_metric() -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "squared": squared,
        "right": right,
        "theirs": Accuracy(task="multiclass", num_classes=3),
        "auroc": AUROC(task="multiclass", num_classes=3),
        "mse": Adapted(MeanSquaredError(), first_class),
        "top": Adapted(MeanMetric(), lambda outputs, targets: (outputs.max(dim=1).values,)),
        "retrieved": Adapted(RetrievalMAP(), retrieved),
        "scores": Range(),
        "twice": Adapted(MeanSquaredError(), first_class) * 2.0,
        "group": MetricCollection(
            {
                "precision": Precision(task="multiclass", num_classes=3, average="macro"),
                "recall": Recall(task="multiclass", num_classes=3, average="macro"),
                "auroc": AUROC(task="multiclass", num_classes=3),
            }
        ),
    }


def batches_of(world: LocalWorld, samples: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    scores, classes = scored(samples)
    own = range(world.rank, samples, world.world_size)
    for start in range(0, len(own), batch_size):
        rows = list(own[start : start + batch_size])
        yield scores[rows], classes[rows]


def add(
    sums: MetricAccumulator, loss: Tensor, outputs: Tensor, targets: Tensor, samples: int
) -> None:
    sums.add(loss, outputs, targets, samples=samples, weight=samples)


def summed(
    world: LocalWorld, samples: int, batch_size: int, metrics: Mapping[str, Any]
) -> dict[str, float]:
    sums = MetricAccumulator(metrics, world)
    for outputs, targets in batches_of(world, samples, batch_size):
        add(sums, (outputs[:, 0] * 192).mean(), outputs, targets, len(targets))
    return sums.means()


def serial(samples: int) -> dict[str, float]:
    """By hand, or by torchmetrics' functions, of the whole data at once."""
    scores, classes = scored(samples)
    first = scores[:, 0]
    of_first = (classes == 0).to(scores.dtype)
    area = auroc(scores, classes, task="multiclass", num_classes=3)
    assert area is not None
    return {
        "loss": (first.double() * 192).mean().item(),
        "accuracy": (scores.argmax(dim=1) == classes).double().mean().item(),
        "squared": scores.double().square().sum().item() / samples,
        "right": (scores.argmax(dim=1) == classes).double().mean().item(),
        "theirs": multiclass_accuracy(scores, classes, num_classes=3, average="micro").item(),
        "auroc": area.item(),
        "mse": mean_squared_error(first, of_first).item(),
        "twice": mean_squared_error(first, of_first).item() * 2,
        "top": scores.max(dim=1).values.mean().item(),
        "scores/range": (scores.max() - scores.min()).item(),
        "scores/two": 2.0,
        "group/precision": multiclass_precision(
            scores, classes, num_classes=3, average="macro"
        ).item(),
    }


def figures(world: LocalWorld) -> Any:
    metrics = every_metric()
    return {split: summed(world, *split, metrics) for split in SPLITS}


@pytest.mark.filterwarnings("ignore:No .* samples in targets")
def test_every_metric_of_three_ranks_is_exactly_the_serial_one(tmp_path: Path) -> None:
    """Of 10 samples on 3 ranks, and of fewer samples than ranks."""
    for by_split in run_ranks(3, tmp_path, figures):
        for (samples, batch_size), found in by_split.items():
            alone = summed(LocalWorld(), samples, 1, every_metric())
            assert set(alone) > set(serial(samples))
            assert {name: alone[name] for name in serial(samples)} == serial(samples)
            assert found == alone, batch_size


def pearson(world: LocalWorld) -> float:
    metric = Adapted(PearsonCorrCoef(), lambda outputs, targets: (outputs[:, 0], outputs[:, 1]))
    return summed(world, 10, 4, {"r": metric})["r"]


def test_states_stacked_by_rank_are_reduced_by_the_metric(tmp_path: Path) -> None:
    scores, _ = scored(10)
    whole = torch.corrcoef(scores[:, :2].double().T)[0, 1].item()
    results = run_ranks(3, tmp_path, pearson)
    assert results == [results[0]] * 3
    assert results[0] == pytest.approx(whole, abs=1e-6)


def collectives(world: LocalWorld) -> Any:
    """The means, also from the sums in a checkpoint of this world and of another; how many
    all-reduces they take.
    """
    calls: Counter[str] = Counter()
    dist.all_reduce = counting(calls, "all_reduce", dist.all_reduce)
    metrics = {"accuracy": accuracy, "squared": squared}
    sums = MetricAccumulator(metrics, world)
    for outputs, targets in batches_of(world, 10, 2):
        add(sums, torch.ones(()), outputs, targets, len(targets))
    rows = sums.by_rank()
    resumed = [MetricAccumulator(metrics, world, each) for each in (rows, [*rows, [0.0] * 7])]
    return [each.means() for each in (sums, *resumed)], calls["all_reduce"]


def test_one_all_reduce_for_all_sums_which_a_checkpoint_may_hold(tmp_path: Path) -> None:
    expected = {"loss": 1.0} | {name: serial(10)[name] for name in ("accuracy", "squared")}
    assert run_ranks(3, tmp_path, collectives) == [([expected] * 3, 3)] * 3


class Several(Metric):
    """Computes a tensor of three."""

    seen: Tensor

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


def refusals(world: LocalWorld) -> list[tuple[str, str]]:
    """Each error, by name and text."""
    said = []
    for metric in (Several(), Failing(), Stateless()):
        try:
            summed(world, 10, 4, {"wrong": metric})
        except Exception as error:
            said.append((type(error).__name__, str(error)))
    return said


def test_what_a_metric_computes_wrongly_is_said_on_every_rank(tmp_path: Path) -> None:
    shape = (
        "metric 'wrong' computes a tensor of shape (3,); expected one number, or a dict of"
        " numbers -> "
    )
    for rank, (several, failing, stateless) in enumerate(run_ranks(3, tmp_path, refusals)):
        assert several[0] == ("PeerError" if rank else "ConfigError")
        assert shape in several[1]
        assert failing[0] == ("PeerError" if rank else "ZeroDivisionError")
        assert "no good" in failing[1]
        assert stateless[0] == "ConfigError"
        assert tells(stateless[1], "'wrong'", "Stateless", "no states", "; expected")


def test_training_and_evaluation_metrics_are_separate_copies() -> None:
    """One metric for both, through two epochs of the Trainer; then as the user left it."""

    def mean_square(samples: int) -> float:
        return sum((12.0 * sample) ** 2 for sample in range(samples)) / samples

    model = Scale()
    metric = MeanSquaredError()
    metric.update(torch.ones(1), torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = settings(epochs=2, batch_size=2)
    trainer = Trainer(
        model, optimizer, distance, config, world=LocalWorld(), metrics={"mse": metric}
    )
    history = trainer.fit(Numbered(10), Numbered(4))
    assert [(record.train["mse"], record.val["mse"]) for record in history] == [
        (mean_square(10), mean_square(4))
    ] * 2
    assert metric.compute() == 1.0


def test_alone_any_object_with_a_metrics_methods_is_a_metric() -> None:
    class Counted(Stateless):
        seen = 7

        def reset(self) -> None:
            self.seen = 0

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.seen += len(targets)

        def compute(self) -> Any:
            return {"all": self.seen, "half": {"of": self.seen / 2}}

    means = summed(LocalWorld(), 10, 4, {"count": Counted()})
    assert (means["count/all"], means["count/half/of"]) == (10.0, 5.0)


def test_no_sample_at_all_is_no_number() -> None:
    sums = MetricAccumulator({"accuracy": accuracy, "mse": MeanSquaredError()}, LocalWorld())
    add(sums, torch.tensor(torch.nan), torch.empty(1, 3), torch.empty(1), 0)
    means = sums.means()
    assert set(means) == {"loss", "accuracy", "mse"}
    assert all(math.isnan(value) for value in means.values())
    resumed = MetricAccumulator(
        {"mse": MeanSquaredError()}, LocalWorld(), [[3.0, 3.0, 6.0]]
    ).means()
    assert resumed["loss"] == 2.0
    assert math.isnan(resumed["mse"]), "at an epoch's very end a checkpoint does not know it"


def test_samples_of_a_batch_without_weight_count_in_metrics_alone() -> None:
    """Such as those whose labels are all ignored, whose mean loss is NaN."""
    sums = MetricAccumulator({"accuracy": accuracy}, LocalWorld())
    sums.add(torch.tensor(0.5), torch.eye(2), torch.eye(2).argmax(1), samples=2, weight=3.0)
    sums.add(torch.tensor(math.nan), torch.eye(2), torch.tensor([1, 1]), samples=2, weight=0.0)
    assert sums.means()["loss"] == 0.5
    assert sums.means()["accuracy"] == 0.75


def test_a_metric_keeps_no_graph() -> None:
    """Or the activations of every step would stay until the end of the epoch."""
    weight = torch.ones((), requires_grad=True)
    kept: list[Tensor] = []

    def keeping(outputs: Tensor, targets: Tensor) -> Tensor:
        kept.extend([outputs, outputs * weight])
        return outputs * weight

    sums = MetricAccumulator({"sum": keeping}, LocalWorld())
    add(sums, weight * 2, weight * torch.ones(4), torch.zeros(4), 4)
    assert not any(value.requires_grad for value in kept)
    assert sums.means() == {"loss": 2.0, "sum": 1.0}


def test_metrics_that_differ_only_in_samples_stay_apart() -> None:
    error = MeanSquaredError()
    shared = MetricCollection([error])
    before = copy.deepcopy(error.metric_state)
    first = MetricAccumulator({"m": shared}, LocalWorld())
    second = MetricAccumulator({"m": shared}, LocalWorld())
    add(first, torch.ones(()), torch.ones(4), torch.zeros(4), 4)
    add(second, torch.ones(()), torch.full((4,), 3.0), torch.zeros(4), 4)
    means = {"loss": 1.0, "m/MeanSquaredError": 1.0}
    assert (first.means(), second.means()) == (means, means | {"m/MeanSquaredError": 9.0})
    assert error.metric_state == before


def test_a_metric_that_keeps_figures_of_many_epochs_is_refused() -> None:
    tracker = MetricTracker(MeanSquaredError())
    with pytest.raises(ConfigError, match=r"'tracked' is a MetricTracker"):
        MetricAccumulator({"tracked": tracker}, LocalWorld())


def test_torchmetrics_is_not_imported_for_plain_metrics() -> None:
    code = "import sys, srunddp.train; sys.exit('torchmetrics' in sys.modules)"
    run_python("-c", code)


def test_the_accuracy_of_several_targets_a_sample_is_a_share() -> None:
    # Two samples of two places.
    outputs = torch.tensor([[[1.0, 1.0], [0.0, 2.0]], [[1.0, 1.0], [0.0, 0.0]]])
    targets = torch.tensor([[0, 1], [1, 0]])
    sums = MetricAccumulator({"accuracy": accuracy}, LocalWorld())
    add(sums, torch.ones(()), outputs, targets, 2)
    assert sums.means()["accuracy"] == 0.75


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [((4, 1), (4, 1)), ((4,), (4,)), ((2, 3, 5), (2, 3)), ((2, 5, 5), (2, 3))],
)
def test_accuracy_of_other_shapes_is_refused(
    outputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    """One score per sample would be broadcast, and a language model's classes are its last
    dimension.
    """
    with pytest.raises(
        ConfigError, match=r"accuracy of outputs of shape .*; expected \(samples, classes, .* -> "
    ):
        accuracy(torch.zeros(outputs), torch.zeros(targets))


def test_accuracy_of_a_whole_batch_says_how_to_take_the_targets_out() -> None:
    batch = {"label": torch.tensor([1])}
    whole: Any = batch
    with pytest.raises(ConfigError, match=r"accuracy of targets of type dict; expected .* -> "):
        accuracy(torch.tensor([[0.0, 1.0]]), whole)
    assert accuracy(torch.tensor([[0.0, 1.0]]), batch["label"]).tolist() == [True]


def test_metrics_of_several_kinds_are_summed_exactly() -> None:
    """Values of float32, whole numbers that float32 does not have, and a count."""
    exact = 2**24 + 1
    metrics: dict[str, Callable[[Any, Any], Tensor | int]] = {
        "count": lambda outputs, targets: 3,
        "whole": lambda outputs, targets: torch.full((2,), exact),
        "half": lambda outputs, targets: torch.full((2,), 0.5),
    }
    sums = MetricAccumulator(metrics, LocalWorld(0, 0, 1))
    for _ in range(2):
        add(sums, torch.tensor(1.0), torch.zeros(2, 1), torch.zeros(2), 2)
    assert sums.means() == {"loss": 1.0, "count": 1.5, "whole": exact, "half": 0.5}


def test_the_sum_is_that_of_float64() -> None:
    sums = MetricAccumulator({}, LocalWorld())
    for _ in range(1000):
        add(sums, torch.tensor(0.1, dtype=torch.float64), torch.ones(3), torch.ones(3), 3)
    assert sums.means()["loss"] == pytest.approx(0.1, rel=1e-14)


@pytest.mark.parametrize(
    "metric", [lambda *_: torch.ones(7), lambda *_: torch.ones(()), lambda *_: 0.5]
)
def test_a_metric_that_is_a_mean_or_a_sum_is_refused(metric: Any) -> None:
    """Its own mean over a batch, as other libraries take it, would be summed."""
    with pytest.raises(
        ConfigError,
        match=r"metric 'wrong' returned .* for 4 samples; expected one value .* -> leave out",
    ):
        add(
            MetricAccumulator({"wrong": metric}, LocalWorld()),
            torch.ones(()),
            torch.ones(4),
            torch.ones(4),
            4,
        )
