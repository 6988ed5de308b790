"""Scripts that Python itself starts: what their user did wrong is one line and 78, all else what
Python says.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.starting import bare, python, write

pytestmark = pytest.mark.slow

PATH: dict[str, Any] = {"PYTHONPATH": str(ROOT)}
WRONG_KEY = (
    "srunddp: error: --wrong is an unknown key; expected a key that --help lists -> remove it;"
    " --help lists the keys\n"
)
READS = """
from dataclasses import dataclass
import srunddp
@dataclass
class Settings:
    epochs: int = 1
srunddp.read_config(Settings)
"""
# init_process_group() puts torch's hook above ours, which holds back what is printed on standard
# error meanwhile.
MEETS = """
import srunddp
from srunddp.errors import ConfigError
with srunddp.init(backend="gloo"):
    raise ConfigError("found", expected="more", hint="add it")
"""


def test_a_wrong_setting_is_one_line_and_78(tmp_path: Path) -> None:
    done = python(write(tmp_path / "train.py", READS), "--wrong=1", folder=tmp_path, **PATH)
    assert (done.returncode, done.stderr) == (78, WRONG_KEY)


def test_an_error_below_torchs_own_hook_is_one_line_and_78(tmp_path: Path) -> None:
    done = python(write(tmp_path / "train.py", MEETS), folder=tmp_path, **PATH)
    assert (done.returncode, done.stderr) == (
        78,
        "srunddp: error: found; expected more -> add it\n",
    )


def test_any_other_error_is_what_python_makes_of_it(tmp_path: Path) -> None:
    done = python(
        write(tmp_path / "train.py", f"{READS}raise ValueError('boom')"), folder=tmp_path, **PATH
    )
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        1,
        "Traceback (most recent call last):",
    )
    assert done.stderr.endswith("ValueError: boom\n")


def test_an_interactive_python_goes_on(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", READS)
    command = [sys.executable, "-q", "-i", str(script), "--wrong=1"]
    text = "print('still', 'there')\n"
    done = subprocess.run(
        command,
        env=bare(PATH),
        cwd=tmp_path,
        input=text,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.returncode, done.stdout) == (0, "still there\n")
    assert "ConfigError" in done.stderr
