"""Classes of very different size: samples drawn so that each class comes equally often, and the
recall of each class.

Start it on a cluster, under MPI, or alone; once more without the weights, to see what they do:

    srun --ntasks-per-node=4 srunddp docs/examples/imbalanced.py
    mpirun -n 2 srunddp docs/examples/imbalanced.py
    mpirun -n 2 srunddp docs/examples/imbalanced.py --weighted=false
    python docs/examples/imbalanced.py

The data are scikit-learn's handwritten digits, of which the 3, the 8 and the 9 are made rare:
``--kept`` of each are left to train with. The samples to test with have all classes alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import srunddp
from srunddp.errors import ConfigError
from srunddp.train import Weighted, accuracy

CLASSES = 10
RARE = (3, 8, 9)


@dataclass(frozen=True, kw_only=True)
class Settings(srunddp.Config):
    """The loop's settings, and the example's own.

    Attributes:
        weighted: draw each class as often as any other; else each sample once an epoch.
        kept: samples of each rare class.
        lr: Adam's learning rate.
    """

    weighted: bool = True
    kept: int = 5
    lr: float = 1e-3
    epochs: int = 20
    batch_size: int = 16


def main() -> None:
    settings = srunddp.read_config(Settings)
    if settings.kept < 1:
        raise ConfigError(f"kept={settings.kept}", expected="1 or more", hint="correct it")
    torch.manual_seed(0)
    with srunddp.init() as world:
        train, test = read(settings.kept)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        loss = nn.CrossEntropyLoss()
        trainer = srunddp.Trainer(
            model, optimizer, loss, settings, world=world, metrics={"accuracy": accuracy}
        )
        # One order for all ranks, which share it: a sample that is drawn once is seen by one rank.
        if settings.weighted:
            order = Weighted.balanced(train.tensors[1], seed=settings.seed)
        else:
            order = None
        trainer.fit(train, test, order=order)
        by_class = recall(trainer.model, test, world)
    if world.rank == 0:
        print(
            "recall by class",
            *(f"{name}: {100 * value:.2f} %" for name, value in enumerate(by_class.tolist())),
        )
        rare = by_class[list(RARE)].mean()
        all_classes = by_class.mean()
        print(f"recall {100 * all_classes:.2f} %, of rare classes {100 * rare:.2f} %", flush=True)


def recall(model: nn.Module, data: TensorDataset, world: srunddp.World) -> Tensor:
    """The share of each class's samples that are found, of shape (classes,); each rank looks at a
    part of the data.
    """
    inputs, targets = (
        tensor[world.rank :: world.world_size].to(world.device) for tensor in data.tensors
    )
    model.eval()
    with torch.inference_mode():
        found = targets[model(inputs).argmax(dim=1) == targets]
    counts = torch.stack([classes.bincount(minlength=CLASSES) for classes in (found, targets)])
    # Counts are summed over the ranks, and divided once: a mean of the ranks' recalls would be
    # another figure.
    dist.all_reduce(counts)
    return counts[0] / counts[1]


def read(kept: int) -> tuple[TensorDataset, TensorDataset]:
    """To train and to test with: 64 brightnesses from 0 to 1 per sample, and its class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    rows, test = train_test_split(
        range(len(digits.target)), test_size=0.2, random_state=0, stratify=digits.target
    )
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    classes = torch.tensor(digits.target)
    by_class = [[row for row in rows if classes[row] == name] for name in range(CLASSES)]
    train = [
        row for name, own in enumerate(by_class) for row in (own[:kept] if name in RARE else own)
    ]
    return TensorDataset(images[train], classes[train]), TensorDataset(images[test], classes[test])


if __name__ == "__main__":
    main()
