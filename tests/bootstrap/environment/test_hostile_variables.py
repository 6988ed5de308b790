"""Whatever a launcher's variables hold, no shell and no process comes of it, and every message is
one line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.hostile_variables import CANARY, SHELL
from tests.support.starting import python, slurm, srunddp, write

pytestmark = pytest.mark.slow

LONG = 1800.0


def campaign(values: int, seed: int, folder: Path) -> dict[str, Any]:
    """What came of it in a process whose starts are noted; that they are is tried at its end."""
    words = ("-m", "tests.support.hostile_variables", values, seed)
    done = python(*words, folder=folder, limit=LONG, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert len(result["hook"]) == 1
    return result


def holds(result: dict[str, Any], values: int) -> None:
    assert result["values"] >= values
    assert (result["faults"], result["starts"], result["canary"]) == ([], [], False)
    assert set(result["ends"]) == {
        f"{what} {end}" for what in ("detected", "expanded") for end in ("fine", "ConfigError")
    }
    assert min(result["ends"].values()) > values / 100, result["ends"]


def test_no_value_starts_a_process_or_gives_two_lines(tmp_path: Path) -> None:
    holds(campaign(20_000, 1, tmp_path), 20_000)


@pytest.mark.soak
def test_no_value_of_a_million_does(tmp_path: Path) -> None:
    result = campaign(1_000_000, 23, tmp_path)
    print(result)
    holds(result, 1_000_000)


HOOK = """
import os
from tests.support import no_process

def keep(start):
    with open(os.environ["STARTS"], "a") as file:
        print(start, file=file)

no_process.watch(keep)
"""
FREE = (
    "SLURM_JOB_NAME",
    "SLURM_DISTRIBUTION",
    "SLURM_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_SUBMIT_DIR",
)
HOSTILE = (
    FREE,
    *((name,) for name in ("SLURMD_NODENAME", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")),
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_GTIDS"),
)


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    """Variables of a command in which a hook notes each process that it would start."""
    write(tmp_path / "site" / "sitecustomize.py", HOOK)
    return {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "STARTS": str(tmp_path / "starts")}


@pytest.mark.parametrize("value", SHELL)
def test_the_command_starts_nothing_for_hostile_variables(
    tmp_path: Path, value: str, watched: dict[str, str]
) -> None:
    """--explain looks at all of them."""
    for names in HOSTILE:
        done = srunddp(
            "--explain", folder=tmp_path, **slurm(0) | dict.fromkeys(names, value) | watched
        )
        assert done.returncode in (0, 78)
        assert done.stderr == ""
        assert all(line.startswith("[rank 0] ") for line in done.stdout.splitlines()), done.stdout
        assert not list(tmp_path.rglob(f"*{CANARY}*"))
        assert not (tmp_path / "starts").exists(), (tmp_path / "starts").read_text()


def test_the_hook_notes_a_process_of_the_command(tmp_path: Path, watched: dict[str, str]) -> None:
    """The script's worker is one."""
    assert srunddp(write(tmp_path / "train.py", ""), folder=tmp_path, **watched).returncode == 0
    assert "os.fork" in (tmp_path / "starts").read_text()
