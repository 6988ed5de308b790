"""The shared loop's CPU time over that of a hand-written loop, in one run, on steps of about 0.7 and 20 ms.

One rank, one thread; rounds of both in turn, each an epoch. The hand-written one is what
DistributedDataParallel's users write, without its wrap, as a world of one needs none, and keeps the sum of losses.
The figure is the ratio of the smallest CPU times, which a busy machine disturbs least; the quartiles of the ratios of
neighbouring rounds say how much it was disturbed.

    python -m tests.benchmarks.loop [ROUNDS]
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from srunddp.train import Config, LoadingConfig, Trainer

ROUNDS = 25
BATCH = 64


@dataclass(frozen=True)
class World:
    """What the loop asks of a world; of one rank unless told otherwise."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


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


def hand_written(data: Any, width: int) -> Callable[[], None]:
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_function = nn.CrossEntropyLoss()
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    epochs = iter(range(10**6))

    def epoch() -> None:
        sampler.set_epoch(next(epochs))
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(targets)

    return epoch


def ours(data: Any, width: int) -> Callable[[], None]:
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = Config(batch_size=BATCH, loading=LoadingConfig(num_workers=0))
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), config, world=World())

    def epoch() -> None:
        trainer.config = replace(config, epochs=trainer.state.epoch + 1)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(data)

    return epoch


def compare(name: str, data: Any, width: int, rounds: int) -> None:
    loops = {"hand": hand_written(data, width), "ours": ours(data, width)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    steps = len(data) // BATCH
    for _ in range(rounds):
        for each, epoch in loops.items():
            start = time.process_time()
            epoch()
            times[each].append(1000 * (time.process_time() - start) / steps)
    ratios = [a / b for a, b in zip(times["ours"], times["hand"], strict=True)]
    low, middle, high = statistics.quantiles(ratios[1:], n=4)
    best = {each: min(values) for each, values in times.items()}
    print(
        f"{name}: step {best['hand']:.3f} ms by hand, {best['ours']:.3f} ms with the loop: "
        f"{best['ours'] / best['hand']:.4f} (of neighbours: median {middle:.4f}, quartiles {low:.4f} to {high:.4f})",
        flush=True,
    )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    torch.set_num_threads(1)
    for width, steps in ((128, 150), (1792, 10)):
        samples = Samples(steps * BATCH)
        compare("samples one by one", samples, width, rounds)
        compare("tensors in memory ", TensorDataset(samples.inputs, samples.targets), width, rounds)


if __name__ == "__main__":
    main()
