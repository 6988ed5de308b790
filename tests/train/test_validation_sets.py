"""Several validation sets by name, a batch that is tried first, and collectives in evaluations."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset

from srunddp.errors import ConfigError
from srunddp.train import Callback, CheckpointConfig, DataLoaderConfig, Trainer, accuracy
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import OnStep, classes, message, settings, trainer_of

pytestmark = pytest.mark.usefixtures("one_thread")


def sets() -> dict[str, Dataset[Any]]:
    data = classes(40)
    return {"clean": Subset(data, range(13)), "noisy": Subset(data, range(13, 40))}


def trainer(world: LocalWorld | None = None, *callbacks: Callback, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()
    return Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        settings(tensorboard=False, **changes),
        world=world or LocalWorld(),
        metrics={"accuracy": accuracy},
        callbacks=callbacks,
    )


class Double(Dataset[Any]):
    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.data[index]
        return inputs.double(), target


# Several sets.


def fit_on_sets(world: LocalWorld) -> tuple[dict[str, float], dict[str, float]]:
    """The figures that a training records, and those of each set by itself."""
    ours = trainer(world)
    val_data = {name: Double(each) for name, each in sets().items()}
    (record,) = ours.fit(Double(classes(16)), val_data)
    alone = {
        f"{name}/{figure}": value
        for name, each in val_data.items()
        for figure, value in ours.evaluate(each).items()
    }
    return dict(record.val), alone


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_set_has_figures_of_its_own(ranks: int, tmp_path: Path) -> None:
    for together, alone in run_ranks(ranks, tmp_path, fit_on_sets):
        assert [*together] == ["clean/loss", "clean/accuracy", "noisy/loss", "noisy/accuracy"]
        assert together == pytest.approx(alone, rel=0, abs=1e-12)


@pytest.mark.parametrize(
    ("monitor", "figure", "mode"),
    [
        ("loss", "clean/loss", "min"),
        ("accuracy", "clean/accuracy", "max"),
        ("noisy/loss", "noisy/loss", "min"),
        ("noisy/accuracy", "noisy/accuracy", "max"),
    ],
)
def test_the_first_set_tells_the_best_unless_another_is_named(
    monitor: str, figure: str, mode: str, tmp_path: Path
) -> None:
    ours = trainer(
        monitor=monitor, epochs=3, output_dir=str(tmp_path), checkpoint=CheckpointConfig()
    )
    ours.fit(classes_of_doubles(16), {n: Double(each) for n, each in sets().items()})
    figures = {4 * record.epoch: record.val[figure] for record in ours.state.records}
    choose = max if mode == "max" else min
    best = choose(figures.values())
    step = next(step for step, value in figures.items() if value == best)
    assert (tmp_path / "checkpoints" / "best.pt").resolve().name == f"step-{step:08}.pt"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line[f"val/{figure}"] for line in lines if line["kind"] == "epoch"]
    assert logged == [*figures.values()]


def classes_of_doubles(samples: int) -> Dataset[Any]:
    return Double(classes(samples))


@pytest.mark.parametrize(
    ("val_data", "changes"),
    [
        ({}, {}),
        ({"": Double(classes(8))}, {}),
        ({"loss": Double(classes(8))}, {}),
        ({"accuracy": Double(classes(8))}, {}),
        ({"a/b": Double(classes(8))}, {}),
        ({"clean": Double(classes(8))}, {"monitor": "other/loss"}),
        ({"clean": Double(classes(8))}, {"monitor": "clean/other"}),
        (Double(classes(8)), {"monitor": "clean/loss"}),
    ],
)
def test_names_that_lead_nowhere_are_refused(val_data: Any, changes: dict[str, Any]) -> None:
    assert message(lambda: trainer(**changes).fit(classes_of_doubles(8), val_data)) != "no error"


def disagree(world: LocalWorld) -> str:
    names = ["clean", "noisy"] if world.rank else ["noisy", "clean"]
    val_data = {name: classes_of_doubles(8) for name in names}
    return message(lambda: trainer(world).fit(classes_of_doubles(8), val_data))


def test_other_sets_on_another_rank_are_refused(tmp_path: Path) -> None:
    for text in run_ranks(2, tmp_path, disagree):
        assert "differs between ranks" in text


# The first batch that is tried.


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise ConfigError("a file that is not there", expected="it", hint="look for it")


def fails(outputs: Tensor, targets: Tensor) -> Tensor:
    raise ConfigError("a metric that fails", expected="a number", hint="mend it")


@pytest.mark.parametrize("fault", ["data", "one of several", "metric"])
def test_what_fails_in_an_evaluation_fails_before_the_first_step(fault: str) -> None:
    steps: list[int] = []
    note = OnStep(lambda trainer, step: steps.append(step))
    ours = trainer(None, note)
    val_data: Any = {
        "data": Broken(),
        "one of several": {"clean": classes_of_doubles(8), "broken": Broken()},
        "metric": classes_of_doubles(8),
    }[fault]
    if fault == "metric":
        ours.val_metrics = {"fails": fails}
    with pytest.raises(ConfigError, match=r"not there|fails"):
        ours.fit(classes_of_doubles(16), val_data)
    assert steps == []


class RandomModel(nn.Module):
    """With dropout and BatchNorm, so that whatever is drawn or passed through it is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        return output


class RandomData(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self.data = classes(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.data[index]
        return inputs + torch.randn(8), target


def weights(world: LocalWorld, with_val: bool, workers: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    ours = trainer_of(
        model=RandomModel(),
        world=world,
        evaluate_every_epochs=0,
        ema_decay=0.9,
        dataloader=DataLoaderConfig(num_workers=workers),
    )
    ours.fit(RandomData(24), RandomData(8) if with_val else None)
    return ours.model.state_dict()


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (2, 1)])
def test_no_bit_of_the_training_is_changed_by_it(ranks: int, workers: int, tmp_path: Path) -> None:
    with_it = run_ranks(ranks, tmp_path, weights, True, workers)
    without = run_ranks(ranks, tmp_path, weights, False, workers)
    for ours, theirs in zip(with_it, without, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# Collectives in an evaluation.


def contrast(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A loss over the samples of all ranks, whose all_gather needs equal shapes; the outputs are
    the inputs' first numbers, to see which samples were evaluated.
    """
    inputs, _ = batch
    outputs = model(inputs)
    if dist.is_initialized():
        outputs = torch.cat(collectives.all_gather(outputs))
    return outputs.square().mean(), inputs


def first_number(inputs: Tensor, _: Any) -> Tensor:
    return inputs[:, 0]


class Stream(IterableDataset[Any]):
    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))  # type: ignore[arg-type]


def evaluate_with_collectives(
    world: LocalWorld, kind: str, before_training: bool
) -> list[tuple[float, float]]:
    """The mean of the samples' first numbers for several lengths, and what it should be."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    ours = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        config=settings(dataloader=DataLoaderConfig(drop_last=True, num_workers=0)),
        world=world,
        step=contrast,
        metrics={"first": first_number},
    )
    found = []
    if not before_training:
        ours.fit(classes(24), classes(world.world_size * 4 - 1))
    for samples in (1, 4 * world.world_size - 1, 4 * world.world_size + 1, 29):
        data = classes(samples)
        figures = ours.evaluate(Stream(data) if kind == "stream" else data)
        found.append((figures["first"], float(data.tensors[0][:, 0].double().mean())))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["indices", "stream"])
@pytest.mark.parametrize("before_training", [False, True])
def test_a_step_with_collectives_is_evaluated_on_any_number_of_samples(
    kind: str, ranks: int, before_training: bool, tmp_path: Path
) -> None:
    for by_rank in run_ranks(ranks, tmp_path, evaluate_with_collectives, kind, before_training):
        for figure, expected in by_rank:
            assert figure == pytest.approx(expected, rel=0, abs=1e-6)


def count_all(model: nn.Module, batch: Any) -> Tensor:
    """A step whose collective takes any number of samples."""
    inputs, targets = batch
    samples = torch.tensor([float(len(inputs))])
    if dist.is_initialized():
        dist.all_reduce(samples)
    return nn.functional.cross_entropy(model(inputs), targets)


def train_with_collectives(world: LocalWorld, samples: int, drop_last: bool, capture: Path) -> str:
    """What rank 0 says of a training whose step calls collectives."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    ours = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        config=settings(dataloader=DataLoaderConfig(drop_last=drop_last, num_workers=0)),
        world=world,
        step=count_all,
    )
    with (capture / f"said{world.rank}").open("w") as file, contextlib.redirect_stderr(file):
        ours.fit(classes(samples))
    return (capture / f"said{world.rank}").read_text()


@pytest.mark.parametrize(
    ("samples", "drop_last", "says"), [(23, False, True), (24, False, False), (23, True, False)]
)
def test_what_collectives_need_at_an_epochs_end_is_said_at_the_first_step(
    samples: int, drop_last: bool, says: bool, tmp_path: Path
) -> None:
    said, other = run_ranks(2, tmp_path, train_with_collectives, samples, drop_last, tmp_path)
    assert ("drop_last" in said) == says
    assert "drop_last" not in other
