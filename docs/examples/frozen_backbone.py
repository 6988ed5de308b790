"""A frozen backbone with BatchNorm, in evaluation mode throughout, and a head that is trained on
few samples.

Start it on a cluster, under MPI, or alone:

    srun --ntasks-per-node=2 srunddp docs/examples/frozen_backbone.py
    mpirun -n 2 srunddp docs/examples/frozen_backbone.py
    python docs/examples/frozen_backbone.py

The backbone learns scikit-learn's handwritten digits from 0 to 4, then a new head those from 5 to
9, of which there are ten each to train with. Trainer leaves modules as they were: what is in
evaluation mode keeps its statistics.
"""

from dataclasses import dataclass, replace

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import srunddp
from srunddp.train import accuracy


@dataclass(frozen=True, kw_only=True)
class Settings(srunddp.Config):
    """The loop's settings, and the example's own.

    Attributes:
        lr: Adam's learning rate.
    """

    lr: float = 0.003
    epochs: int = 12
    batch_size: int = 8


def convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def main() -> None:
    settings = srunddp.read_config(Settings)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    classes = torch.tensor(digits.target)
    known = classes < 5
    rows = (classes >= 5).nonzero().flatten()
    few = torch.cat([rows[classes[rows] == name][:10] for name in range(5, 10)])
    others = rows[~torch.isin(rows, few)]
    backbone = nn.Sequential(convolution(1, 16), convolution(16, 32), nn.Flatten())
    with srunddp.init() as world:

        def trainer(head: nn.Module, config: Settings) -> srunddp.Trainer:
            model = nn.Sequential(backbone, head)
            wanted = [each for each in model.parameters() if each.requires_grad]
            optimizer = torch.optim.Adam(wanted, lr=settings.lr)
            loss = nn.CrossEntropyLoss()
            return srunddp.Trainer(
                model, optimizer, loss, config, world=world, metrics={"accuracy": accuracy}
            )

        before = replace(settings, epochs=3, output_dir=None)
        trainer(nn.Linear(32 * 4, 5), before).fit(TensorDataset(images[known], classes[known]))
        backbone.requires_grad_(False).eval()
        train, val = (TensorDataset(images[part], classes[part] - 5) for part in (few, others))
        figures = trainer(nn.Linear(32 * 4, 5), settings).fit(train, val)[-1].val
    if world.rank == 0:
        print(f"val accuracy {100 * figures['accuracy']:.2f} %", flush=True)


if __name__ == "__main__":
    main()
