"""A stream of shards: files that are read from their first line to their last, each by one worker of one rank.

Start it on a cluster, under MPI, or alone:

    srun --ntasks-per-node=4 --cpus-per-task=4 srunddp docs/examples/stream.py
    mpirun -n 2 srunddp docs/examples/stream.py
    python docs/examples/stream.py

``--data-dir=DIR`` reads shards of one's own: all of ``DIR/*.jsonl`` but the last, which is tested with. A line is a
JSON list: ten figures and a class from 0 to 3. There have to be more shards than ranks. Without it each rank makes the
same 33 shards in a temporary folder. ``--output-dir=DIR`` has rank 0 save the model there.

The loader is told ``sharded=True``: the data set itself gives each rank and worker its files. So more of them read
faster, and ranks may have unequally many samples: each step's loss is the mean over all that any rank had in it.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, get_worker_info

import srunddp
from srunddp.errors import ConfigError
from srunddp.train import DistributedDataLoader

Sample = tuple[Tensor, int]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What may be set, as in every example by ``--key=value``.

    Attributes:
        data_dir: folder of shards.
        output_dir: where rank 0 saves the model.
        batch_size: of each rank.
        num_workers: of each rank.
        lr: Adam's learning rate.
    """

    data_dir: Path | None = None
    output_dir: Path | None = None
    epochs: int = 8
    batch_size: int = 16
    num_workers: int = 2
    lr: float = 0.01


class Shards(IterableDataset[Sample]):
    """The samples of files, in another order of the files each epoch."""

    def __init__(self, files: list[Path], world: srunddp.World) -> None:
        self.files, self.rank, self.ranks = files, world.rank, world.world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        files = random.Random(self.epoch).sample(self.files, len(self.files))[self.rank :: self.ranks]
        if info := get_worker_info():
            files = files[info.id :: info.num_workers]
        for file in files:
            with file.open() as lines:
                yield from map(sample, lines)


def sample(line: str) -> Sample:
    *figures, target = json.loads(line)
    return torch.tensor(figures), target


def main() -> None:
    settings = srunddp.read_config(Settings)
    torch.manual_seed(0)
    with srunddp.init() as world, tempfile.TemporaryDirectory() as folder:
        *files, last = find(settings.data_dir or make(Path(folder)), world)
        loader = DistributedDataLoader(
            Shards(files, world),
            world,
            batch_size=settings.batch_size,
            num_workers=settings.num_workers,
            sharded=True,
        )
        model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 4)).to(world.device)
        train(model, loader, settings)
        with last.open() as lines:
            accuracy = evaluate(model, [sample(line) for line in lines], world)
        if settings.output_dir and world.rank == 0:
            settings.output_dir.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), settings.output_dir / "model.pt")
    if world.rank == 0:
        print(f"val accuracy {100 * accuracy:.2f} %", flush=True)


def train(model: nn.Module, loader: DistributedDataLoader, settings: Settings) -> None:
    replica, loss_function = DistributedDataParallel(model), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    for epoch in range(settings.epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            inputs, targets = batch.data
            loss = loss_function(replica(inputs), targets) * batch.scale
            loss.backward()
            optimizer.step()
            srunddp.heartbeat()
    srunddp.heartbeat(last=True)


@torch.no_grad()
def evaluate(model: nn.Module, samples: list[Sample], world: srunddp.World) -> float:
    right = torch.zeros(1, device=world.device)
    for batch in DistributedDataLoader(samples, world, batch_size=64, num_workers=0):
        inputs, targets = batch.data
        if batch.samples:  # else another rank's stand in
            right += (model(inputs).argmax(dim=1) == targets).sum()
    dist.all_reduce(right)
    return right.item() / len(samples)


def find(folder: Path, world: srunddp.World) -> list[Path]:
    """The shards, in the same order on all ranks."""
    files = sorted(folder.glob("*.jsonl"))
    if len(files) <= world.world_size:
        raise ConfigError(
            f"{folder} has {len(files)} shards",
            expected=f"at least one for each of {world.world_size} ranks, and one to test with",
            hint="split the data into more files",
        )
    return files


def make(folder: Path) -> Path:
    """Shards of unequal length; the class is that of four directions in which the figures go farthest."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(10, 4, generator=generator)
    for number in range(33):
        figures = torch.randn(60 + 5 * (number % 7), 10, generator=generator)
        rows = torch.cat([figures, (figures @ directions).argmax(dim=1, keepdim=True)], dim=1)
        lines = [json.dumps([*row[:-1], int(row[-1])]) for row in rows.tolist()]
        (folder / f"shard-{number:02}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


if __name__ == "__main__":
    main()
