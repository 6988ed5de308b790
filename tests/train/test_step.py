"""A step, option by option: alone against a hand-written loop, and on two ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, StepLR
from torch.utils.data import TensorDataset

from srunddp.errors import ConfigError
from srunddp.train import Callback, DDPConfig, Trainer, load_checkpoint
from srunddp.train.optimizer import lr_factor, scale_lr, use_fused
from tests.train import problems
from tests.train.conftest import results_of
from tests.train.problems import Stop, classes, settings
from tests.train.steps import SCALED, SCHEDULERS, LearningRates, Recomputed, network

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return results_of("steps.py", tmp_path_factory.mktemp("steps"), timeout=180)


def trainer_of(*callbacks: Callback, model: nn.Module | None = None, **changes: Any) -> Trainer:
    return problems.trainer_of(*callbacks, model=model or network(), **changes)


def same(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(ours[name], value) for name, value in theirs.items())


def close(ours: Any, theirs: Any, atol: float) -> None:
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=atol)


# Against a hand-written loop.


def by_hand(model: nn.Module, precision: str, clip_norm: float | None, accumulation: int) -> None:
    """Two epochs of 48 samples in batches of 4."""
    inputs, targets = classes(48).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    for epoch in (1, 2):
        order = torch.randperm(48, generator=torch.Generator().manual_seed(epoch))
        for number, rows in enumerate(order.split(4)):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
            if accumulation > 1:
                loss = loss * (1 / accumulation)
            scaler.scale(loss).backward()
            if (number + 1) % accumulation:
                continue
            if clip_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("clip_norm", "accumulation"), [(None, 1), (0.1, 1), (0.5, 4)])
def test_a_step_is_that_of_a_hand_written_loop(precision: str, clip_norm: float | None, accumulation: int) -> None:
    """To the bit; the first steps of fp16 overflow, and are left out by both."""
    ours, theirs = network(), network()
    trainer_of(model=ours, precision=precision, clip_norm=clip_norm, accumulation=accumulation, epochs=2).fit(
        classes(48)
    )
    by_hand(theirs, precision, clip_norm, accumulation)
    assert same(ours.state_dict(), theirs.state_dict())
    assert not same(ours.state_dict(), network().state_dict())


def test_forward_runs_in_the_precision_and_weights_keep_theirs() -> None:
    seen = set()

    class Seen(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            output = super().forward(inputs)
            seen.add((self.training, output.dtype))
            return output

    model = Seen(8, 4)
    trainer_of(model=model, precision="bf16").fit(classes(8), classes(8))
    assert seen == {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert model.weight.dtype == torch.float32


def test_gradients_are_clipped_to_the_norm_of_all_together() -> None:
    norms = []

    class Norms(Callback):
        def on_step(self, trainer: Trainer, step: int, loss: float | None) -> None:
            gradients = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
            norms.append(float(nn.utils.get_total_norm(gradients)))

    trainer_of(Norms(), clip_norm=0.01).fit(classes(16))
    assert norms == pytest.approx([0.01] * 4, rel=1e-3)


# Optimizer.


def chosen(make: Callable[[Any], Any], model: nn.Module | None = None) -> Any:
    model = model or nn.Linear(2, 2)
    optimizer = make(model.parameters())
    use_fused(optimizer, model)
    return optimizer.param_groups[0].get("fused")


class OwnSGD(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), True),
        (lambda parameters: torch.optim.Adam(parameters), True),
        (lambda parameters: torch.optim.AdamW(parameters), True),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=False), False),
        (lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True), None),
        (lambda parameters: torch.optim.Adam(parameters, lr=0.1, differentiable=True), None),
        (lambda parameters: OwnSGD(parameters, lr=0.1), None),
        (lambda parameters: torch.optim.RMSprop(parameters, lr=0.1), None),
    ],
)
def test_fused_kernels_are_used_unless_the_user_has_chosen(make: Any, expected: Any) -> None:
    assert chosen(make) is expected


def test_fused_kernels_are_off_for_sparse_gradients_or_if_asked() -> None:
    assert chosen(lambda parameters: torch.optim.SGD(parameters, lr=0.1), nn.Embedding(3, 2, sparse=True)) is None
    assert trainer_of(fused=False).optimizer.param_groups[0]["fused"] is None


def test_an_optimizer_with_several_gradients_a_step_is_refused() -> None:
    model = nn.Linear(8, 4)
    with pytest.raises(ConfigError, match=r"the optimizer LBFGS; expected .* -> "):
        trainer_of(model=model, optimizer=torch.optim.LBFGS(model.parameters()))


# Learning rate. Fit makes five steps.


def rates_after(**changes: Any) -> list[float]:
    """The learning rate that the step after each of five would have."""
    seen = LearningRates()
    trainer_of(seen, batch_size=4, **changes).fit(classes(20))
    return list(seen.next.values())


def test_the_learning_rate_grows_linearly_and_falls_as_a_cosine() -> None:
    assert rates_after() == [0.1] * 5
    cosine = [0.1 * 0.5 * (1 + math.cos(math.pi * done / 4)) for done in (0, 1, 2, 3, 4)]
    assert rates_after(schedule="cosine", warmup_steps=1) == pytest.approx(cosine)
    assert rates_after(warmup_steps=3) == pytest.approx([0.05, 0.075, 0.1, 0.1, 0.1])


def test_the_first_step_is_warmed_up_already() -> None:
    trainer = trainer_of(Stop(1), warmup_steps=3, epochs=3)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(classes(4))
    twin = network()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.025, momentum=0.9, fused=True)
    inputs, targets = classes(4).tensors
    nn.functional.cross_entropy(twin(inputs), targets).backward()
    optimizer.step()
    close(trainer.model.state_dict(), twin.state_dict(), 1e-7)


@pytest.mark.parametrize("finished", [True, False])
def test_a_scheduler_of_torch_is_stepped_after_each_step(finished: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def make(optimizer: Any) -> LRScheduler:
        return StepLR(optimizer, 2, gamma=0.1)

    scheduler = make(optimizer) if finished else make
    found = rates_after(model=model, optimizer=optimizer, scheduler=scheduler)
    assert found == pytest.approx([0.1, 0.01, 0.01, 0.001, 0.001])


@pytest.mark.parametrize(
    ("scale", "base", "expected"),
    [("no", None, 1.0), ("linear", None, 24.0), ("sqrt", None, math.sqrt(24)), ("linear", 256, 0.75)],
)
def test_the_learning_rate_is_scaled_with_a_step_s_samples(scale: Any, base: int | None, expected: float) -> None:
    config = settings(batch_size=8, accumulation=4, scale_lr=scale, base_batch_size=base)
    assert lr_factor(config, world_size=6) == pytest.approx(expected)


def test_groups_that_share_a_tensor_are_scaled_once() -> None:
    shared = torch.tensor(0.1)
    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in layers], lr=shared)
    scale_lr(optimizer, 2.0)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda optimizer: OneCycleLR(optimizer, 0.4, total_steps=6), "OneCycleLR and scale_lr=linear"),
        (lambda optimizer: CyclicLR(optimizer, 0.1, 0.4), "CyclicLR and scale_lr=linear"),
        (lambda optimizer: None, "the function for the scheduler returned a NoneType"),
    ],
)
def test_a_scheduler_that_cannot_be_scaled_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words}.* -> "):
        trainer_of(scale_lr="linear", accumulation=2, scheduler=make).fit(classes(8))


def test_a_finished_scheduler_cannot_be_scaled() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_of(model=model, optimizer=optimizer, scheduler=StepLR(optimizer, 2), scale_lr="linear")
    with pytest.raises(ConfigError, match=r"a finished StepLR and scale_lr=linear; .* -> pass a function"):
        trainer.fit(classes(8))


@pytest.mark.parametrize(("scale", "name"), SCALED)
def test_another_world_size_resumes_with_its_own_learning_rate(results: Any, scale: str, name: str) -> None:
    """Two ranks for 12 steps, and one that goes on from the 4th: as if each had begun so."""
    two, one = results["two"][0][f"{scale} {name}"], results[f"{scale} {name}"]
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer) if SCHEDULERS[name] else None
    plain = {}
    for step in range(1, 25):
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        plain[step + 1] = optimizer.param_groups[0]["lr"]
    factor = {"linear": 2.0, "sqrt": math.sqrt(2)}[scale]
    assert len(two) == 12
    assert two == pytest.approx({step: factor * plain[step] for step in two})
    assert min(one) == 6
    assert one == pytest.approx({step: plain[step] for step in one})


# DistributedDataParallel's settings, on two ranks.


def test_gradients_are_shared_once_a_step(results: Any) -> None:
    """A step is three micro-batches of 4 on each of two ranks: 48 samples are two steps."""
    for calls, steps in (rank["shared_gradients"] for rank in results["two"]):
        assert calls == steps == 2


@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
def test_hooks_train(results: Any, hook: str) -> None:
    first, second = (rank["hooks"] for rank in results["two"])
    assert same(first[hook][0], second[hook][0])
    close(first[hook][0], first["none"][0], 5e-3)
    assert hook == "powersgd" or not same(first[hook][0], first["none"][0])  # that one compresses only later
    assert first[hook][1][-1] < first[hook][1][0]


def test_what_the_backend_cannot_do_is_refused_on_all_ranks(results: Any) -> None:
    for bf16, sync_batchnorm in (rank["refused"] for rank in results["two"]):
        assert (
            bf16 == "ddp.hook bf16 with gloo; expected NCCL, with which alone torch has this hook -> use ddp.hook=fp16"
        )
        assert sync_batchnorm.startswith("ddp.sync_batchnorm on cpu; expected GPUs")


def test_activations_are_computed_again_with_equal_results(results: Any) -> None:
    """Also with dropout, with a static graph, and with accumulation."""
    for by_options in (rank["checkpointed"] for rank in results["two"]):
        for again, static_graph, accumulation in [(True, False, 1), (True, True, 1), (True, True, 2)]:
            weights, losses, calls = by_options[again, static_graph, accumulation]
            plain, plain_losses, plain_calls = by_options[False, False, accumulation]
            assert weights.keys() == plain.keys()
            if accumulation == 1:
                assert same(weights, plain)
            close(weights, plain, 1e-6)
            assert losses == pytest.approx(plain_losses)
            assert calls == 2 * plain_calls


@pytest.mark.parametrize("name", ["Nonsense", "Sequential"])
def test_only_modules_in_the_model_can_be_computed_again(name: str) -> None:
    """Not the model as a whole, of which torch would say nothing and leave it as it is."""
    model = nn.Sequential(Recomputed(8, 4), nn.ReLU())
    with pytest.raises(ConfigError, match=f"names {name}; expected classes .*: ReLU, Recomputed -> "):
        trainer_of(model=model, ddp=DDPConfig(activation_checkpointing=(name,)))


def test_parameters_without_a_gradient_are_found(results: Any) -> None:
    first, second = (rank["branches"] for rank in results["two"])
    assert same(first[0], second[0])
    close(first[0], results["alone"]["branches"][0], 1e-6)


def test_buffers_are_equal_at_first_and_then_each_ranks_own(results: Any) -> None:
    first, second = (rank["buffers"] for rank in results["two"])
    for broadcast in (True, False):
        assert torch.equal(first[broadcast][0], second[broadcast][0])
        assert torch.equal(first[broadcast][1], second[broadcast][1]) == broadcast


def test_a_step_that_overflows_on_one_rank_is_left_out_on_all(results: Any) -> None:
    for unchanged, scale, steps in (rank["overflow"] for rank in results["two"]):
        assert unchanged
        assert (scale, steps) == (65536.0 / 2, 1)


def test_a_compiled_model_trains_the_same_with_plain_checkpoints(results: Any) -> None:
    for rank in results["two"]:
        (weights, losses), calls = rank["compiled"]
        assert calls == ["DistributedDataParallel", "Sequential"]
        assert weights.keys() == network().state_dict().keys()
        close(weights, rank["uncompiled"][0], 1e-6)
        assert losses == pytest.approx(rank["uncompiled"][1])


def test_training_is_the_same_where_torch_tells_more(results: Any) -> None:
    """As with TORCH_DISTRIBUTED_DEBUG=INFO."""
    for weights, _ in results["debug"]:
        close(weights, results["two"][0]["hooks"]["none"][0], 1e-6)


# Alone.


def test_images_and_weights_have_their_channels_innermost(tmp_path: Path) -> None:
    seen = []

    class Layout(nn.Conv2d):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(inputs.is_contiguous(memory_format=torch.channels_last))
            return super().forward(inputs)

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Layout(3, 4, 3), nn.Flatten(), nn.Linear(144, 4))

    images = TensorDataset(torch.randn(8, 3, 8, 8), torch.arange(8) % 4)
    weights = []
    for channels_last in (True, False):
        seen.clear()
        trainer = trainer_of(
            model=model(),
            ddp=DDPConfig(channels_last=channels_last),
            output_dir=str(tmp_path / str(channels_last)),
            tensorboard=False,
        )
        trainer.fit(images, images)
        assert seen == [channels_last] * 4
        weight = trainer.model[0].weight
        assert weight.is_contiguous(memory_format=torch.channels_last) == channels_last
        state = load_checkpoint(tmp_path / str(channels_last) / "checkpoints" / "step-00000002.pt")
        weights.append(state["model"])
    close(*weights, 1e-6)
