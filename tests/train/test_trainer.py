"""What the loop promises on three ranks, on fewer samples than ranks, and alone."""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from srunddp.errors import ConfigError
from srunddp.train import Callback, Config, DataLoaderConfig, Trainer, accuracy, load_checkpoint
from tests.support.facts import tells
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import (
    Numbered,
    OnStep,
    Scale,
    classes,
    counting,
    distance,
    exact_figures,
    message,
    normalised_network,
    scale_trainer,
    settings,
)


def train_unevenly(world: LocalWorld) -> Any:
    """10 samples on 3 ranks, and fewer samples than ranks; by (samples, batch size)."""
    figures = {}
    for samples, batch_size in [(10, 1), (10, 2), (10, 3), (10, 4), (10, 64), (2, 4), (1, 4)]:
        data = Numbered(samples)
        (record,) = scale_trainer(world, batch_size=batch_size).fit(data, data)
        figures[samples, batch_size] = (record.train, record.val)
    return figures


def test_padding_is_never_counted_twice(tmp_path: Path) -> None:
    """Also with fewer samples than ranks, which does not hang either."""
    for figures in run_ranks(3, tmp_path, train_unevenly):
        for (samples, _), (train, test) in figures.items():
            assert train == test == exact_figures(samples)


def read_samples(world: LocalWorld) -> Any:
    """The samples this rank reads in each of two epochs."""
    data = Numbered(30)
    scale_trainer(world, epochs=2).fit(data)
    return data.read[-20:-10], data.read[-10:]  # before them a few are compared between ranks


def test_every_epoch_has_another_order(tmp_path: Path) -> None:
    """And each sample once."""
    by_rank = run_ranks(3, tmp_path, read_samples)
    assert all(first != second for first, second in by_rank)
    for shards in zip(*by_rank, strict=True):
        assert sorted(itertools.chain(*shards)) == list(range(30))


def train_with_batchnorm(world: LocalWorld, folder: Path) -> Any:
    """BatchNorm and a flag among the buffers; what is printed."""
    torch.manual_seed(world.rank)
    model = normalised_network()
    model.register_buffer("flag", torch.tensor([world.rank == 0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = settings(epochs=2, output_dir=str(folder), tensorboard=False)
    metrics = {"accuracy": accuracy}
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), config, world=world, metrics=metrics)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        history = trainer.fit(classes(58), classes(20))
    return model.state_dict(), history, printed.getvalue()


@pytest.fixture(scope="module")
def normalised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("normalised")
    return folder, run_ranks(3, folder, train_with_batchnorm, folder)


def test_parameters_and_buffers_are_the_same_on_all_ranks(normalised: Any) -> None:
    """And the records."""
    first, *others = normalised[1]
    assert first[0]["1.num_batches_tracked"] > 0
    assert [record.epoch for record in first[1]] == [1, 2]
    for state, history, _ in others:
        assert history == first[1]
        for name, value in first[0].items():
            assert torch.equal(state[name], value), name


def test_the_reported_test_result_is_the_checkpoints(normalised: Any) -> None:
    """Also with BatchNorm, whose running statistics differ between ranks after a step."""
    folder, ((_, history, _), *_) = normalised
    state = load_checkpoint(max((folder / "checkpoints").glob("step-*.pt")))
    model = normalised_network()
    model.register_buffer("flag", torch.tensor([False]))
    model.load_state_dict(state["model"])
    inputs, targets = classes(20).tensors
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.eval()(inputs), targets).item()
    assert state["epoch"] == history[-1].epoch == 2
    assert history[-1].val["loss"] == pytest.approx(loss, abs=1e-6)


def test_only_rank_0_prints_and_one_line_an_epoch(normalised: Any) -> None:
    first, *others = [printed for *_, printed in normalised[1]]
    assert others == ["", ""]
    figures = r"loss \d\.\d{4}, accuracy \d\d\.\d\d %"
    both = rf"{figures}, val {figures.replace(', ', ', val ')}, \d+ samples/s \(\d+ per rank\)"
    assert re.fullmatch(f"Epoch 1 - {both}\nEpoch 2 - {both}\n", first), first


def count_waits(world: LocalWorld) -> list[dict[str, int]]:
    """How often Python reads a value back from the device and calls an all-reduce; of 5 batches, of
    20.
    """
    counts = []
    places = [
        (torch.Tensor, name)
        for name in ("item", "tolist", "__float__", "__int__", "__bool__", "numpy")
    ]
    for batch_size in (4, 1):
        with pytest.MonkeyPatch.context() as patch:
            calls: Counter[str] = Counter()
            for place, name in [*places, (dist, "all_reduce")]:
                patch.setattr(place, name, counting(calls, name, getattr(place, name)))
            scale_trainer(world, epochs=2, batch_size=batch_size).fit(Numbered(60), Numbered(60))
        counts.append(dict(calls))
    return counts


def test_a_step_never_waits_for_the_device(tmp_path: Path) -> None:
    """Four times the batches take no more collectives, reads or branches."""
    for few, many in run_ranks(3, tmp_path, count_waits):
        assert few == many
        # Four for the figures of two epochs, one in each of the first two steps (MeanWatch), two
        # for some samples of the data sets.
        assert few["all_reduce"] == 4 + 2 + 2


def test_the_model_is_in_the_right_mode() -> None:
    """(training, gradients on) in training, then with a test, then in training again."""
    training = (True, True)
    testing = (False, False)
    trainer = scale_trainer(LocalWorld())
    for epochs, val_data in enumerate((None, Numbered(6), None), start=1):
        assert isinstance(trainer.model, Scale)
        trainer.model.modes.clear()
        trainer.config = settings(epochs=epochs, batch_size=2)
        trainer.fit(Numbered(6), val_data)
        assert trainer.model.modes == ({training, testing} if val_data else {training})


@dataclass(frozen=True, kw_only=True)
class OwnConfig(Config):
    scratch: str = ""


def disagreements(world: LocalWorld) -> list[str]:
    """Each rank's message where ranks were given different things, and nothing; and a setting of
    the script's own.
    """
    first = world.rank == 0
    cases: list[tuple[Any, ...]] = [
        (Numbered(10 + world.rank), None, {}),
        (Numbered(10), Numbered(4) if first else None, {}),
        (Numbered(10), None, {"batch_size": 2 if first else 5}),
        (Numbered(10), None, {"epochs": 2 if first else 1}),
        (Numbered(10), None, {"mode": "min" if first else "max"}),
        (Numbered(0), None, {}),
    ]

    def fit(train_data: Any, val_data: Any, changes: dict[str, Any]) -> None:
        scale_trainer(world, **changes).fit(train_data, val_data)

    said = [message(partial(fit, *case)) for case in cases]
    trainer = scale_trainer(world)
    trainer.config = OwnConfig(epochs=1, batch_size=4, scratch=f"/tmp/node{world.rank}")
    return [*said, message(lambda: trainer.fit(Numbered(10)))]


def test_ranks_that_were_given_different_things_all_say_so(tmp_path: Path) -> None:
    by_rank = run_ranks(3, tmp_path, disagreements)
    differing = ("len(train_data)", "len(val_data)", "batch_size", "epochs", "mode")
    starts = [*(f"{name} differs" for name in differing), "len(train_data) is 0", "no error"]
    assert all(said.startswith(start) for said, start in zip(by_rank[0], starts, strict=True)), (
        by_rank[0]
    )
    assert by_rank == [by_rank[0]] * 3


class CountWorkers(Callback):
    workers = 0

    def on_epoch(self, trainer: Trainer, record: Any) -> None:
        self.workers = len(multiprocessing.active_children())


def test_loader_options_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    class Watched(DataLoader[Any]):
        def __init__(self, *args: Any, **options: Any) -> None:
            given.append(options)
            super().__init__(*args, **options)

    monkeypatch.setattr("srunddp.train.data.loader.DataLoader", Watched)
    loading = DataLoaderConfig(num_workers=2, prefetch_factor=3, multiprocessing_context="fork")
    trainer = scale_trainer(LocalWorld(), batch_size=2, dataloader=loading)
    trainer.callbacks = (CountWorkers(),)
    (record,) = trainer.fit(Numbered(10), Numbered(7))
    assert (record.train, record.val) == (exact_figures(10), exact_figures(7))
    assert trainer.callbacks[0].workers == 2, (
        "those of the validation data do not stay beside those of training"
    )
    assert {"num_workers": 2, "prefetch_factor": 3, "pin_memory": False}.items() <= given[0].items()


def trainer_of(**changes: Any) -> Trainer:
    model = Scale()
    arguments: dict[str, Any] = {
        "model": model,
        "loss_function": distance,
        "config": settings(),
        "world": LocalWorld(),
    } | changes
    optimizer = arguments.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(optimizer=optimizer, **arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": torch.optim.SGD(Scale().parameters())}, "1 of the optimizer's parameters"),
        (
            {"model": nn.Linear(2, 2, device="meta")},
            "2 of the model's tensors on the meta device, the first weight",
        ),
        (
            {"loss_function": nn.Linear(4, 1)},
            "the loss function has the parameter weight, which no optimizer has",
        ),
        ({"metrics": {"loss": distance}}, "a metric named 'loss'"),
        ({"world": LocalWorld(world_size=2)}, "a world of 2 ranks, but .* is none"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_hint(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"{words}.*; expected .* -> "):
        trainer_of(**changes)


def train_shards(world: LocalWorld) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (world.world_size,)))
    return message(
        lambda: trainer_of(world=world, model=model, optimizer=torch.optim.SGD(model.parameters()))
    )


def test_a_model_in_shards_is_refused_with_the_hint(tmp_path: Path) -> None:
    for said in run_ranks(2, tmp_path, train_shards):
        assert tells(said, "DTensors", "fully_shard()", "; expected ")
        assert said.endswith("docs/examples/fsdp_loop.py")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            TensorDataset(torch.ones(4, 1)),
            "a batch that is a list of 1 parts, and a loss function; expected two parts",
        ),
        (DataLoader(Numbered(4)), "a DataLoader as data"),
    ],
)
def test_data_the_loop_cannot_use_is_refused_with_the_hint(data: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words}.* -> "):
        trainer_of().fit(data)


class Derived(OnStep):
    """Overrides nothing by itself."""


def test_methods_that_are_overridden_are_called_in_the_order_of_the_callbacks() -> None:
    said: list[str] = []
    own = Callback()
    own.on_step = lambda trainer, step, loss: said.append(f"own {step}")  # type: ignore[method-assign]
    own.on_epoch = lambda trainer, record: said.append("epoch")  # type: ignore[method-assign]
    derived = Derived(lambda trainer, step: said.append(f"derived {step}"))
    trainer = trainer_of(callbacks=(Callback(), derived, own))
    trainer.callback_runner.step(3, None)
    assert said == ["derived 3", "own 3"]
    trainer.callback_runner.fit_end()
    assert said == ["derived 3", "own 3"]


def test_methods_that_a_callback_gets_after_the_trainer_was_made_are_called() -> None:
    said: list[str] = []
    own = Callback()
    trainer = trainer_of(callbacks=(own,))
    own.on_before_optimizer_step = lambda trainer: said.append("before")  # type: ignore[method-assign]
    own.on_step = lambda trainer, step, loss: said.append("step")  # type: ignore[method-assign]
    own.on_epoch = lambda trainer, record: said.append("epoch")  # type: ignore[method-assign]
    trainer.fit(Numbered(2))
    assert said[:2] == ["before", "step"]
    assert said[-1] == "epoch"


def test_moments_that_no_callback_follows_are_known() -> None:
    trainer = trainer_of(callbacks=(Callback(), Derived(print)))
    assert trainer.callback_runner.follow_steps
    assert not trainer.callback_runner.follow_evaluations
    assert not trainer.callback_runner.read_gradients


@pytest.mark.parametrize("wrong", [OnStep, object(), print])
def test_what_is_no_callback_is_refused(wrong: object) -> None:
    with pytest.raises(
        ConfigError, match=r"among the callbacks; expected instances of srunddp.train.Callback -> "
    ):
        trainer_of(callbacks=(wrong,)).fit(Numbered(4))
