"""The shared loop's time on a GPU over that of a hand-written one, in one run.

One rank, bf16, batches read by workers; rounds of both in turn, each of a few epochs with workers of its own. The
figure is the ratio of the smallest wall-clock times, which should be at most 1.02.

    python -m tests.benchmarks.gpu [ROUNDS]
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from srunddp.train import Config, LoadingConfig, Trainer
from tests.benchmarks.loop import World

ROUNDS, EPOCHS, STEPS, BATCH, WORKERS = 5, 3, 100, 256, 4
GPU = torch.device("cuda", 0)


class Images(Dataset[Any]):
    """Made when they are read, of no cost to speak of."""

    def __init__(self) -> None:
        self.image = torch.randn(3, 64, 64)

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.image, index % 10


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in [(3, 64), (64, 128), (128, 256), (256, 256)]:
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 16, 10))


def hand_written() -> Callable[[], None]:
    model, loss_function = network().to(GPU), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def epoch(loader: DataLoader[Any]) -> None:
        total = torch.zeros((), device=GPU)
        for inputs, targets in loader:
            inputs, targets = inputs.to(GPU, non_blocking=True), targets.to(GPU, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        total.item()

    def epochs() -> None:
        loader: DataLoader[Any] = DataLoader(
            Images(), BATCH, shuffle=True, num_workers=WORKERS, pin_memory=True, persistent_workers=True
        )
        for _ in range(EPOCHS):
            epoch(loader)

    return epochs


def ours() -> Callable[[], None]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loading = LoadingConfig(num_workers=WORKERS)
    whole = {"batch_size": BATCH, "precision": "bf16", "loading": loading}
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), Config(**whole), world=World(device=GPU))
    data = Images()

    def epochs() -> None:
        trainer.config = Config(epochs=trainer.state.epoch + EPOCHS, **whole)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(data)

    return epochs


def seconds(epochs: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    epochs()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    if not torch.cuda.device_count():
        sys.exit("needs 1 GPU, found 0")
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    hand, loop = hand_written(), ours()
    times: dict[str, list[float]] = {"hand": [], "ours": []}
    for _ in range(rounds):
        times["hand"].append(seconds(hand))
        times["ours"].append(seconds(loop))
    best = {name: 1000 * min(values) / (EPOCHS * STEPS) for name, values in times.items()}
    print(f"step {best['hand']:.3f} ms by hand, {best['ours']:.3f} ms with the loop: {best['ours'] / best['hand']:.4f}")


if __name__ == "__main__":
    main()
