"""``python -m srunddp`` is the command ``srunddp``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.starting import python, srunddp, write


@pytest.mark.parametrize(
    "arguments",
    ["--version", "--help", "--no-such", "--quiet train.py 7", "--quiet -m train 7", "absent.py"],
)
def test_the_module_does_what_the_command_does(tmp_path: Path, arguments: str) -> None:
    """Also what a script sees: its name, its arguments, and where it finds its neighbours."""
    write(
        tmp_path / "train.py",
        "import __main__, sys; print(sys.argv, sys.path[0], __main__.__file__); sys.exit(3)\n",
    )
    of_module = python("-m", "srunddp", *arguments.split(), folder=tmp_path, PYTHONPATH=str(ROOT))
    of_command = srunddp(*arguments.split(), folder=tmp_path, PYTHONPATH=str(ROOT))
    assert of_module.returncode == of_command.returncode
    assert (of_module.stdout, of_module.stderr) == (of_command.stdout, of_command.stderr)
