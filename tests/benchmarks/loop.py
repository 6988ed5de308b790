"""The shared loop's CPU time over that of a hand-written DistributedDataParallel loop, in one run.

One rank with a process group of its own, one thread; rounds of both in turn, each an epoch. The figure is the ratio of
the smallest CPU times, which a busy machine disturbs least; the ratios' quartiles say how much it was disturbed.

    python -m tests.benchmarks.loop [ROUNDS]
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from srunddp.train import Config, LoadingConfig, Trainer

ROUNDS = 11
BATCH = 64


@dataclass(frozen=True)
class Alone:
    """A world of one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def network(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def hand_written(data: TensorDataset, width: int) -> Callable[[], None]:
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_function = nn.CrossEntropyLoss()
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    epochs = iter(range(10**6))

    def epoch() -> None:
        sampler.set_epoch(next(epochs))
        total = torch.zeros(())
        for inputs, targets in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        total.item()

    return epoch


def ours(data: TensorDataset, width: int) -> Callable[[], None]:
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = Config(epochs=1, batch_size=BATCH, loading=LoadingConfig(num_workers=0))
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), config, world=Alone())

    def epoch() -> None:
        trainer.config = Config(epochs=trainer.state.epoch + 1, batch_size=BATCH, loading=LoadingConfig(num_workers=0))
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(data)

    return epoch


def compare(width: int, steps: int, rounds: int) -> None:
    data = TensorDataset(torch.randn(steps * BATCH, 64), torch.randint(10, (steps * BATCH,)))
    loops = {"hand": hand_written(data, width), "ours": ours(data, width)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, epoch in loops.items():
            start = time.process_time()
            epoch()
            times[name].append((time.process_time() - start) / steps)
    ratios = [a / b for a, b in zip(times["ours"], times["hand"], strict=True)]
    low, middle, high = statistics.quantiles(ratios[1:], n=4)
    best = {name: 1000 * min(values) for name, values in times.items()}
    print(
        f"step {best['hand']:.3f} ms by hand, {best['ours']:.3f} ms with the loop: {best['ours'] / best['hand']:.4f} "
        f"(of neighbours: median {middle:.4f}, quartiles {low:.4f} to {high:.4f})",
        flush=True,
    )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'meeting'}", rank=0, world_size=1)
        compare(96, 400, rounds)
        compare(1536, 30, rounds)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
