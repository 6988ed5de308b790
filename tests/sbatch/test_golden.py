"""Every command of docs/recipes.md writes the script of its golden file, and shellcheck finds
nothing in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import tool
from tests.support.facts import tells
from tests.support.job_specs import GOLDEN, commands, written
from tests.support.starting import srunddp

COMMANDS = commands()


def test_golden_files_are_on_the_page_and_pass_shellcheck() -> None:
    assert set(COMMANDS) == {path.stem for path in GOLDEN.glob("*.sh")}
    shellcheck = tool(str(Path(sys.executable).parent / "shellcheck"), "shellcheck")
    done = subprocess.run(
        [shellcheck, *sorted(map(str, GOLDEN.glob("*.sh")))], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert not any("shellcheck disable" in path.read_text() for path in GOLDEN.glob("*.sh"))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_writes_the_script_of_the_golden_file(name: str) -> None:
    path = GOLDEN / f"{name}.sh"
    text = written(COMMANDS[name])
    if os.environ.get("RENEW_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), (
        f"if it is meant so: RENEW_GOLDEN=1 .venv/bin/python -m pytest {__file__}"
    )


@pytest.mark.parametrize("name", ["nodes_without_gpus", "an_interactive_allocation"])
def test_the_command_prints_the_script_or_keeps_it_in_a_file(name: str, tmp_path: Path) -> None:
    words = ("sbatch", "--srunddp=srunddp", *COMMANDS[name][2:])
    done = srunddp(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace(" --srunddp=srunddp", "") == (GOLDEN / f"{name}.sh").read_text()
    kept = srunddp("sbatch", "--write=job.sh", *words[1:], folder=tmp_path)
    assert (kept.returncode, kept.stdout) == (0, "")
    assert "srunddp: written: job.sh -> " in kept.stderr
    assert (tmp_path / "job.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "logs").is_dir()
    again = srunddp("sbatch", "--write=job.sh", *words[1:], folder=tmp_path)
    assert again.returncode == 78
    assert tells(again.stderr, "job.sh", "; expected ", "new file", " -> ", "--force")
    assert (
        srunddp("sbatch", "--write=job.sh", "--force", *words[1:], folder=tmp_path).returncode == 0
    )
