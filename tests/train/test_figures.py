"""The loss and the metrics over the samples of all ranks, and nothing but these samples."""

from __future__ import annotations

import tests.train.torchmetrics_here  # noqa: F401

# isort: split
import copy
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.functional import auroc, mean_squared_error
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_precision

from srunddp.errors import ConfigError
from srunddp.train import accuracy
from srunddp.train.metrics.accumulator import MetricAccumulator
from tests.train.figures_scenarios import SPLITS, Stateless, every_metric, scored, summed
from tests.train.worlds import StandIn

if TYPE_CHECKING:
    from tests.train.conftest import Ranks


def serial(samples: int) -> dict[str, float]:
    """By hand, or by torchmetrics' functions, of the whole data at once."""
    scores, classes = scored(samples)
    first, of_first = scores[:, 0], (classes == 0).to(scores.dtype)
    return {
        "loss": (first.double() * 192).mean().item(),
        "accuracy": (scores.argmax(dim=1) == classes).double().mean().item(),
        "squared": scores.double().square().sum().item() / samples,
        "theirs": multiclass_accuracy(scores, classes, num_classes=3, average="micro").item(),
        "auroc": auroc(scores, classes, task="multiclass", num_classes=3).item(),
        "mse": mean_squared_error(first, of_first).item(),
        "twice": mean_squared_error(first, of_first).item() * 2,
        "top": scores.max(dim=1).values.mean().item(),
        "scores/range": (scores.max() - scores.min()).item(),
        "scores/two": 2.0,
        "group/precision": multiclass_precision(scores, classes, num_classes=3, average="macro").item(),
    }


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.filterwarnings("ignore:No .* samples in targets")
def test_every_metric_of_three_ranks_is_exactly_the_serial_one(three_ranks: Ranks, split: tuple[int, int]) -> None:
    """Of 10 samples on 3 ranks, and of fewer samples than ranks."""
    alone = summed(StandIn(), split[0], 1, every_metric())
    assert set(alone) > set(serial(split[0]))
    for name, value in serial(split[0]).items():
        assert alone[name] == value, name
    for by_split in three_ranks["figures"]:
        assert by_split[split] == alone


def test_states_stacked_by_rank_are_reduced_by_the_metric(three_ranks: Ranks) -> None:
    scores, _ = scored(10)
    whole = torch.corrcoef(scores[:, :2].double().T)[0, 1].item()
    results = three_ranks["pearson"]
    assert results == [results[0]] * 3
    assert results[0] == pytest.approx(whole, abs=1e-6)


def test_one_all_reduce_for_all_sums_which_a_checkpoint_may_hold(three_ranks: Ranks) -> None:
    expected = {"loss": 1.0} | {name: serial(10)[name] for name in ("accuracy", "squared")}
    for means, calls in three_ranks["collectives"]:
        assert calls == len(means)
        assert means == [expected] * 3


def test_what_a_metric_computes_wrongly_is_said_on_every_rank(three_ranks: Ranks) -> None:
    shape = "metric 'wrong' computes a tensor of shape (3,); expected one number, or a dict of numbers -> "
    for rank, (several, failing, stateless) in enumerate(three_ranks["refused"]):
        assert several[0] == "ConfigError"
        assert shape in several[1]
        assert failing[0] == ("ConfigError" if rank else "ZeroDivisionError")
        assert "no good" in failing[1]
        assert stateless[0] == "ConfigError"
        assert "metric 'wrong' of Stateless has update() and compute(), but no states; expected" in stateless[1]


def test_training_and_evaluation_metrics_are_separate_copies(three_ranks: Ranks) -> None:
    def mean_square(samples: int) -> float:
        return sum((12.0 * sample) ** 2 for sample in range(samples)) / samples

    for by_epoch, left in three_ranks["trained"]:
        assert by_epoch == [(mean_square(10), mean_square(4))] * 2
        assert left == 1.0


def test_alone_any_object_with_a_metrics_methods_is_a_metric() -> None:
    class Counted(Stateless):
        seen = 7

        def reset(self) -> None:
            self.seen = 0

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.seen += len(targets)

        def compute(self) -> Any:
            return {"all": self.seen, "half": {"of": self.seen / 2}}

    means = summed(StandIn(), 10, 4, {"count": Counted()})
    assert (means["count/all"], means["count/half/of"]) == (10.0, 5.0)


def test_no_sample_at_all_is_no_number() -> None:
    sums = MetricAccumulator({"accuracy": accuracy, "mse": MeanSquaredError()}, StandIn())
    sums.add(torch.tensor(torch.nan), torch.empty(1, 3), torch.empty(1), 0)
    means = sums.means()
    assert set(means) == {"loss", "accuracy", "mse"}
    assert all(math.isnan(value) for value in means.values())


def test_a_metric_keeps_no_graph() -> None:
    """Or the activations of every step would stay until the end of the epoch."""
    weight = torch.ones((), requires_grad=True)
    kept: list[Tensor] = []

    def keeping(outputs: Tensor, targets: Tensor) -> Tensor:
        kept.extend([outputs, (outputs * weight).sum()])
        return (outputs * weight).sum()

    sums = MetricAccumulator({"sum": keeping}, StandIn())
    sums.add(weight * 2, weight * torch.ones(4), torch.zeros(4), 4)
    assert not any(value.requires_grad for value in [*kept, *sums._totals])
    assert sums.means() == {"loss": 2.0, "sum": 1.0}


def test_metrics_that_differ_only_in_samples_stay_apart() -> None:
    shared = MetricCollection([MeanSquaredError()])
    before = copy.deepcopy(shared.MeanSquaredError.metric_state)
    first, second = MetricAccumulator({"m": shared}, StandIn()), MetricAccumulator({"m": shared}, StandIn())
    first.add(torch.ones(()), torch.ones(4), torch.zeros(4), 4)
    second.add(torch.ones(()), torch.full((4,), 3.0), torch.zeros(4), 4)
    means = {"loss": 1.0, "m/MeanSquaredError": 1.0}
    assert (first.means(), second.means()) == (means, means | {"m/MeanSquaredError": 9.0})
    assert shared.MeanSquaredError.metric_state == before


def test_a_wrong_shape_is_refused_with_the_hint() -> None:
    sums = MetricAccumulator({"wrong": lambda outputs, targets: torch.ones(7)}, StandIn())
    words = r"metric 'wrong' returned shape \(7,\) for 4 samples; expected .* -> "
    with pytest.raises(ConfigError, match=words):
        sums.add(torch.ones(()), torch.ones(4), torch.ones(4), 4)


def test_torchmetrics_is_not_imported_for_plain_metrics() -> None:
    code = "import sys, srunddp.train; sys.exit('torchmetrics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_accuracy_of_several_targets_a_sample_is_a_share() -> None:
    outputs = torch.tensor([[[1.0, 1.0], [0.0, 2.0]], [[1.0, 1.0], [0.0, 0.0]]])  # two samples of two places
    targets = torch.tensor([[0, 1], [1, 0]])
    sums = MetricAccumulator({"accuracy": accuracy}, StandIn())
    sums.add(torch.ones(()), outputs, targets, 2)
    assert sums.means()["accuracy"] == 0.75
