"""torchvision beside a torch that it was not built for."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from srunddp.train import import_torchvision
from tests.train.conftest import HERE, run_python

IMPORT = "operator torchvision::nms does not exist"


def test_after_a_failed_import_torchvision_works_or_raises() -> None:
    *failures, first, second = run_python(HERE / "torchvision_after_a_failure.py").splitlines()
    if not failures:  # a build that fits
        assert [first, second] == ["kept [1]"] * 2
        return
    assert failures == [IMPORT] * 2
    assert first == "error Couldn't load custom C++ ops"
    assert second.startswith("error Could not run 'torchvision::nms'")


def test_a_torchvision_that_imports_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    monkeypatch.setattr(torch.library, "define", lambda *_: pytest.fail("declared an operator"))
    assert import_torchvision() is fake
