"""What the tests of bootstrap share."""

from __future__ import annotations

import pytest

from srunddp.bootstrap.environment import slurm


@pytest.fixture(autouse=True)
def process_4000_is_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the made-up tasks one is the shell of ``srun --pty``."""
    monkeypatch.setattr(slurm, "is_interactive_shell", lambda task: task == "4000")
