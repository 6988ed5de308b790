"""The fuzz tests' profile: CI tries the same inputs each time, a developer's machine new ones."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from srunddp.bootstrap.environment import slurm

settings.register_profile("srunddp", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("srunddp")


@pytest.fixture(autouse=True)
def process_4000_is_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the made-up tasks one is the shell of ``srun --pty``."""
    monkeypatch.setattr(slurm, "is_interactive_shell", lambda task: task == "4000")
