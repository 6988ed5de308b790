"""The example, and the torchvision it reads its data with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from srunddp.errors import ConfigError
from tests.examples import loaded
from tests.train.course import until
from tests.train.local_world import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def mnist() -> ModuleType:
    return loaded("mnist")


def write_digits(world: LocalWorld, root: Path) -> None:
    """Rank 0 reads as soon as the files are there, as a rank on another node would."""
    mnist = loaded("mnist")
    if world.rank:
        mnist.write_digits(root)
        return
    assert until(lambda: mnist.complete(root), 20)
    for _ in range(10):
        assert len(mnist.read(root, train=True)) == 1437
        assert len(mnist.read(root, train=False)) == 360


def test_the_stand_in_is_whole_when_many_write_it_at_once(tmp_path: Path) -> None:
    run_ranks(5, tmp_path / "world", write_digits, tmp_path)
    assert len(list((tmp_path / "MNIST" / "raw").iterdir())) == 4, "temporary files are left"


def test_a_data_dir_that_cannot_be_made_is_refused(mnist: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file: .*Not a directory.* -> correct --data-dir"):
        mnist.prepare(LocalWorld(), tmp_path / "file", download=False)


def test_the_stand_in_never_passes_for_mnist(
    mnist: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mnist.prepare(LocalWorld(), tmp_path, download=False) == tmp_path / "digits"
    assert capsys.readouterr().out == f"no MNIST/raw in {tmp_path}: scikit-learn's digits stand in\n"
    assert not (tmp_path / "MNIST").exists()
    (tmp_path / "digits" / "MNIST").rename(tmp_path / "MNIST")
    assert mnist.prepare(LocalWorld(), tmp_path, download=False) == tmp_path, "real MNIST comes first"


def test_the_generated_data_is_ten_classes_for_torchvision(mnist: ModuleType, tmp_path: Path) -> None:
    images, targets = mnist.read(mnist.prepare(LocalWorld(), tmp_path, download=False), train=True).tensors
    assert images.shape == (1437, 1, 28, 28)
    assert (images.min(), images.max()) == (0, 1)
    assert sorted(set(targets.tolist())) == list(range(10))


def test_a_torchvision_that_imports_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    monkeypatch.setattr(torch.library, "define", lambda *_: pytest.fail("declared an operator"))
    from srunddp.train import import_torchvision

    assert import_torchvision() is fake
