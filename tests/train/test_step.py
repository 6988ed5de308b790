"""A step, option by option: alone against a hand-written loop, and on two ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim.lr_scheduler import (
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from torch.utils.data import TensorDataset

from srunddp.errors import ConfigError
from srunddp.train import Callback, CheckpointConfig, DDPConfig, Trainer, load_checkpoint
from srunddp.train.data.order import Sequential
from srunddp.train.optimizer import lr_factor, scale_lr, use_fused, zero_grad
from tests.support.facts import tells
from tests.train import problems
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import OnStep, Stop, classes, counting, message, same, settings

pytestmark = pytest.mark.usefixtures("one_thread")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 4)
    )


def trainer_of(*callbacks: Callback, model: nn.Module | None = None, **changes: Any) -> Trainer:
    return problems.trainer_of(*callbacks, model=model or network(), **changes)


def trained(
    world: LocalWorld,
    model: nn.Module | None = None,
    samples: int = 48,
    epochs: int = 3,
    **changes: Any,
) -> Any:
    """The weights, and the losses of the epochs."""
    trainer = trainer_of(world=world, model=model, epochs=epochs, **changes)
    records = trainer.fit(classes(samples))
    return trainer.model.state_dict(), [record.train["loss"] for record in records]


def close(ours: Any, theirs: Any, atol: float) -> None:
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=atol)


# Against a hand-written loop.


def by_hand(
    model: nn.Module, precision: str, max_grad_norm: float | None, accumulation: int
) -> None:
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
            if max_grad_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("max_grad_norm", "accumulation"), [(None, 1), (0.1, 1), (0.5, 4)])
def test_a_step_is_that_of_a_hand_written_loop(
    precision: str, max_grad_norm: float | None, accumulation: int
) -> None:
    """To the bit; the first steps of fp16 overflow, and are left out by both."""
    ours = network()
    theirs = network()
    trainer_of(
        model=ours,
        precision=precision,
        max_grad_norm=max_grad_norm,
        gradient_accumulation_steps=accumulation,
        epochs=2,
    ).fit(classes(48))
    by_hand(theirs, precision, max_grad_norm, accumulation)
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

    def note(trainer: Trainer, step: int) -> None:
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        whole = [gradient for gradient in gradients if gradient is not None]
        assert len(whole) == len(gradients)
        norms.append(float(nn.utils.get_total_norm(whole)))

    trainer_of(OnStep(note), max_grad_norm=0.01).fit(classes(16))
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
    assert (
        chosen(
            lambda parameters: torch.optim.SGD(parameters, lr=0.1), nn.Embedding(3, 2, sparse=True)
        )
        is None
    )
    optimizer = problems.optimizer_of(trainer_of(fused=False))
    assert optimizer.param_groups[0]["fused"] is None


# Learning rate. Fit makes five steps.


def test_an_optimizer_s_own_zero_grad_is_called() -> None:
    model = network()
    calls = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append(set_to_none)

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    zero_grad(Own(model.parameters()))
    assert calls == [True]
    assert all(parameter.grad is not None for parameter in model.parameters())
    zero_grad(torch.optim.SGD(model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def learning_rates() -> tuple[Callback, dict[int, float]]:
    """A callback, and the learning rate that it keeps of each step."""
    rates: dict[int, float] = {}

    def note(trainer: Trainer, step: int) -> None:
        rates[step] = float(problems.optimizer_of(trainer).param_groups[0]["lr"])

    return OnStep(note), rates


def rates_after(**changes: Any) -> list[float]:
    """The learning rates of five steps."""
    callback, rates = learning_rates()
    trainer_of(callback, batch_size=4, **changes).fit(classes(20))
    return list(rates.values())


def test_the_learning_rate_grows_linearly_and_falls_as_a_cosine() -> None:
    assert rates_after() == [0.1] * 5
    cosine = [0.1 * 0.5 * (1 + math.cos(math.pi * done / 4)) for done in (0, 1, 2, 3)]
    assert rates_after(schedule="cosine", warmup_steps=1) == pytest.approx([0.05, *cosine])
    assert rates_after(warmup_steps=3) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


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
    assert found == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])


@pytest.mark.parametrize(
    ("scale", "base", "expected"),
    [
        ("no", None, 1.0),
        ("linear", None, 24.0),
        ("sqrt", None, math.sqrt(24)),
        ("linear", 256, 0.75),
    ],
)
def test_the_learning_rate_is_scaled_with_a_step_s_samples(
    scale: Any, base: int | None, expected: float
) -> None:
    config = settings(
        batch_size=8, gradient_accumulation_steps=4, scale_lr=scale, base_batch_size=base
    )
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
        (
            lambda optimizer: OneCycleLR(optimizer, 0.4, total_steps=6),
            "OneCycleLR and scale_lr=linear",
        ),
        (lambda optimizer: CyclicLR(optimizer, 0.1, 0.4), "CyclicLR and scale_lr=linear"),
        (lambda optimizer: None, "the function for the scheduler returned a NoneType"),
    ],
)
def test_a_scheduler_that_cannot_be_scaled_is_refused(make: Any, words: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scheduler, said in (
        (make, words),
        (StepLR(optimizer, 2), "a finished StepLR and scale_lr=linear"),
    ):
        trainer = trainer_of(
            model=model,
            optimizer=optimizer,
            scale_lr="linear",
            gradient_accumulation_steps=2,
            scheduler=scheduler,
        )
        with pytest.raises(ConfigError, match=f"{said}.* -> "):
            trainer.fit(classes(8))


SCHEDULERS: dict[str, Any] = {
    "constant": None,
    "step": lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "sequential": lambda optimizer: SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, total_iters=1), ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
}


def resumable_rates(
    world: LocalWorld, folder: Path, resume: str, **options: Any
) -> dict[int, float]:
    """The learning rate of each step of 8 samples a rank: of 64 samples, three times."""
    callback, rates = learning_rates()
    checkpoint = CheckpointConfig(every_epochs=0, every_steps=4, keep_last=99, keep_best=0)
    options = {
        "output_dir": str(folder),
        "epochs": 3,
        "batch_size": 8,
        "checkpoint": checkpoint,
        **options,
    }
    trainer_of(callback, world=world, resume=resume, **options).fit(classes(64))
    return rates


def two_ranks_rates(
    world: LocalWorld, folder: Path, options: dict[str, Any], name: str
) -> dict[int, float]:
    return resumable_rates(world, folder, "never", **options, scheduler=SCHEDULERS[name])


@pytest.mark.parametrize(
    ("scale", "name"),
    [("linear", "constant"), ("sqrt", "step"), ("linear", "lambda"), ("linear", "sequential")],
)
def test_another_world_size_resumes_with_its_own_learning_rate(
    scale: str, name: str, tmp_path: Path
) -> None:
    """Two ranks for 12 steps, and one that goes on from the 4th, an epoch's end: as if each had
    begun so.
    """
    options = {"scale_lr": scale, "scheduler_interval": "epoch"}
    two, _ = run_ranks(2, tmp_path, two_ranks_rates, tmp_path, options, name)
    checkpoint = str(tmp_path / "checkpoints" / "step-00000004.pt")
    one = resumable_rates(LocalWorld(), tmp_path, checkpoint, **options, scheduler=SCHEDULERS[name])
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer) if SCHEDULERS[name] else None
    plain = []
    for _ in range(3):
        plain.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    factor = {"linear": 2.0, "sqrt": math.sqrt(2)}[scale]
    assert two == pytest.approx({step: factor * plain[(step - 1) // 4] for step in range(1, 13)})
    assert one == pytest.approx({step: plain[1 + (step - 5) // 8] for step in range(5, 21)})


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}])
def test_a_cosine_goes_on_where_another_world_left_it(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """By the share of samples: on twice the ranks, and on one rank with another batch, it falls to
    0 at the end.
    """
    cosine: dict[str, Any] = {"schedule": "cosine"}
    one = resumable_rates(LocalWorld(), tmp_path, "never", **cosine)
    checkpoint = str(tmp_path / "checkpoints" / "step-00000012.pt")
    if options:
        rest = resumable_rates(LocalWorld(), tmp_path, checkpoint, **cosine, **options)
    else:
        rest, _ = run_ranks(2, tmp_path, partial(resumable_rates, **cosine), tmp_path, checkpoint)
    samples = 4 if options else 16
    by_sample = {8 * (step - 1): rate for step, rate in one.items()}
    for number, rate in enumerate(rest.values()):
        seen = 96 + samples * number
        assert rate == pytest.approx(by_sample.get(seen, rate)), seen
    assert list(rest.values())[-1] < 0.002


def test_a_scheduler_made_for_other_steps_is_refused(tmp_path: Path) -> None:
    scheduler = {"scheduler": lambda optimizer: StepLR(optimizer, 8)}
    resumable_rates(LocalWorld(), tmp_path, "never", **scheduler)
    words = "an epoch had 8 steps and now has 16; expected the same number.* -> use schedule"
    with pytest.raises(ConfigError, match=words):
        resumable_rates(LocalWorld(), tmp_path, "auto", **scheduler, batch_size=4, epochs=6)


# DistributedDataParallel's settings, on two ranks.


def count_all_reduces(world: LocalWorld) -> Any:
    calls: Counter[str] = Counter()
    hook = counting(calls, "buckets", default_hooks.allreduce_hook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_hooks, "fp16_compress_hook", lambda _, bucket: hook(None, bucket))
        trainer = trainer_of(
            world=world, gradient_accumulation_steps=3, ddp=DDPConfig(comm_hook="fp16")
        )
    trainer.fit(classes(48))
    return calls["buckets"], trainer.state.step


def test_gradients_are_shared_once_a_step(tmp_path: Path) -> None:
    """A step is three micro-batches of 4 on each of two ranks: 48 samples are two steps."""
    assert run_ranks(2, tmp_path, count_all_reduces) == [(2, 2)] * 2


def train_with_comm_hooks(world: LocalWorld) -> Any:
    return {hook: trained(world, ddp=DDPConfig(comm_hook=hook)) for hook in ("none", "fp16")}


def test_a_comm_hook_changes_the_weights_a_little(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, train_with_comm_hooks)
    (plain, _) = first["none"]
    (weights, losses) = first["fp16"]
    assert same(weights, second["fp16"][0])
    assert not same(weights, plain)
    close(weights, plain, 5e-3)
    assert losses[-1] < losses[0]


def refusals(world: LocalWorld) -> list[str]:
    unfit = (DDPConfig(comm_hook="bf16"), DDPConfig(sync_batchnorm=True))
    return [message(partial(trained, world, ddp=ddp)) for ddp in unfit]


def test_what_the_backend_cannot_do_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for bf16, sync_batchnorm in run_ranks(2, tmp_path, refusals):
        assert tells(bf16, "ddp.comm_hook bf16", "gloo", "; expected ", "NCCL", " -> ")
        assert tells(sync_batchnorm, "ddp.sync_batchnorm", "cpu", "; expected ", "GPUs")


class Recomputed(nn.Linear):
    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        Recomputed.calls += self.training
        return super().forward(inputs)


def train_recomputed(
    world: LocalWorld, names: tuple[str, ...], static_graph: bool, accumulation: int
) -> Any:
    """Weights, losses, and the calls of a layer."""
    torch.manual_seed(0)
    model = nn.Sequential(Recomputed(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 4))
    torch.manual_seed(1)
    options: dict[str, Any] = {
        "activation_checkpointing": names,
        "ddp": DDPConfig(static_graph=static_graph),
    }
    return (
        *trained(world, model, **options, gradient_accumulation_steps=accumulation),
        Recomputed.calls,
    )


@pytest.mark.parametrize(("static_graph", "accumulation"), [(False, 1), (True, 1), (True, 2)])
def test_activations_are_computed_again_with_equal_results(
    static_graph: bool, accumulation: int, tmp_path: Path
) -> None:
    """Also with dropout, with a static graph, and with accumulation."""
    plain = run_ranks(2, tmp_path, train_recomputed, (), False, accumulation)
    recomputed = run_ranks(
        2, tmp_path, train_recomputed, ("Recomputed",), static_graph, accumulation
    )
    for (weights, losses, calls), (expected, expected_losses, expected_calls) in zip(
        recomputed, plain, strict=True
    ):
        assert weights.keys() == expected.keys()
        if accumulation == 1:
            assert same(weights, expected)
        close(weights, expected, 1e-6)
        assert losses == pytest.approx(expected_losses)
        assert calls == 2 * expected_calls


@pytest.mark.parametrize("name", ["Nonsense", "Sequential"])
def test_only_modules_in_the_model_can_be_computed_again(name: str) -> None:
    """Not the model as a whole, of which torch would say nothing and leave it as it is."""
    model = nn.Sequential(Recomputed(8, 4), nn.ReLU())
    with pytest.raises(
        ConfigError, match=f"names {name}; expected classes .*: ReLU, Recomputed -> "
    ):
        trainer_of(model=model, activation_checkpointing=(name,))


class Branches(nn.Module):
    """Each branch takes part in half of the forward passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.branches[self.calls % 2](inputs)
        return output


def train_branches(world: LocalWorld) -> Any:
    batch_size = 8 // world.world_size
    weights, _ = trained(
        world, Branches(), ddp=DDPConfig(find_unused_parameters=True), batch_size=batch_size
    )
    return weights


def test_parameters_without_a_gradient_are_found(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, train_branches)
    assert same(first, second)
    close(first, train_branches(LocalWorld()), 1e-6)


def running_means(world: LocalWorld, broadcast: bool) -> Any:
    """BatchNorm's, at first and after training, in a part of a wider tensor."""
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[0].running_mean = torch.zeros(8, 2)[:, 0]
    model[0].running_mean.fill_(float(world.rank))
    trainer = trainer_of(world=world, model=model, ddp=DDPConfig(broadcast_buffers=broadcast))
    first = model[0].running_mean.clone()
    trainer.fit(classes(32), classes(8))
    return first, model[0].running_mean.clone()


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_are_equal_at_first_and_then_each_ranks_own(
    broadcast: bool, tmp_path: Path
) -> None:
    (first, mine), (other_first, other) = run_ranks(2, tmp_path, running_means, broadcast)
    assert torch.equal(first, other_first)
    assert torch.equal(mine, other) == broadcast


def train_overflowing(world: LocalWorld) -> Any:
    """Whether a step in fp16 has changed no weight, where gradients overflow on rank 1 alone; and
    the scale.
    """
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    inputs = torch.full((8, 8), 0.01)
    inputs[1::2] = 1e3
    trainer = trainer_of(world=world, model=model, precision="fp16")
    trainer.fit(TensorDataset(inputs, torch.zeros(8, dtype=torch.int64)), order=Sequential(8))
    return (
        all(map(torch.equal, before, model.parameters())),
        trainer.state.scaler.get_scale(),
        trainer.state.step,
    )


def test_a_step_that_overflows_on_one_rank_is_left_out_on_all(tmp_path: Path) -> None:
    assert run_ranks(2, tmp_path, train_overflowing) == [(True, 65536.0 / 2, 1)] * 2


def train_compiled(world: LocalWorld) -> Any:
    """By TorchDynamo without a code generator: a C++ compiler would take longer, and may be
    missing.
    """
    whole = torch.compile
    calls = []

    def counted(model: Any, **options: Any) -> Any:
        calls.append(type(model).__name__)
        return whole(model, backend="eager", **options)

    torch.compile = counted  # type: ignore[assignment]
    return trained(world, compile=True, epochs=1, samples=16), calls


def train_with_debug_level(world: LocalWorld, folder: Path) -> Any:
    # As TORCH_DISTRIBUTED_DEBUG does. With DETAIL torch 2.13 itself crashes in
    # DistributedDataParallel on Gloo.
    dist.set_debug_level(dist.DebugLevel.INFO)
    return trained(world, output_dir=str(folder), epochs=1, samples=16)


def test_a_compiled_model_trains_the_same_with_plain_checkpoints(tmp_path: Path) -> None:
    """And so does one where torch tells more."""
    (plain, losses), _ = run_ranks(2, tmp_path, trained, None, 16, 1)
    for (weights, found), calls in run_ranks(2, tmp_path, train_compiled):
        assert calls == ["Sequential"]
        assert weights.keys() == network().state_dict().keys()
        close(weights, plain, 1e-6)
        assert found == pytest.approx(losses)
    for weights, _ in run_ranks(2, tmp_path, train_with_debug_level, tmp_path / "debug"):
        close(weights, plain, 1e-6)


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
            channels_last=channels_last,
            output_dir=str(tmp_path / str(channels_last)),
            tensorboard=False,
        )
        trainer.fit(images, images)
        assert seen == [channels_last] * 5
        weight = trainer.model.get_parameter("0.weight")
        assert weight.is_contiguous(memory_format=torch.channels_last) == channels_last
        state = load_checkpoint(tmp_path / str(channels_last) / "checkpoints" / "step-00000002.pt")
        weights.append(state["model"])
    contiguous, channels_last_weights = weights
    close(contiguous, channels_last_weights, 1e-6)
