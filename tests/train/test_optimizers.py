"""What a Trainer does to optimizers, and what it leaves to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from srunddp.train import Callback, Trainer
from tests.train import problems
from tests.train.problems import OnStep, classes

pytestmark = pytest.mark.usefixtures("one_thread")


def rate(optimizer: Any) -> float:
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("fits", [True, False])
def test_a_learning_rate_is_scaled_once_however_many_trainers_have_it(fits: bool) -> None:
    """A second one evaluates, or trains on for another phase."""
    model = nn.Linear(8, 4)
    optimizer = SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"scale_lr": "linear", "base_batch_size": 1}
    for _ in range(3):
        trainer = problems.trainer_of(model=model, optimizer=optimizer, **options)
        if fits:
            trainer.fit(classes(16))
        else:
            trainer.evaluate(classes(16))
    assert rate(optimizer) == pytest.approx(0.04 if fits else 0.01)


def test_a_trainer_changes_no_optimizer_before_it_trains() -> None:
    model = nn.Linear(8, 4)
    optimizer = SGD(model.parameters(), lr=0.01)
    before = [{**group} for group in optimizer.param_groups]
    problems.trainer_of(model=model, optimizer=optimizer, scale_lr="linear", base_batch_size=1)
    assert [{**group} for group in optimizer.param_groups] == before


class Norms(Callback):
    """Notes the gradients of the parameters that no optimizer steps."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        gradient = trainer.model.get_parameter("0.weight").grad
        assert gradient is not None
        self.seen.append(gradient.clone())


def partly_stepped(frozen: bool, **changes: Any) -> tuple[nn.Sequential, Norms]:
    """A network of which the optimizer steps the last layer; the first one is frozen, or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].requires_grad_(not frozen)
    norms = Norms()
    callbacks = [] if frozen else [norms]
    optimizer = SGD(model[2].parameters(), lr=0.0 if "lr" not in changes else changes.pop("lr"))
    problems.trainer_of(*callbacks, model=model, optimizer=optimizer, **changes).fit(classes(16))
    return model, norms


def test_gradients_of_what_is_not_stepped_are_those_of_one_step() -> None:
    _, norms = partly_stepped(False, batch_size=16, epochs=3)
    first, second, third = norms.seen  # of one batch, with a learning rate of 0
    assert torch.allclose(first, second)
    assert torch.allclose(first, third)


def test_what_is_not_stepped_does_not_count_in_the_norm() -> None:
    frozen, _ = partly_stepped(True, lr=0.5, max_grad_norm=0.01)
    forgotten, _ = partly_stepped(False, lr=0.5, max_grad_norm=0.01)
    assert torch.allclose(frozen.get_parameter("2.weight"), forgotten.get_parameter("2.weight"))


class TwoSets(SGD):
    """As schedule-free optimizers: trains other weights than those to evaluate, 1 apart here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.training = False

    def train(self) -> None:
        if not self.training:
            self.training = True
            self._move(1.0)

    def eval(self) -> None:
        if self.training:
            self.training = False
            self._move(-1.0)

    @torch.no_grad()
    def _move(self, by: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter += by

    def step(self, closure: Any = None) -> Any:
        assert self.training
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        found["param_groups"][0]["training"] = self.training
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.training = state["param_groups"][0]["training"]
        super().load_state_dict(state)


def test_an_optimizer_with_modes_is_evaluated_and_saved_in_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = TwoSets(model)
    modes: list[tuple[bool, bool]] = []
    model.register_forward_hook(
        lambda module, *_: modes.append((module.training, optimizer.training))
    )
    states: list[bool] = []
    trainer = problems.trainer_of(
        OnStep(lambda trainer, step: states.append(optimizer.training)),
        model=model,
        optimizer=optimizer,
        epochs=2,
        evaluate_every_steps=2,
        output_dir=str(tmp_path),
    )
    trainer.fit(classes(16), classes(8))
    assert set(modes) == {(True, True), (False, False)}
    assert set(states) == {True}
    assert not optimizer.training
    saved = torch.load(tmp_path / "checkpoints" / "step-00000008.pt", weights_only=True)
    assert saved["optimizer"][0]["param_groups"][0]["training"] is False
    assert torch.equal(saved["model"]["weight"], model.weight)


def test_and_goes_on_from_there(tmp_path: Path) -> None:
    def run(folder: Path, epochs: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        trainer = problems.trainer_of(
            model=model,
            optimizer=TwoSets(model),
            epochs=epochs,
            output_dir=str(folder),
            resume="auto",
        )
        trainer.fit(classes(16), classes(8))
        return model.weight.detach().clone()

    run(tmp_path / "part", 1)
    assert torch.equal(run(tmp_path / "part", 3), run(tmp_path / "whole", 3))


class FunctionalEmbedding(nn.Module):
    """Whose gradient is sparse, without a layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 4, dtype=torch.float64))

    def forward(self, indices: Tensor) -> Tensor:
        return nn.functional.embedding(indices, self.table, sparse=True).mean(dim=1)


def test_sparse_gradients_need_no_setting() -> None:
    """The fused kernels, which are taken by default, refuse them."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(0, 20, (8, 3)), torch.randint(0, 4, (8,)))
    tables = []
    for fused in (True, False):
        torch.manual_seed(1)
        model = FunctionalEmbedding()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        problems.trainer_of(model=model, optimizer=optimizer, fused=fused).fit(data)
        tables.append(model.table.detach().clone())
    assert torch.equal(*tables)
