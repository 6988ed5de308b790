"""The examples on images: handwritten digits, and torchvision's models on each kind of data that
they read.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from srunddp.errors import ConfigError
from srunddp.train import import_torchvision
from tests.examples import loaded
from tests.train.interrupted import until
from tests.train.local_world import LocalWorld, run_ranks

CIFAR_FILES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


@pytest.fixture(scope="module")
def vision() -> ModuleType:
    return loaded("vision")


def read(vision: ModuleType, **changes: Any) -> Any:
    settings = vision.Settings(**changes)
    return vision.read(vision.prepare(LocalWorld(), settings), settings)


@pytest.fixture(scope="module")
def digits(vision: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Training and test data of an empty folder."""
    data = tmp_path_factory.mktemp("vision")
    train, test = read(vision, data_dir=data)
    assert [path.name for path in data.iterdir()] == ["digits"]
    return train, test


def test_the_stand_in_is_ten_classes_in_a_folder_of_its_own(digits: Any) -> None:
    train, test = digits
    assert (len(train), len(test), train.classes) == (
        1437,
        360,
        [str(digit) for digit in range(10)],
    )
    assert not {path for path, _ in train.samples} & {path for path, _ in test.samples}


def test_generated_images_that_another_process_writes_are_kept(
    vision: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_digits() -> SimpleNamespace:
        folder_of_images(tmp_path / "digits", theirs=1)
        return SimpleNamespace(images=numpy.zeros((50, 8, 8)), target=numpy.arange(50) % 10)

    monkeypatch.setattr("sklearn.datasets.load_digits", load_digits)
    vision.write_digits(tmp_path / "digits")
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["digits", "theirs", "0.png"]


def folder_of_images(root: Path, **classes: int) -> None:
    """Of so many images each, wider than high, of a colour for each class."""
    for number, (name, images) in enumerate(sorted(classes.items())):
        (root / name).mkdir(parents=True)
        for image in range(images):
            Image.new("RGB", (60, 40), (80 * number, 0, 0)).save(root / name / f"{image}.png")


def test_a_folder_of_images_is_read_and_no_digits_are_written(
    vision: ModuleType, tmp_path: Path
) -> None:
    folder_of_images(tmp_path / "train", cat=3, dog=2)
    folder_of_images(tmp_path / "val", cat=1, dog=1)
    train, test = read(vision, data_dir=tmp_path, image_size=24)
    assert [(tuple(image.shape), target) for image, target in train] == [
        ((3, 24, 24), n) for n in (0, 0, 0, 1, 1)
    ]
    assert [(tuple(image.shape), target) for image, target in test] == [
        ((3, 24, 24), 0),
        ((3, 24, 24), 1),
    ]
    assert float(test[1][0][0].mean()) == pytest.approx((80 / 255 - 0.485) / 0.229, abs=1e-4)
    assert not (tmp_path / "digits").exists()


@pytest.mark.parametrize(
    ("train", "val", "words"),
    [
        ({"cat": 1, "dog": 1}, {"dog": 1}, "other classes in val than in train"),
        ({}, {"cat": 1}, r"any class folder in .*train\.; expected images in each CLASS/"),
        ({"cat": 1, "dog": 0}, {"cat": 1}, r"for the classes dog.*-> complete"),
        ({"cat": 1, "dog": 1}, None, r"No such file or directory: '.*val'"),
    ],
)
def test_half_a_data_set_is_refused(
    train: dict[str, int],
    val: dict[str, int] | None,
    words: str,
    vision: ModuleType,
    tmp_path: Path,
) -> None:
    (tmp_path / "train").mkdir()
    folder_of_images(tmp_path / "train", **train)
    folder_of_images(tmp_path / "val", **(val or {}))
    with pytest.raises(ConfigError, match=words):
        read(vision, data_dir=tmp_path)


def test_a_data_dir_that_is_empty_or_impossible_is_refused(
    vision: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "digits").mkdir()
    vision.prepare(LocalWorld(), vision.Settings(data_dir=tmp_path))
    assert (
        capsys.readouterr().out
        == f"no train/ and val/ in {tmp_path}: scikit-learn's digits stand in\n"
    )
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file: .*Not a directory.* -> correct --data-dir"):
        vision.prepare(LocalWorld(), vision.Settings(data_dir=tmp_path / "file"))


@pytest.mark.parametrize("changes", [{"image_size": 0}, {"flip": 1.5}, {"crop": -1.0}])
def test_a_setting_of_images_that_cannot_be_is_refused(
    vision: ModuleType, changes: dict[str, Any]
) -> None:
    vision.check(vision.Settings())
    with pytest.raises(ConfigError, match=f"{next(iter(changes))}=.*; expected from "):
        vision.check(vision.Settings(**changes))


def write_cifar(root: Path) -> None:
    """Four images in each file: the n-th is of class n, and red, green or blue."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    images = numpy.zeros((4, 3, 1024), dtype=numpy.uint8)
    for number in range(3):
        images[number, number] = 255
    for name in CIFAR_FILES:
        (folder / name).write_bytes(
            pickle.dumps({"data": images.reshape(4, 3072), "labels": [0, 1, 2, 3]})
        )
    (folder / "batches.meta").write_bytes(
        pickle.dumps({"label_names": [f"class{number}" for number in range(10)]})
    )


def test_cifar_10_is_read_from_its_own_files(
    vision: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cifar = import_torchvision().datasets.CIFAR10
    # The files' sums are the real ones'.
    monkeypatch.setattr(cifar, "_check_integrity", lambda _: True)
    monkeypatch.setitem(cifar.meta, "md5", None)
    write_cifar(tmp_path)
    train, test = read(vision, data_dir=tmp_path, dataset="cifar10")
    assert (len(train), len(test), len(train.classes)) == (20, 4, 10)
    for number in range(3):
        image, target = test[number]
        assert (tuple(image.shape), target, int(image.mean(dim=(1, 2)).argmax())) == (
            (3, 32, 32),
            number,
            number,
        )


def test_cifar_10_that_is_not_there_is_said_with_its_hint(
    vision: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no whole CIFAR-10; .* -> add --download=true"):
        read(vision, data_dir=tmp_path, dataset="cifar10")


def test_training_images_are_augmented_and_test_images_are_not(digits: Any) -> None:
    train, test = digits
    # Two random crops of so few pixels may be the same one.
    assert any(not torch.equal(train[0][0], train[0][0]) for _ in range(20))
    assert torch.equal(test[0][0], test[0][0])


@pytest.mark.parametrize(
    ("name", "flip", "mirrored"), [("digits", None, 0), ("photos", None, 0.5), ("digits", 1.0, 1)]
)
def test_digits_are_not_mirrored_unless_it_is_asked_for(
    vision: ModuleType, tmp_path: Path, name: str, flip: float | None, mirrored: float
) -> None:
    root = tmp_path / name
    folder_of_images(root / "train", cat=1)
    folder_of_images(root / "val", cat=1)
    train, _ = vision.read(root, vision.Settings(flip=flip))
    (found,) = (
        part.p
        for part in train.transform.transforms
        if type(part).__name__ == "RandomHorizontalFlip"
    )
    assert found == mirrored


@pytest.mark.parametrize(
    ("model", "size", "small_stem"),
    [
        ("resnet18", 32, False),
        ("resnet50", 32, True),
        ("vit_b_16", 48, False),
        ("googlenet", 32, False),
    ],
)
def test_models_take_small_images(
    vision: ModuleType, model: str, size: int, small_stem: bool
) -> None:
    with torch.device("meta"):
        network = vision.network(
            vision.Settings(model=model, image_size=size, small_stem=small_stem), 7
        )
        assert network(torch.empty(2, 3, size, size)).shape == (2, 7)
    if small_stem:
        assert network.conv1.stride == (1, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "resnet19"}, "model=resnet19; expected one of torchvision.models"),
        (
            {"model": "vit_b_16", "image_size": 33},
            "image_size=33 with model=vit_b_16: Input shape indivisible",
        ),
        ({"model": "alexnet"}, "image_size=32 with model=alexnet: Given input size"),
        (
            {"model": "vit_b_16", "small_stem": True},
            "small_stem with model=vit_b_16; expected a ResNet",
        ),
    ],
)
def test_a_model_that_is_not_there_is_refused(
    vision: ModuleType, changes: dict[str, Any], words: str
) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=words):
        vision.network(vision.Settings(**changes), 10)


def test_a_target_counts_that_is_among_the_five_best(vision: ModuleType) -> None:
    scores = torch.tensor([[6.0, 5, 4, 3, 2, 1, 0]] * 7)
    assert vision.top5_accuracy(scores, torch.arange(7)).tolist() == [True] * 5 + [False] * 2
    assert vision.top5_accuracy(scores[:2, :3], torch.tensor([2, 0])).tolist() == [True, True]


# mnist.py


@pytest.fixture(scope="module")
def mnist() -> ModuleType:
    return loaded("mnist")


def write_digits(world: LocalWorld, root: Path) -> None:
    """Rank 0 reads as soon as the files are there, as a rank on another node would."""
    mnist = loaded("mnist")
    if world.rank:
        mnist.write_digits(root)
        return
    assert until(lambda: mnist.complete(root))
    for _ in range(10):
        assert len(mnist.read(root, train=True)) == 1437
        assert len(mnist.read(root, train=False)) == 360


def test_the_stand_in_is_whole_when_many_write_it_at_once(tmp_path: Path) -> None:
    run_ranks(5, tmp_path / "world", write_digits, tmp_path)
    assert len(list((tmp_path / "MNIST" / "raw").iterdir())) == 4, "temporary files are left"


def test_the_stand_in_never_passes_for_mnist(
    mnist: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mnist.prepare(LocalWorld(), tmp_path, download=False) == tmp_path / "digits"
    assert (
        capsys.readouterr().out == f"no MNIST/raw in {tmp_path}: scikit-learn's digits stand in\n"
    )
    assert not (tmp_path / "MNIST").exists()
    (tmp_path / "digits" / "MNIST").rename(tmp_path / "MNIST")
    assert mnist.prepare(LocalWorld(), tmp_path, download=False) == tmp_path, (
        "real MNIST comes first"
    )
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file: .*Not a directory.* -> correct --data-dir"):
        mnist.prepare(LocalWorld(), tmp_path / "file", download=False)


def test_the_generated_data_is_ten_classes_for_torchvision(
    mnist: ModuleType, tmp_path: Path
) -> None:
    images, targets = mnist.read(
        mnist.prepare(LocalWorld(), tmp_path, download=False), train=True
    ).tensors
    assert images.shape == (1437, 1, 28, 28)
    assert (images.min(), images.max()) == (0, 1)
    assert sorted(set(targets.tolist())) == list(range(10))
