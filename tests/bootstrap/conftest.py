"""The fuzz tests' profile: CI tries the same inputs each time, a developer's machine new ones."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from srunddp.bootstrap import slurm

settings.register_profile("srunddp", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("srunddp")


@pytest.fixture(autouse=True)
def terminal_of_process_4000(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the made-up tasks, the shell of ``srun --pty`` alone has a terminal."""
    monkeypatch.setattr(slurm, "has_terminal", lambda pid: pid == "4000")
