"""How long sbatch may take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from srunddp.errors import UnavailableError
from srunddp.sbatch.submit import submit
from tests.support.starting import write

TOO_SHORT = 0.2  # seconds, of which the stub of sbatch takes more


@pytest.fixture
def slow_sbatch(tmp_path: Path) -> dict[str, str]:
    """The variables with which sbatch is a program that takes a second."""
    program = write(tmp_path / "bin" / "sbatch", "#!/bin/bash\nsleep 1\necho 4711\nexit 3\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def test_an_sbatch_that_waits_for_the_job_s_end_has_no_limit(slow_sbatch: dict[str, str]) -> None:
    assert submit("", slow_sbatch, lambda _: None, wait=True, within=TOO_SHORT) == ("4711", 3)


def test_an_sbatch_that_does_not_answer_is_given_up(slow_sbatch: dict[str, str]) -> None:
    with pytest.raises(UnavailableError, match=r"sbatch has not answered within 0\.2 s"):
        submit("", slow_sbatch, lambda _: None, within=TOO_SHORT)
