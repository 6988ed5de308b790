r"""A torchvision model on a folder of images or CIFAR-10, with augmentation, mixed precision and
averaged weights.

Start it on a cluster, under MPI, or alone:

    srun --ntasks-per-node=8 \
      srunddp docs/examples/vision.py --data-dir=/data/imagenet --model=resnet50 --image-size=224
    mpirun -n 2 srunddp docs/examples/vision.py --dataset=cifar10 --data-dir=/data --small-stem=true
    python docs/examples/vision.py

``--data-dir=DIR`` reads ``DIR/train/CLASS/*`` and ``DIR/val/CLASS/*``. Where there are none, the
1797 handwritten digits that scikit-learn brings along stand in, written as PNG files to
``DIR/digits`` and read in the same way. With ``--dataset=cifar10`` it reads
``DIR/cifar-10-batches-py``; ``--download=true`` fetches that first. DIR is
``~/.cache/srunddp/vision`` by default.

On a GPU add ``--precision=bf16 --channels_last=true``. For longer trainings take a longer average:
the default, ``--ema-decay=0.9``, is of about 10 steps, 0.9999 of 10000. ``--output-dir=DIR
--resume=auto`` writes checkpoints, and goes on from the newest; ``--help`` lists all settings.
"""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import srunddp
from srunddp.errors import ConfigError
from srunddp.train import DataLoaderConfig, accuracy, import_torchvision

# Here, so that loader workers that start anew, as where MPI runs, have it before they are sent the
# data set.
torchvision = import_torchvision()
DIGITS = "digits"
# Of ImageNet; near enough for other images.
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Settings(srunddp.Config):
    """The loop's settings, and the example's own.

    Attributes:
        data_dir: folder of train/ and val/, or of cifar-10-batches-py.
        dataset: which of the two.
        download: fetch CIFAR-10 into it first.
        model: a classifier of torchvision.models, by its name there.
        image_size: height and width, to which all images are brought.
        small_stem: begin a ResNet with a 3x3 convolution and no pooling, as suits images of about
            32 pixels.
        crop: the smallest part of an image's area that augmentation leaves.
        flip: of how many training images the mirror image is taken; null is half of them, but none
            of the digits.
        lr, weight_decay: AdamW's.
        label_smoothing: the part of each target that is shared among all classes.
    """

    data_dir: Path = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "srunddp" / "vision"
    )
    dataset: Literal["folder", "cifar10"] = "folder"
    download: bool = False
    model: str = "resnet18"
    image_size: int = 32
    small_stem: bool = False
    crop: float = 0.6
    flip: float | None = None
    lr: float = 2e-3
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    epochs: int = 4
    batch_size: int = 32
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_steps: int = 5
    ema_decay: float | None = 0.9
    monitor: str = "accuracy"
    mode: Literal["min", "max"] = "max"
    # BatchNorm cannot learn of one image alone, as a rank may have in an epoch's last step.
    dataloader: DataLoaderConfig = field(default_factory=lambda: DataLoaderConfig(drop_last=True))


def main() -> None:
    settings = srunddp.read_config(Settings)
    check(settings)
    torch.manual_seed(0)
    with srunddp.init() as world:
        train, test = read(prepare(world, settings), settings)
        history = trainer_of(world, settings, len(train.classes)).fit(train, test)
    if world.rank == 0:
        figures = history[-1].val
        print(
            f"val accuracy {100 * figures['accuracy']:.2f} %, top 5"
            f" {100 * figures['top5_accuracy']:.2f} %",
            flush=True,
        )


def check(settings: Settings) -> None:
    for name, least, most in (("image_size", 1, 10_000), ("crop", 0, 1), ("flip", 0, 1)):
        value = getattr(settings, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"{name}={value}", expected=f"from {least} to {most}", hint="correct it"
            )


def trainer_of(world: srunddp.World, settings: Settings, classes: int) -> srunddp.Trainer:
    model = network(settings, classes)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    loss = nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing)
    metrics = {"accuracy": accuracy, "top5_accuracy": top5_accuracy}
    return srunddp.Trainer(model, optimizer, loss, settings, world=world, metrics=metrics)


def network(settings: Settings, classes: int) -> nn.Module:
    """Images of shape (samples, 3, image_size, image_size) in, a score for each class out."""
    models = torchvision.models
    name = settings.model
    size = settings.image_size
    if name not in models.list_models(module=models):
        raise ConfigError(
            f"model={name}",
            expected="one of torchvision.models, such as vit_b_16",
            hint="correct it",
        )
    how: dict[str, Any]
    if name.startswith("vit"):
        how = {"image_size": size}
    else:
        how = {}
    if name in ("googlenet", "inception_v3"):
        # Else they have further outputs when they are trained.
        how = {"aux_logits": False, "init_weights": True}
    try:
        model = models.get_model(name, num_classes=classes, **how)
        with torch.inference_mode():
            model.eval()(torch.zeros(1, 3, size, size))
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"image_size={size} with model={name}: {error}",
            expected="a size that it takes",
            hint="correct it",
        ) from None
    if settings.small_stem:
        if not isinstance(model, models.ResNet):
            raise ConfigError(
                f"small_stem with model={name}", expected="a ResNet", hint="leave it out"
            )
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model.train()


def top5_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the target's class is among those of the five highest scores, else 0."""
    best = outputs.topk(min(5, outputs.shape[1])).indices
    return (best == targets.unsqueeze(1)).any(dim=1)


def read(root: Path, settings: Settings) -> tuple[Dataset[Any], Dataset[Any]]:
    """The training images, augmented, and the test images."""
    datasets = torchvision.datasets
    if settings.flip is not None:
        flip = settings.flip
    elif root.name == DIGITS:
        flip = 0.0
    else:
        flip = 0.5
    augmented = transform(settings, flip)
    plain = transform(settings)
    if settings.dataset == "folder":
        try:
            train = datasets.ImageFolder(root / "train", augmented)
            test = datasets.ImageFolder(root / "val", plain)
        except FileNotFoundError as error:
            raise ConfigError(
                str(error), expected="images in each CLASS/", hint=f"complete {root}"
            ) from None
        if train.classes != test.classes:
            raise ConfigError(
                f"{root}: other classes in val than in train",
                expected="the same",
                hint="complete them",
            )
        return train, test
    try:
        return datasets.CIFAR10(root, True, augmented), datasets.CIFAR10(root, False, plain)
    except RuntimeError as error:
        raise ConfigError(
            f"{root}: no whole CIFAR-10", expected=str(error), hint="add --download=true"
        ) from error


def transform(settings: Settings, flip: float | None = None) -> Any:
    """Of an image to a tensor; with ``flip`` augmented."""
    from torchvision.transforms import v2

    size = settings.image_size
    scale = (settings.crop, 1.0)
    steps = [v2.Resize(size), v2.CenterCrop(size)]
    if flip is not None:
        steps = [v2.RandomResizedCrop(size, scale=scale), v2.RandomHorizontalFlip(flip)]
    as_floats = v2.ToDtype(torch.float32, scale=True)
    return v2.Compose([v2.PILToTensor(), *steps, as_floats, v2.Normalize(MEAN, DEVIATION)])


def prepare(world: srunddp.World, settings: Settings) -> Path:
    """See that the data is there on every node, and return the folder to read it from."""
    root = settings.data_dir
    # Rank 0 first; then, for folders that nodes do not share, one rank of each other node.
    with world.rank_zero_first(), world.rank_zero_first(per_node=True):
        try:
            folder = written(settings)
        except (OSError, RuntimeError) as error:
            found = f"{root}: {' '.join(str(error).split())}"
            hint = "correct --data-dir; fetch the data where there is internet"
            raise ConfigError(
                found, expected="data, or a folder to write them to", hint=hint
            ) from error
    if world.rank == 0 and folder != root:
        print(f"no train/ and val/ in {root}: scikit-learn's digits stand in", flush=True)
    return folder


def written(settings: Settings) -> Path:
    """The folder to read from, after what has to be written there."""
    root = settings.data_dir
    if settings.dataset == "cifar10":
        if settings.download:
            torchvision.datasets.CIFAR10(root, download=True)
        return root
    if (root / "train").is_dir() or (root / "val").is_dir():
        return root
    write_digits(root / DIGITS)
    return root / DIGITS


def write_digits(root: Path) -> None:
    """scikit-learn's digits, 8 by 8 pixels, as a folder of images.

    Under a name of this process's own first, since other ranks, nodes and jobs may write it too.
    """
    if root.is_dir():
        return
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    rows = train_test_split(
        range(len(digits.target)), test_size=0.2, random_state=0, stratify=digits.target
    )
    temporary = root.with_name(f".{root.name}.{socket.gethostname()}.{os.getpid()}")
    for part, chosen in zip(("train", "val"), rows, strict=True):
        for row in chosen:
            path = temporary / part / str(digits.target[row]) / f"{row:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((digits.images[row] * 255 / 16).round().astype("uint8")).convert(
                "RGB"
            ).save(path)
    try:
        temporary.rename(root)
    except OSError:  # another one was faster
        shutil.rmtree(temporary)


if __name__ == "__main__":
    main()
