"""The example, and the torchvision it reads its data with."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from srunddp.errors import ConfigError
from srunddp.train import load_checkpoint
from tests.examples import loaded
from tests.train.conftest import HERE, ROOT, run_example, run_python
from tests.train.local_world import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def mnist() -> ModuleType:
    return loaded("mnist")


def test_two_ranks_learn_the_digits(tmp_path: Path) -> None:
    options = ["--data-dir", str(tmp_path / "data"), f"--output-dir={tmp_path}"]
    outputs = run_ranks(2, tmp_path, run_example, "mnist.py", options)
    last = outputs[0].splitlines()[-1]
    assert re.fullmatch(r"test accuracy \d+\.\d\d %", last), last
    assert float(last.split()[2]) >= 97
    assert outputs[1] == ""
    assert load_checkpoint(max((tmp_path / "checkpoints").glob("step-*.pt")))["epoch"] == 20


def test_the_stand_in_is_whole_when_many_write_it_at_once(tmp_path: Path) -> None:
    """A reader waits only for the files to be there, as a rank on another node would."""
    run_python(HERE / "concurrent_writers.py", tmp_path, ROOT / "docs" / "examples" / "mnist.py")
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
