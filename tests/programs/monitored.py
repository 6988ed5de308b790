"""A training in which one thing is wrong, for the notes of its report: ``monitored.py CASE
[EPOCHS]``.

``healthy``; ``slow rank N``, whose every step takes longer; ``starving``, whose data comes too
slowly; ``wrong interface NAME``, which the script itself tells Gloo to use; ``crowded``, with three
busy processes beside it.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import srunddp
from srunddp.train import Config, DataLoaderConfig

CASE, *WORDS = sys.argv[1].split()
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 4
SLOWER = 0.03
WIDTH = 512
BATCH = 32
# For some samples where nothing makes a step slow.
STEPS = 180 if CASE in ("healthy", "wrong") else 60

if CASE == "crowded":
    # All of the CPU is to be this job's, whatever else runs on this machine: with respect to other
    # sessions, and in its own where the kernel does not group processes by session.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-20")
    with contextlib.suppress(OSError):
        os.nice(-20)
    for _ in range(3):
        if os.fork() == 0:
            while True:
                pass
if CASE == "wrong":
    os.environ["GLOO_SOCKET_IFNAME"] = WORDS[-1]


class Slow(Dataset[tuple[Tensor, ...]]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        time.sleep(SLOWER / BATCH)
        sample: tuple[Tensor, ...] = self.data[index]
        return sample


class Sleeps(srunddp.Callback):
    def on_step(self, trainer: srunddp.Trainer, step: int, loss: Tensor | None) -> None:
        if CASE == "slow" and trainer.world.rank == int(WORDS[-1]):
            time.sleep(SLOWER)


torch.manual_seed(0)
with srunddp.init() as world:
    count = STEPS * BATCH * world.world_size
    data = TensorDataset(torch.randn(count, WIDTH), torch.randint(10, (count,)))
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = Config(
        epochs=EPOCHS,
        batch_size=BATCH,
        tensorboard=False,
        dataloader=DataLoaderConfig(num_workers=0),
    )
    trainer = srunddp.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), config, world=world, callbacks=[Sleeps()]
    )
    trainer.fit(Slow(data) if CASE == "starving" else data)
