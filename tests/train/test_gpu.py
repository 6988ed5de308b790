"""What needs a GPU: run by ``bin/test -m gpu`` on a machine that has one, skipped elsewhere."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from srunddp.train import (
    Callback,
    CheckpointConfig,
    Config,
    DDPConfig,
    Trainer,
    accuracy,
    load_checkpoint,
    rng,
)
from srunddp.train.checkpoint.async_writer import Snapshot
from srunddp.train.data.loader import DistributedDataLoader
from srunddp.train.data.order import Sequential
from srunddp.train.metrics.accumulator import MetricAccumulator
from srunddp.train.model.ddp import DDPModel
from tests.support.starting import until
from tests.train import problems
from tests.train.conftest import ROOT
from tests.train.local_world import LocalWorld
from tests.train.problems import OnStep, classes

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


def world() -> LocalWorld:
    return LocalWorld(device=GPU)


def network(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 4))


def trainer_of(model: nn.Module, *callbacks: Callback, **changes: Any) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return problems.trainer_of(
        *callbacks, model=model, optimizer=optimizer, world=world(), **({"epochs": 4} | changes)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_each_precision_learns(precision: str) -> None:
    model = network()
    trainer = trainer_of(model, precision=precision, max_grad_norm=1.0, batch_size=16)
    records = trainer.fit(classes(256), classes(64))
    assert records[-1].train["loss"] < 0.9 * records[0].train["loss"]
    assert all(
        parameter.is_cuda and parameter.dtype == torch.float32 for parameter in model.parameters()
    )
    assert problems.optimizer_of(trainer).param_groups[0]["fused"]
    assert records[-1].device == "cuda"


def test_a_step_in_bf16_is_that_of_a_hand_written_loop() -> None:
    inputs, targets = (tensor.to(GPU) for tensor in classes(64).tensors)
    ours = network(dropout=0.0)
    theirs = network(dropout=0.0).to(GPU)
    trainer_of(ours, precision="bf16", batch_size=16, epochs=1).fit(classes(64))
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01, fused=True)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    for rows in order.split(16):
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(theirs(inputs[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_compiled_model_trains_as_it_does_uncompiled(tmp_path: Path) -> None:
    losses = []
    for compile in (False, True):
        model = network(dropout=0.0)
        options = {"output_dir": str(tmp_path / str(compile)), "compile": compile, "ema_decay": 0.5}
        records = trainer_of(model, **options).fit(classes(64), classes(16))
        losses.append(
            [figures["loss"] for record in records for figures in (record.train, record.val)]
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    newest = max((tmp_path / "True" / "checkpoints").glob("step-*.pt"))
    assert load_checkpoint(newest)["model"].keys() == network().state_dict().keys()


def loader_of(workers: int) -> DistributedDataLoader:
    images: Any = [
        (torch.full((3, 64, 64), float(index)), torch.tensor(index)) for index in range(64)
    ]
    options: Any = {"num_workers": workers, "multiprocessing_context": "fork"}
    return DistributedDataLoader(images, world(), batch_size=8, order=Sequential(64), **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_whole_however_busy_the_device_is(workers: int) -> None:
    """While it computes, and while the memory of batches before is given away and taken again."""
    weight = torch.randn(2048, 2048, device=GPU)
    found = []
    for (batch,), *_ in loader_of(workers).steps():
        for _ in range(20):
            weight = weight @ weight / weight.norm()
        found.append((batch.data[0].mean(dim=(1, 2, 3)), batch.data[1]))
        del batch
    means, targets = (torch.cat(parts).tolist() for parts in zip(*found, strict=True))
    assert targets == list(range(64))
    assert means == [float(index) for index in range(64)]


def test_the_next_batch_is_copied_while_the_device_computes() -> None:
    """The computation of a step waits for no copy of the step after it, and that copy for no
    computation.
    """
    steps = loader_of(2).steps()
    next(steps)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of work that nothing depends on
    computed = torch.cuda.Event()
    computed.record()
    next(steps)
    step = next(steps)  # the copies of which began after the computation
    assert step.copied is not None
    step.copied.synchronize()
    assert not computed.query(), "the copies of the step after waited for the computation"
    torch.cuda.synchronize()


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A real group of one."""
    torch.cuda.set_device(GPU)
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("hook", ["none", "fp16", "bf16"])
def test_nccl_with_each_hook(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DistributedDataParallel is there only with several ranks: one rank is told that it is wrapped
    all the same.
    """
    from srunddp.train.model import ddp

    class Wrapped(DDPModel):
        def __init__(
            self, model: nn.Module, step: Any, loss_function: Any, world: Any, config: Config
        ) -> None:
            super().__init__(model, step, loss_function, world, config)
            self._ddp = self.training = ddp._wrapped(self.testing, config.ddp)

    monkeypatch.setattr("srunddp.train.trainer.DDPModel", Wrapped)
    trainer = trainer_of(
        network(),
        ddp=DDPConfig(comm_hook=hook),
        gradient_accumulation_steps=2,
        precision="bf16",
        epochs=6,
    )
    records = trainer.fit(classes(128), classes(32))
    assert records[-1].train["loss"] < records[0].train["loss"]


@pytest.mark.usefixtures("nccl")
def test_batchnorm_over_all_ranks_on_gpus() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    )
    trainer_of(model, epochs=1).fit(classes(32))
    assert int(model.get_buffer("1.num_batches_tracked")) == 8


def test_a_snapshot_is_of_the_moment_it_was_taken() -> None:
    snapshot = Snapshot()
    value = torch.arange(1 << 20, device=GPU, dtype=torch.float32)
    for round_ in range(3):
        taken = snapshot.take({"value": value, "alias": value})
        value += 1
        assert taken["value"] is taken["alias"]
        assert taken["value"].is_pinned()
        assert torch.equal(taken["value"], torch.arange(1 << 20, dtype=torch.float32) + round_)


def test_random_numbers_of_the_gpu_are_kept() -> None:
    torch.cuda.manual_seed(5)
    torch.rand(7, device=GPU)
    states = rng.gather(world())
    expected = torch.rand(9, device=GPU), torch.rand(9), random.random()
    torch.cuda.manual_seed(6)
    rng.restore(states, world(), 0)
    found = torch.rand(9, device=GPU), torch.rand(9), random.random()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2] == expected[2]
    with rng.preserved_rng(world()):  # as around an evaluation
        drawn = torch.rand(9, device=GPU)
    assert torch.equal(torch.rand(9, device=GPU), drawn)


def test_vision_py_is_within_2_per_cent_of_a_bare_loop(tmp_path: Path) -> None:
    """In time per step; with the average of the weights it may be faster than with torch's own."""
    command = [sys.executable, "-m", "tests.benchmarks", "vision", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wall 1.02: met") == 2, done.stdout


def test_a_resumed_run_is_that_which_was_not_interrupted(tmp_path: Path) -> None:
    """With dropout on the GPU, whose random numbers are in the checkpoint."""

    def stop(trainer: Trainer, step: int) -> None:
        if step == 21:
            until((tmp_path / "checkpoints" / "step-00000018.pt").exists)
            raise KeyboardInterrupt

    whole = trainer_of(network(), ema_decay=0.9)
    whole.fit(classes(64))
    options = {
        "output_dir": str(tmp_path),
        "checkpoint": CheckpointConfig(every_epochs=0, every_steps=18),
    }
    options["ema_decay"] = 0.9
    interrupted = trainer_of(network(), OnStep(stop), **options)
    with pytest.raises(KeyboardInterrupt):
        interrupted.fit(classes(64))
    again = trainer_of(network(), **options, resume="auto")
    again.fit(classes(64))
    assert again.averaged is not None
    assert whole.averaged is not None
    for mine, other in [(again.model, whole.model), (again.averaged, whole.averaged)]:
        for ours, theirs in zip(mine.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_figures_are_summed_without_waiting_for_the_device() -> None:
    sums = MetricAccumulator({"accuracy": accuracy}, world())
    outputs = torch.randn(4, 3, device=GPU)
    targets = torch.tensor([0, 1, 2, 0], device=GPU)
    torch.cuda._sleep(1_000_000_000)
    computed = torch.cuda.Event()
    computed.record()
    for number in range(4):
        sums.add(torch.full((), float(number), device=GPU), outputs, targets, samples=4, weight=4.0)
    assert not computed.query(), "it waited for what the device computes"
    assert sums.means()["loss"] == 1.5
