"""The example vision.py beside a loop by hand.

A step of docs/examples/vision.py's training, with and without an average of the weights, which the
loop by hand makes by torch's AveragedModel. Model, data, augmentation, batches and loader workers
are the same, on made images of CIFAR-10's shape; one rank. On a GPU it is wall-clock time, with
workers and bf16; on the CPU CPU time, without.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from srunddp.train import DataLoaderConfig, import_torchvision
from tests.benchmarks.benchmark import Case, Limit, Sample
from tests.benchmarks.training_loops import train
from tests.examples import loaded
from tests.train.local_world import LocalWorld

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
EPOCHS, STEPS, BATCH, WORKERS = (3, 100, 256, 8) if GPU else (1, 6, 32, 0)

METRIC = "wall" if GPU else "CPU"
VISION: Any = loaded("vision")


class Made(import_torchvision().datasets.CIFAR10):  # type: ignore[misc]
    """Random images and classes."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.target_transform = None
        draw = numpy.random.default_rng(0)
        self.data = draw.integers(0, 256, (STEPS * BATCH, 32, 32, 3), dtype=numpy.uint8)
        self.targets = draw.integers(0, 10, STEPS * BATCH).tolist()


def settings(ema_decay: float | None) -> Any:
    loading = DataLoaderConfig(num_workers=WORKERS, drop_last=True)
    chosen = VISION.Settings(
        epochs=EPOCHS, batch_size=BATCH, ema_decay=ema_decay, warmup_steps=0, dataloader=loading
    )
    return replace(chosen, precision="bf16", small_stem=True, channels_last=True) if GPU else chosen


@dataclass
class ByHand:
    """What users write who write no more than they must."""

    config: Any
    data: Any

    def __post_init__(self) -> None:
        config = self.config
        layout = torch.channels_last if GPU else torch.preserve_format
        self.model = VISION.network(config, 10).to(DEVICE, memory_format=layout)
        self.loss_function = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
        self.schedule = LambdaLR(
            self.optimizer,
            lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / (STEPS * EPOCHS)))),
        )
        self.average = None
        if config.ema_decay:
            merge = get_ema_multi_avg_fn(config.ema_decay)
            self.average = AveragedModel(self.model, multi_avg_fn=merge, use_buffers=True)

    def __call__(self) -> None:
        loader = DataLoader(
            self.data,
            BATCH,
            shuffle=True,
            drop_last=True,
            num_workers=WORKERS,
            pin_memory=GPU,
            persistent_workers=WORKERS > 0,
        )
        self.model.train()
        for _ in range(EPOCHS):
            self.epoch(loader)

    def epoch(self, loader: Any) -> None:
        total = torch.zeros((), device=DEVICE)
        for inputs, targets in loader:
            if GPU:
                inputs = inputs.to(DEVICE, non_blocking=True, memory_format=torch.channels_last)
                targets = targets.to(DEVICE, non_blocking=True)
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU):
                loss = self.loss_function(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            if self.average:
                self.average.update_parameters(self.model)
            total += loss.detach()
        total.item()


def clock() -> float:
    """Wall-clock time on a GPU, when that is through; CPU time elsewhere."""
    if not GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(loop: Callable[[], None], repeat: int) -> Sample:
    began = clock()
    loop()
    return {METRIC: 1000 * (clock() - began) / (EPOCHS * STEPS)}


def cases(quick: bool) -> Iterator[Case]:
    if not GPU:
        torch.set_num_threads(1)
    for name, ema_decay in {
        "without an average": None,
        "with an average of the weights": 0.99,
    }.items():
        config = settings(ema_decay)
        data = Made(VISION.transform(config, 0.5))
        ours = partial(
            train, VISION.trainer_of(LocalWorld(device=DEVICE), config, 10), data, EPOCHS
        )
        ways = {
            "vision.py": partial(measure, ours),
            "by hand": partial(measure, ByHand(config, data)),
        }
        yield Case(name, ways, 1 if quick else 5, (Limit(METRIC, "by hand", 1.02),), "ms")
