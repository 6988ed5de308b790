"""srunddp starts under every Python of this machine, those of conda and uv included."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.conftest import ROOT
from tests.gpu.ranks import variables_here
from tests.support.starting import bare, write

PLACES = ("miniforge3", "mambaforge", "miniconda3", "anaconda3", ".local/share/uv/python/*", "conda")
ASK = (
    "import os, sys; print('new' if sys.version_info >= (3, 11) else 'old',"
    " 'memfd_create', hasattr(os, 'memfd_create'), 'pidfd_open', hasattr(os, 'pidfd_open'))"
)
SCRIPT = "import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])\n"


def pythons() -> list[str]:
    """This one, those in PATH, and those of conda and uv at their usual places."""
    found = [sys.executable, *filter(None, (shutil.which(f"python3.{minor}") for minor in range(11, 16)))]
    for base in (Path.home(), Path("/opt")):
        found += [str(path) for place in PLACES for path in base.glob(f"{place}/bin/python3")]
        found += [str(path) for place in PLACES for path in base.glob(f"{place}/envs/*/bin/python3")]
    return list({str(Path(path).resolve()): path for path in found}.values())


def test_srunddp_starts_under_every_python_that_is_here(tmp_path: Path) -> None:
    """Some were built without os.memfd_create and os.pidfd_open."""
    write(tmp_path / "train.py", SCRIPT)
    packages = variables_here({"PYTHONPATH": f"{ROOT}:{sysconfig.get_path('purelib')}"})
    wrong = {}
    for python in pythons():
        properties = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=60).stdout
        if not properties.startswith("new"):
            continue
        command = [python, str(ROOT / "bin" / "srunddp"), "--quiet", "train.py"]
        done = subprocess.run(command, cwd=tmp_path, env=bare(packages), capture_output=True, text=True, timeout=60)
        if (done.returncode, done.stdout) != (0, "0 1\n"):
            wrong[python] = (properties, done.returncode, done.stderr)
    assert not wrong
