"""The shared loop's CPU time over that of other loops, in one run, on steps of about 0.7 and 20 ms.

One rank, one thread; rounds of all in turn, each an epoch. One hand-written loop is what users of
DistributedDataParallel write, and keeps the sum of losses. The other is the same without the wrap, which the shared
loop leaves out in a single process, too: the stricter measure of what the loop itself costs. Lightning and its Fabric
(``lightning``) and Accelerate (``accelerate``) are measured where they are installed. Figures are ratios of the
smallest CPU times; quartiles of neighbouring rounds say how much the machine was disturbed.

    python -m tests.benchmarks.loop [ROUNDS]
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, TensorDataset

from srunddp.train import Config, DataLoaderConfig, Trainer, import_torchvision
from tests.benchmarks import in_turn, numbers, ratio, train
from tests.train.local_world import LocalWorld

ROUNDS = 15
WIDTH = 224  # makes a step of about 0.7 ms
BATCH = 64
Kind = Callable[[Any, int], Callable[[], None]]  # makes of data and the model's width what trains for an epoch


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Read one by one, as from files."""

    def __init__(self, count: int) -> None:
        self.inputs, self.targets = torch.randn(count, 64), torch.randint(10, (count,))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def network(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def shuffled(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=BATCH, sampler=RandomSampler(data))


def hand_written(data: Any, width: int, *, wrapped: bool = False) -> Callable[[], None]:
    model: nn.Module = network(width)
    if wrapped:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    return looping(model, adam(model), loader, Tensor.backward)


def looping(model: Any, optimizer: Any, loader: Any, backward: Callable[[Tensor], Any]) -> Callable[[], None]:
    """An epoch of a hand-written loop."""
    loss_function, epochs = nn.CrossEntropyLoss(), itertools.count()

    def epoch() -> None:
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loader.sampler.set_epoch(next(epochs))
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_function(model(inputs), targets)
            backward(loss)
            optimizer.step()
            total += loss.item() * len(targets)

    return epoch


def ours(data: Any, width: int) -> Callable[[], None]:
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = Config(batch_size=BATCH, dataloader=DataLoaderConfig(num_workers=0))
    return partial(train, Trainer(model, optimizer, nn.CrossEntropyLoss(), config, world=LocalWorld()), data)


def fabric(data: Any, width: int) -> Callable[[], None]:
    from lightning.fabric import Fabric

    run = Fabric(accelerator="cpu", devices=1)
    run.launch()
    model = network(width)
    model, optimizer = run.setup(model, adam(model))
    return looping(model, optimizer, run.setup_dataloaders(shuffled(data)), run.backward)


def accelerate(data: Any, width: int) -> Callable[[], None]:
    from accelerate import Accelerator

    run = Accelerator(cpu=True)
    model = network(width)
    return looping(*run.prepare(model, adam(model), shuffled(data)), run.backward)


def lightning(data: Any, width: int) -> Callable[[], None]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss = network(width), nn.CrossEntropyLoss()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.loss(self.model(batch[0]), batch[1])  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return adam(self)

    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=0, **off)
    module, loader = Module(), shuffled(data)

    def epoch() -> None:
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader)

    return epoch


PEERS: dict[str, Kind] = {"Fabric": fabric, "Lightning": lightning, "Accelerate": accelerate}


def compare(name: str, data: Any, width: int, rounds: int, kinds: dict[str, Kind]) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        times = in_turn({each: kind(data, width) for each, kind in {"ours": ours, **kinds}.items()}, rounds)
    milliseconds = {each: 1000 * min(seconds) / (len(data) // BATCH) for each, seconds in times.items()}
    print(f"{name}: a step of the loop {milliseconds['ours']:.3f} ms")
    for each in kinds:
        print(f"  over {each}, {milliseconds[each]:.3f} ms: {ratio(times['ours'], times[each])}", flush=True)


def main() -> None:
    (rounds,) = numbers(ROUNDS)
    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        import_torchvision()  # Lightning does, and fails where its build does not match torch's
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    bare: dict[str, Kind] = {"bare by hand": hand_written}
    there = [find_spec("accelerate" if name == "Accelerate" else "lightning") for name in PEERS]
    peers = bare | {name: kind for (name, kind), found in zip(PEERS.items(), there, strict=True) if found}
    compare("beside others, samples one by one", Samples(150 * BATCH), WIDTH, rounds, peers)
    # Only now: the others would take part in it.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    both = {"DDP by hand": partial(hand_written, wrapped=True), **bare}
    for width, steps in ((WIDTH, 400), (1792, 12)):
        samples = Samples(steps * BATCH)
        compare("samples one by one", samples, width, rounds, both)
        compare("tensors in memory", TensorDataset(samples.inputs, samples.targets), width, rounds, both)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
