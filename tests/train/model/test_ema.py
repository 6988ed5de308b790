"""The average of the weights: what it is, who uses it, and what is kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from srunddp.errors import ConfigError
from srunddp.train import Callback, CheckpointError, Trainer, load_checkpoint
from srunddp.train.model.ema import EMA
from tests.conftest import ROOT
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import OnStep, classes, normalised_network, same, trainer_of

pytestmark = pytest.mark.usefixtures("one_thread")

TESTS = classes(24)


def averaging(*callbacks: Callback, model: nn.Module | None = None, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    return trainer_of(
        *callbacks,
        model=model or normalised_network(),
        **({"epochs": 3, "ema_decay": 0.8} | changes),
    )


def of(trainer: Trainer) -> nn.Module:
    assert trainer.averaged is not None
    return trainer.averaged


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    inputs, targets = TESTS.tensors
    return nn.functional.cross_entropy(model.eval()(inputs), targets).item()


def test_the_ema_equals_torchs_and_copies_batchnorm_statistics() -> None:
    model = normalised_network()
    torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    trainer = averaging(
        OnStep(lambda trainer, step: torchs.update_parameters(trainer.model)), model=model
    )
    trainer.fit(classes(40), TESTS)
    counter = "1.num_batches_tracked"
    ours = of(trainer).state_dict()
    theirs = torchs.module.state_dict()
    assert ours.pop(counter) == model.state_dict()[counter] == 30
    del theirs[counter]
    assert same(ours, theirs)
    assert not torch.equal(ours["1.running_mean"], model[1].running_mean)  # type: ignore[index]


def test_the_ema_begins_at_weights_loaded_before_the_first_step() -> None:
    trainer = averaging(epochs=1, ema_decay=0.999)
    trainer.model.load_state_dict(
        {name: 0 * value for name, value in trainer.model.state_dict().items()}
    )
    trainer.fit(classes(4))
    assert same(of(trainer).state_dict(), trainer.model.state_dict())


def test_an_evaluation_uses_the_ema_and_training_does_not(tmp_path: Path) -> None:
    """The best checkpoint holds it by the model's names, under a key that the reference names."""
    assert '`["ema"]`' in (ROOT / "docs" / "reference" / "files.md").read_text()
    trainer = averaging(output_dir=str(tmp_path))
    without = averaging(ema_decay=None)
    records, others = (each.fit(classes(40), TESTS) for each in (trainer, without))
    assert records[-1].val["loss"] == pytest.approx(loss_of(of(trainer)), abs=1e-6)
    assert abs(records[-1].val["loss"] - others[-1].val["loss"]) > 1e-3
    assert [record.train for record in records] == [record.train for record in others]
    assert same(trainer.model.state_dict(), without.model.state_dict())
    assert without.averaged is None
    best = torch.load(tmp_path / "checkpoints" / "best.pt")
    model = normalised_network()
    model.load_state_dict(best["ema"])
    assert best["best"] == pytest.approx(loss_of(model), abs=1e-6)
    assert best["best"] == pytest.approx(min(record.val["loss"] for record in records), abs=1e-6)


def test_a_checkpoint_without_an_average_is_where_one_begins(tmp_path: Path) -> None:
    first = averaging(output_dir=str(tmp_path), epochs=1, ema_decay=None)
    first.fit(classes(40))
    (path,) = (tmp_path / "checkpoints").glob("step-*.pt")
    state = load_checkpoint(path)
    assert state["ema"] is None
    trainer = averaging(output_dir=str(tmp_path), epochs=1, ema_decay=0.999, resume="auto")
    trainer.fit(classes(40))
    assert same(of(trainer).state_dict(), first.model.state_dict())


def test_a_checkpoint_with_an_ema_is_refused_by_a_run_without(tmp_path: Path) -> None:
    averaging(output_dir=str(tmp_path), epochs=1).fit(classes(40))
    trainer = averaging(output_dir=str(tmp_path), resume="auto", ema_decay=None)
    with pytest.raises(
        CheckpointError, match=r"has an average of the weights, .* -> set ema_decay, or start with"
    ):
        trainer.fit(classes(40), TESTS)


def train_average(world: LocalWorld) -> Any:
    torch.manual_seed(world.rank)
    model = normalised_network()
    trainer = trainer_of(model=model, world=world, epochs=2, ema_decay=0.8)
    records = trainer.fit(classes(58), TESTS)
    return of(trainer).state_dict(), model.state_dict(), records[-1].val["loss"]


def test_all_ranks_have_rank_0s_average_and_its_figures(tmp_path: Path) -> None:
    """Also with BatchNorm, whose running statistics differ between ranks after a step."""
    (first, model, loss), *others = run_ranks(3, tmp_path, train_average)
    assert not torch.equal(first["1.running_mean"], model["1.running_mean"])
    for state, _, figure in others:
        assert same(state, first)
        assert figure == loss
    own = normalised_network()
    own.load_state_dict(first)
    assert loss == pytest.approx(loss_of(own), abs=1e-6)


class Block(nn.Sequential):
    pass


def test_the_ema_under_activation_checkpointing_has_plain_names(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Block(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 4))

    plain = averaging(model=model())
    ours = averaging(model=model(), output_dir=str(tmp_path), activation_checkpointing=("Block",))
    for trainer in (plain, ours):
        trainer.fit(classes(40), TESTS)
    assert same(
        load_checkpoint(tmp_path / "checkpoints" / "best.pt")["ema"], of(plain).state_dict()
    )


def test_the_average_is_compiled_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []

    class Compiled(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor) -> Any:
            compiled.append(self.model)
            return self.model(inputs)

    monkeypatch.setattr(torch, "compile", Compiled)
    trainer = averaging(epochs=1, compile=True)
    trainer.fit(classes(8), classes(4))
    # The batch that is tried first, two steps, and the evaluation.
    assert compiled == [of(trainer), trainer.model, trainer.model, of(trainer)]


class Changing(nn.Module):
    """A float mask of minus infinities, a flag, and buffers that another tensor takes the place
    of.
    """

    flag: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("mask", torch.full((4,), -torch.inf))
        self.register_buffer("flag", torch.tensor([True]))
        self.register_buffer("cache", None, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        if self.training:
            self.flag = ~self.flag
            self.cache = outputs.detach()[: 1 + int(self.flag)]
        return outputs


def test_other_buffers_are_the_models_whatever_they_are() -> None:
    trainer = averaging(model=Changing(), epochs=1)
    trainer.fit(classes(20))
    ours = dict(of(trainer).named_buffers())
    theirs = dict(trainer.model.named_buffers())
    assert set(ours) == {"mask", "flag", "cache"}
    assert same(ours, theirs)
    assert all(ours[name] is not theirs[name] for name in ours)


def test_no_value_is_read_back_from_the_device() -> None:
    """A tensor of the device meta has none."""
    average = EMA(normalised_network().to("meta"), 0.9)
    average.update(first=True)
    average.update(first=False)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(8, 4)
    model.half = model.weight / 2  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match="ema_decay, and a model that cannot be copied: Only Tensors created"
    ):
        averaging(model=model)
