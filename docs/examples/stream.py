"""A stream of shards: files that are read from their first line to their last, each by one worker
of one rank.

Start it on a cluster, under MPI, or alone:

    srun --ntasks-per-node=4 --cpus-per-task=4 srunddp docs/examples/stream.py
    mpirun -n 2 srunddp docs/examples/stream.py
    python docs/examples/stream.py

``--data-dir=DIR`` reads shards of one's own, ``DIR/*.jsonl``, of which every fourth is for
validation. A line is a JSON list: ten figures and a class from 0 to 3. Without it each rank makes
the same 32 shards in a temporary folder.

Trainer is told ``sharded=True``: the data set itself gives each rank and worker its files. So more
of them read faster, and ranks may have unequally many samples: each step's loss is the mean over
all that any rank had in it.
"""

import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

import srunddp
from srunddp.errors import ConfigError
from srunddp.train import DataLoaderConfig, accuracy


@dataclass(frozen=True, kw_only=True)
class Settings(srunddp.Config):
    """The loop's settings, and the example's own.

    Attributes:
        data_dir: folder of shards.
        lr: Adam's learning rate.
    """

    data_dir: Path | None = None
    lr: float = 0.01
    epochs: int = 8
    batch_size: int = 16
    dataloader: DataLoaderConfig = field(default_factory=lambda: DataLoaderConfig(num_workers=2))


class Shards(IterableDataset[tuple[Tensor, int]]):
    """The samples of files, in another order of the files each epoch."""

    def __init__(self, files: list[Path], world: srunddp.World) -> None:
        self.files = files
        self.rank = world.rank
        self.ranks = world.world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        files = random.Random(self.epoch).sample(self.files, len(self.files))[
            self.rank :: self.ranks
        ]
        if info := get_worker_info():
            files = files[info.id :: info.num_workers]
        for file in files:
            for line in file.read_text().splitlines():
                *figures, target = json.loads(line)
                yield torch.tensor(figures), target


def make(folder: Path) -> None:
    """Shards of unequal length; the class is that of four directions in which the figures go
    farthest.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(10, 4, generator=generator)
    for number in range(32):
        figures = torch.randn(60 + 5 * (number % 7), 10, generator=generator)
        rows = zip(figures.tolist(), (figures @ directions).argmax(dim=1).tolist(), strict=True)
        (folder / f"shard-{number:02}.jsonl").write_text(
            "\n".join(json.dumps([*row, each]) for row, each in rows)
        )


def main() -> None:
    settings = srunddp.read_config(Settings)
    torch.manual_seed(0)
    with srunddp.init() as world, tempfile.TemporaryDirectory() as made:
        if not settings.data_dir:
            make(Path(made))
        # In the same order on all ranks.
        files = sorted((settings.data_dir or Path(made)).glob("*.jsonl"))
        if len(files) < 4:
            raise ConfigError(
                f"{settings.data_dir} has {len(files)} shards",
                expected="4 or more",
                hint="split them",
            )
        train = Shards([file for number, file in enumerate(files) if number % 4], world)
        model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        loss = nn.CrossEntropyLoss()
        trainer = srunddp.Trainer(
            model, optimizer, loss, settings, world=world, metrics={"accuracy": accuracy}
        )
        figures = trainer.fit(train, Shards(files[::4], world), sharded=True)[-1].val
    if world.rank == 0:
        print(f"val accuracy {100 * figures['accuracy']:.2f} %", flush=True)


if __name__ == "__main__":
    main()
