"""A script that is started as a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.conftest import mpirun, torchrun

MODULE = "tests.interop.programs.torchrun_style"


@pytest.mark.mpirun
def test_a_module_has_the_losses_of_torchrun_m_to_the_bit(tmp_path: Path) -> None:
    ours = mpirun(MODULE, tmp_path / "ours")
    assert ours.trained()
    assert ours.results() == torchrun(MODULE, tmp_path / "own").results()
