"""Handwritten digits with a small convolutional network, one process per GPU.

Start it on a cluster, under MPI, or alone:

    srun --ntasks-per-node=8 srunddp docs/examples/mnist.py
    mpirun -n 2 srunddp docs/examples/mnist.py
    python docs/examples/mnist.py

``--data-dir=DIR`` reads MNIST from ``DIR/MNIST/raw``; ``--download=true`` fetches it first. Where
there is none, the 1797 smaller digits that scikit-learn brings along stand in, written in MNIST's
own format to ``DIR/digits/MNIST/raw`` and read by the same loader. DIR is ``~/.cache/srunddp`` by
default.

``--output-dir=DIR --resume=auto`` writes a checkpoint after each epoch, and goes on from the
newest. The two newest and the best stay, with ``--checkpoint.keep_last=20`` all of twenty epochs;
``--help`` lists all settings.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

import srunddp
from srunddp.errors import ConfigError
from srunddp.train import accuracy, import_torchvision

FILES = {True: "train", False: "t10k"}


@dataclass(frozen=True, kw_only=True)
class Settings(srunddp.Config):
    """The loop's settings, and the example's own.

    Attributes:
        data_dir: folder of MNIST/raw.
        download: fetch MNIST into it first.
        lr: Adam's learning rate.
    """

    data_dir: Path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "srunddp"
    download: bool = False
    lr: float = 1e-3
    epochs: int = 20
    batch_size: int = 32
    monitor: str = "accuracy"
    mode: Literal["min", "max"] = "max"


def main() -> None:
    settings = srunddp.read_config(Settings)
    torch.manual_seed(0)
    with srunddp.init() as world:
        root = prepare(world, settings.data_dir, settings.download)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        loss = nn.CrossEntropyLoss()
        trainer = srunddp.Trainer(
            model, optimizer, loss, settings, world=world, metrics={"accuracy": accuracy}
        )
        history = trainer.fit(read(root, train=True), read(root, train=False))
    if world.rank == 0:
        print(f"val accuracy {100 * history[-1].val['accuracy']:.2f} %", flush=True)


def network() -> nn.Module:
    """Images of shape (samples, 1, 28, 28) in, ten scores per sample out."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def read(root: Path, *, train: bool) -> TensorDataset:
    """Images of shape (samples, 1, 28, 28) from 0 to 1, and their classes."""
    mnist = import_torchvision().datasets.MNIST(root, train=train)
    return TensorDataset(mnist.data.unsqueeze(1) / 255, mnist.targets)


def prepare(world: srunddp.World, data_dir: Path, download: bool) -> Path:
    """See that the data is there on every node, and return the folder to read it from."""
    # Rank 0 first; then, for folders that nodes do not share, one rank of each other node.
    with world.rank_zero_first(), world.rank_zero_first(per_node=True):
        try:
            folder = written(data_dir, download)
        except (OSError, RuntimeError) as error:
            found = f"{data_dir}: {' '.join(str(error).split())}"
            hint = "correct --data-dir; fetch MNIST where there is internet"
            raise ConfigError(
                found, expected="MNIST, or a folder to write digits to", hint=hint
            ) from error
    if world.rank == 0 and folder != data_dir:
        print(f"no MNIST/raw in {data_dir}: scikit-learn's digits stand in", flush=True)
    return folder


def written(data_dir: Path, download: bool) -> Path:
    """The folder to read from, after what has to be written there."""
    if download:
        import_torchvision().datasets.MNIST(data_dir, download=True)
    if complete(data_dir):
        return data_dir
    write_digits(data_dir / "digits")
    return data_dir / "digits"


def complete(root: Path) -> bool:
    return all(path.is_file() for name in FILES.values() for path in idx_files(root, name))


def idx_files(root: Path, name: str) -> tuple[Path, Path]:
    raw = root / "MNIST" / "raw"
    return raw / f"{name}-images-idx3-ubyte", raw / f"{name}-labels-idx1-ubyte"


def write_digits(root: Path) -> None:
    """scikit-learn's digits as MNIST's four files; the same bytes whoever writes them, and how
    often.
    """
    if complete(root):
        return
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    small = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    large = interpolate(small, size=(28, 28), mode="bilinear").squeeze(1)
    images = (255 * large).round().to(torch.uint8)
    labels = torch.tensor(digits.target, dtype=torch.uint8)
    rows = train_test_split(
        range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target
    )
    for name, part in zip(FILES.values(), rows, strict=True):
        for path, values in zip(idx_files(root, name), (images[part], labels[part]), strict=True):
            write_idx(path, values)


def write_idx(path: Path, values: Tensor) -> None:
    """Write unsigned bytes in IDX: two zeros, the type, the dimensions, each size, and the values.

    Under a name of this process's own first, since other ranks, nodes and jobs may write it too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, values.dim()]) + b"".join(
        size.to_bytes(4, "big") for size in values.shape
    )
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    temporary.write_bytes(header + values.numpy().tobytes())
    temporary.replace(path)


if __name__ == "__main__":
    main()
