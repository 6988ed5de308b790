"""Steps of two ranks with the options of DistributedDataParallel; run as ``steps.py FOLDER``."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, SequentialLR, StepLR
from torch.utils.data import TensorDataset

from srunddp.train import Callback, CheckpointConfig, DDPConfig, Trainer
from tests.train.forked import world_of
from tests.train.problems import classes, message, trainer_of
from tests.train.worlds import StandIn

SCHEDULERS: dict[str, Any] = {
    "constant": None,
    "step": lambda optimizer: StepLR(optimizer, 3, gamma=0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), ExponentialLR(optimizer, 0.9)], milestones=[6]
    ),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 4))


def trained(world: StandIn, model: nn.Module | None = None, samples: int = 48, **changes: Any) -> Any:
    """The weights and the losses of three epochs."""
    trainer = trainer_of(world=world, model=model or network(), **{"epochs": 3} | changes)
    records = trainer.fit(classes(samples))
    return trainer.model.state_dict(), [record.train["loss"] for record in records]


def hooks(world: StandIn) -> Any:
    return {hook: trained(world, ddp=DDPConfig(hook=hook)) for hook in ("none", "fp16", "powersgd")}


def refused(world: StandIn) -> Any:
    return [
        message(lambda ddp=ddp: trained(world, ddp=ddp))
        for ddp in (DDPConfig(hook="bf16"), DDPConfig(sync_batchnorm=True))
    ]


def shared_gradients(world: StandIn) -> Any:
    """How often gradients are all-reduced: 48 samples in steps of 2 ranks, 3 micro-batches of 4, a rest of none."""
    calls = 0

    def counted(bucket: Any) -> Any:
        nonlocal calls
        calls += 1
        return default_hooks.allreduce_hook(None, bucket)

    trainer = trainer_of(world=world, model=network(), accumulation=3)
    assert trainer._wrapped._ddp is not None
    trainer._wrapped._ddp.register_comm_hook(None, lambda _, bucket: counted(bucket))
    trainer.fit(classes(48))
    return calls, trainer.state.step


class Recomputed(nn.Linear):
    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        Recomputed.calls += self.training
        return super().forward(inputs)


def checkpointed(world: StandIn) -> Any:
    """Weights, keys and calls of a layer in training: by (activation checkpointing, static graph, accumulation)."""
    results = {}
    for options in [(False, False, 1), (True, False, 1), (True, True, 1), (False, False, 2), (True, True, 2)]:
        again, static_graph, accumulation = options
        torch.manual_seed(0)
        model = nn.Sequential(Recomputed(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 4))
        Recomputed.calls = 0
        torch.manual_seed(1)
        ddp = DDPConfig(activation_checkpointing=("Recomputed",) if again else (), static_graph=static_graph)
        results[options] = (*trained(world, model, ddp=ddp, accumulation=accumulation), Recomputed.calls)
    return results


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


def branches(world: StandIn) -> Any:
    batch_size = 8 // world.world_size
    return trained(world, Branches(), ddp=DDPConfig(find_unused_parameters=True), batch_size=batch_size)


def buffers(world: StandIn) -> Any:
    """BatchNorm's running means of each rank, at first and after training, by broadcast_buffers."""
    results = {}
    for broadcast in (True, False):
        torch.manual_seed(world.rank)
        model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))
        model[0].running_mean.fill_(float(world.rank))
        trainer = trainer_of(world=world, model=model, ddp=DDPConfig(broadcast_buffers=broadcast))
        first = model[0].running_mean.clone()
        trainer.fit(classes(32), classes(8))
        results[broadcast] = (first, model[0].running_mean.clone())
    return results


def overflow(world: StandIn) -> Any:
    """Whether weights have changed by a step in fp16 whose gradients overflow on rank 1 alone, and the scale."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    inputs = torch.full((8, 8), 0.01)
    inputs[1::2] = 1e3
    trainer = trainer_of(world=world, model=model, precision="fp16")
    trainer.fit(TensorDataset(inputs, torch.zeros(8, dtype=torch.int64)), order=InTurn())
    same = all(map(torch.equal, before, model.parameters()))
    return same, trainer.state.scaler.get_scale(), trainer.state.step


class InTurn:
    def __len__(self) -> int:
        return 8

    def indices(self, epoch: int) -> Tensor:
        return torch.arange(8)


def compiled(world: StandIn) -> Any:
    """By TorchDynamo without a code generator: a C++ compiler would take longer, and may be missing."""
    whole, calls = torch.compile, []

    def counted(model: Any, **options: Any) -> Any:
        calls.append(type(model).__name__)
        return whole(model, backend="eager", **options)

    torch.compile = counted
    try:
        return trained(world, ddp=DDPConfig(compile=True), epochs=1, samples=16), calls
    finally:
        torch.compile = whole


def uncompiled(world: StandIn) -> Any:
    return trained(world, epochs=1, samples=16)


class LearningRates(Callback):
    """The learning rate of each step."""

    def __init__(self) -> None:
        self.next: dict[int, float] = {}

    def on_step(self, trainer: Trainer, step: int, loss: float | None) -> None:
        self.next[step + 1] = float(trainer.optimizer.param_groups[0]["lr"])


def scaled(world: StandIn, folder: Path, scale: str, name: str, resume: str) -> Any:
    """The learning rate after each step, of 12 steps of one rank in all; the first run ends after 4 steps of two."""
    rates = LearningRates()
    trainer = trainer_of(
        rates,
        world=world,
        model=network(),
        scheduler=SCHEDULERS[name],
        scale_lr=scale,
        resume=resume,
        epochs=3,
        batch_size=8,
        output_dir=str(folder),
        checkpoint=CheckpointConfig(every_epochs=0, every_steps=4, keep_last=99, keep_best=0),
    )
    trainer.fit(classes(64))
    return rates.next


def together(world: StandIn, folder: Path) -> dict[str, Any]:
    scenarios = (hooks, refused, shared_gradients, checkpointed, branches, buffers, overflow, compiled, uncompiled)
    results: dict[str, Any] = {scenario.__name__: scenario(world) for scenario in scenarios}
    for scale, name in SCALED:
        results[f"{scale} {name}"] = scaled(world, folder / scale / name, scale, name, "no")
    return results


SCALED = [("linear", "constant"), ("sqrt", "step"), ("linear", "lambda"), ("linear", "sequential")]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {"two": world_of(2, folder, together, folder)}
    for scale, name in SCALED:
        state = str(folder / scale / name / "checkpoints" / "step-00000004.pt")
        results[f"{scale} {name}"] = scaled(StandIn(), folder / scale / name, scale, name, state)
    results["alone"] = {"branches": branches(StandIn())}
    # As TORCH_DISTRIBUTED_DEBUG does. With DETAIL torch 2.13 itself crashes in DistributedDataParallel on Gloo.
    dist.set_debug_level(dist.DebugLevel.INFO)
    results["debug"] = world_of(2, folder, functools.partial(trained, output_dir=str(folder / "debug")))
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
