"""The shared loop's CPU time over that of hand-written loops, in one run, on steps of about 0.7 and 20 ms.

One rank, one thread, a process group of its own; rounds of all in turn, each an epoch. One hand-written loop is what
users of DistributedDataParallel write, and keeps the sum of losses. The other is the same without the wrap, which the
shared loop leaves out in a single process, too: the stricter measure of what the loop itself costs. Figures are ratios
of the smallest CPU times, which a busy machine disturbs least; quartiles of neighbouring rounds say how much it was.

    python -m tests.benchmarks.loop [ROUNDS]
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from srunddp.train import Config, LoadingConfig, Trainer
from tests.benchmarks import numbers
from tests.train.local_world import LocalWorld

ROUNDS = 15
WIDTH = 224  # makes a step of about 0.7 ms
BATCH = 64


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


def hand_written(data: Any, width: int, *, wrapped: bool = False) -> Callable[[], None]:
    model: nn.Module = network(width)
    if wrapped:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    return looping(model, optimizer, loader, Tensor.backward)


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
    config = Config(batch_size=BATCH, loading=LoadingConfig(num_workers=0))
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), config, world=LocalWorld())

    def epoch() -> None:
        trainer.config = replace(config, epochs=trainer.state.epoch + 1)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(data)

    return epoch


def compare(name: str, data: Any, width: int, rounds: int) -> None:
    loops = {
        "ours": ours(data, width),
        "DDP by hand": hand_written(data, width, wrapped=True),
        "bare by hand": hand_written(data, width),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    steps = len(data) // BATCH
    for _ in range(rounds):
        for each, epoch in loops.items():
            start = time.process_time()
            epoch()
            times[each].append(1000 * (time.process_time() - start) / steps)
    best = min(times["ours"])
    print(f"{name}: a step of the loop {best:.3f} ms")
    for each in ("DDP by hand", "bare by hand"):
        ratios = [a / b for a, b in zip(times["ours"], times[each], strict=True)]
        low, middle, high = statistics.quantiles(ratios[1:], n=4)
        least = min(times[each])
        print(
            f"  over {each}, {least:.3f} ms: {best / least:.4f} (neighbours: {middle:.4f}, {low:.4f} to {high:.4f})",
            flush=True,
        )


def main() -> None:
    (rounds,) = numbers(ROUNDS)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for width, steps in ((WIDTH, 400), (1792, 12)):
        samples = Samples(steps * BATCH)
        compare("samples one by one", samples, width, rounds)
        compare("tensors in memory", TensorDataset(samples.inputs, samples.targets), width, rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
