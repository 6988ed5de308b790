"""What the loop promises on three ranks, on fewer samples than ranks, and alone."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from srunddp.errors import ConfigError
from srunddp.train import Callback, LoadingConfig, Trainer, load_checkpoint
from tests.train.problems import (
    Numbered,
    Scale,
    classes,
    distance,
    exact_figures,
    normalised_network,
    scale_trainer,
    settings,
)
from tests.train.worlds import StandIn

if TYPE_CHECKING:
    from tests.train.conftest import Ranks

FITS = [(10, 1), (10, 2), (10, 3), (10, 4), (10, 64), (2, 4), (1, 4)]


@pytest.mark.parametrize(("samples", "batch_size"), FITS)
def test_padding_is_never_counted_twice(three_ranks: Ranks, samples: int, batch_size: int) -> None:
    """Also with fewer samples than ranks, which does not hang either."""
    for by_fit in three_ranks["uneven"]:
        train, test = by_fit[samples, batch_size]
        assert train == test == exact_figures(samples)


def test_every_epoch_has_another_order(three_ranks: Ranks) -> None:
    for read, continued, _ in three_ranks["orders"]:
        assert continued == list(itertools.chain(*read)), "one fit of three epochs is three fits of one"
        assert len({tuple(order) for order in read}) == 3
    epochs = zip(*(read for read, _, _ in three_ranks["orders"]), strict=True)
    for shards in epochs:
        assert sorted(itertools.chain(*shards)) == list(range(30))


def test_evaluation_reads_every_sample_once(three_ranks: Ranks) -> None:
    read = itertools.chain(*(test_read for _, _, test_read in three_ranks["orders"]))
    assert sorted(read) == list(range(10))


def test_parameters_and_buffers_are_the_same_on_all_ranks(three_ranks: Ranks) -> None:
    states = [state for state, _ in three_ranks["normalised"]]
    assert states[0]["1.num_batches_tracked"] > 0
    for name, value in states[0].items():
        for state in states[1:]:
            assert torch.equal(state[name], value), name


def test_all_ranks_get_the_same_records(three_ranks: Ranks) -> None:
    first, *others = [history for _, history in three_ranks["normalised"]]
    assert [record.epoch for record in first] == [1, 2]
    assert others == [first, first]


def test_the_reported_test_result_is_the_checkpoints(three_ranks: Ranks) -> None:
    """Also with BatchNorm, whose running statistics differ between ranks after a step."""
    state = load_checkpoint(max((three_ranks.folder / "normalised" / "checkpoints").glob("step-*.pt")))
    model = normalised_network()
    model.register_buffer("flag", torch.tensor([False]))
    model.load_state_dict(state["model"])
    inputs, targets = classes(20).tensors
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.eval()(inputs), targets).item()
    _, history = three_ranks["normalised"][0]
    assert state["epoch"] == history[-1].epoch == 2
    assert history[-1].test["loss"] == pytest.approx(loss, abs=1e-6)


def test_only_rank_0_prints_and_one_line_an_epoch(three_ranks: Ranks) -> None:
    of_normalised = [output.split("[normalised]\n")[1].split("[waits]")[0] for output in three_ranks.outputs]
    assert of_normalised[1:] == ["", ""]
    figures = r"loss \d\.\d{4}, accuracy \d\d\.\d\d %"
    both = rf"{figures}, test {figures.replace(', ', ', test ')}, \d+ samples/s \(\d+ per rank\)"
    assert re.fullmatch(f"Epoch 1 - {both}\nEpoch 2 - {both}\n", of_normalised[0]), of_normalised[0]


def test_a_step_never_waits_for_the_device(three_ranks: Ranks) -> None:
    """Four times the batches take no more collectives or branches; losses on the CPU may be read, see test_late."""
    for few, many in three_ranks["waits"]:
        assert {**few, "item": 0, "tolist": 0} == {**many, "item": 0, "tolist": 0}
        assert few["all_reduce"] == 4


def test_the_model_is_in_the_right_mode(three_ranks: Ranks) -> None:
    training, testing = (True, True), (False, False)
    for seen in three_ranks["modes"]:
        assert seen == [{training}, {training, testing}, {training}]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (0, "len(train_data) differs"),
        (1, "len(test_data) differs"),
        (2, "batch_size differs"),
        (3, "epochs differs"),
        (4, "best_mode differs"),
    ],
)
def test_ranks_that_were_given_different_things_all_say_so(three_ranks: Ranks, case: int, name: str) -> None:
    messages = [of_rank[case] for of_rank in three_ranks["disagreements"]]
    assert messages[0].startswith(name)
    assert len(set(messages)) == 1


def test_an_empty_data_set_is_an_error_on_every_rank(three_ranks: Ranks) -> None:
    for messages in three_ranks["disagreements"]:
        assert messages[-1].startswith("len(train_data) is 0")


def test_a_world_of_one_needs_no_process_group() -> None:
    assert not torch.distributed.is_initialized()
    trainer = scale_trainer(StandIn())
    parameters = list(trainer.model.parameters())
    (record,) = trainer.fit(Numbered(10), Numbered(7))
    assert (record.train, record.test) == (exact_figures(10), exact_figures(7))
    assert list(trainer.model.parameters()) == parameters


def test_loader_options_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    class Watched(DataLoader[Any]):
        def __init__(self, *args: Any, **options: Any) -> None:
            given.append(options)
            super().__init__(*args, **options)

    monkeypatch.setattr("srunddp.train.data.loader.DataLoader", Watched)
    loading = LoadingConfig(num_workers=2, prefetch_factor=3, multiprocessing_context="fork")
    (record,) = scale_trainer(StandIn(), batch_size=2, loading=loading).fit(Numbered(10))
    assert record.train == exact_figures(10)
    assert {"num_workers": 2, "prefetch_factor": 3, "pin_memory": False}.items() <= given[0].items()


def trainer_of(**changes: Any) -> Trainer:
    model = Scale()
    arguments = {"model": model, "loss_function": distance, "config": settings(), "world": StandIn()} | changes
    optimizer = arguments.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(optimizer=optimizer, **arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": torch.optim.SGD(Scale().parameters())}, "1 of the optimizer's parameters"),
        ({"loss_function": nn.L1Loss(reduction="sum")}, "reduction='sum'"),
        ({"metrics": {"loss": distance}}, "a metric named 'loss'"),
        ({"world": StandIn(world_size=2)}, "a world of 2 ranks, but .* is none"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_hint(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words}.*; expected .* -> "):
        trainer_of(**changes)


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(1), torch.ones(1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (TensorDataset(torch.ones(4, 1)), "a batch of .'Tensor'.; expected two parts"),
        (Endless(), "a data set of Endless without a length"),
    ],
)
def test_data_the_loop_cannot_use_is_refused_with_the_hint(data: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words}.* -> "):
        trainer_of().fit(data)


class OnStep(Callback):
    def on_step(self, trainer, step, loss) -> None:
        """Overridden."""


class Derived(OnStep):
    pass


def test_only_methods_that_are_overridden_are_called() -> None:
    own, derived, plain = Callback(), Derived(), Callback()
    own.on_epoch = lambda trainer, record: None
    trainer = trainer_of(callbacks=(plain, derived, own))
    assert trainer.methods("on_step") == [derived.on_step]
    assert trainer.methods("on_epoch") == [own.on_epoch]
    assert trainer.methods("on_checkpoint") == []


@pytest.mark.parametrize("wrong", [OnStep, object(), print])
def test_what_is_no_callback_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"among the callbacks; expected instances of srunddp.train.Callback -> "):
        trainer_of(callbacks=(wrong,)).fit(Numbered(4))
