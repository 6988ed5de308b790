"""The Python environment's file system goes away while ranks run, as a stale NFS mount does."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from contextlib import ExitStack
from pathlib import Path

from tests.conftest import ROOT
from tests.support.starting import LONG, bare, slurm, until, write

FAILS = """
import os, pathlib, sys, time
pathlib.Path(f"ready.{os.environ['RANK']}").touch()
while pathlib.Path("environment").exists():
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    raise OSError(116, "Stale file handle")
time.sleep(600)
"""


def test_a_failed_rank_is_named_without_the_environment(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    environment.mkdir()
    (environment / "source").symlink_to(ROOT)
    (environment / "site-packages").symlink_to(sysconfig.get_path("purelib"))
    script = write(tmp_path / "train.py", FAILS)
    path = f"{environment}/source:{environment}/site-packages"
    command = [Path(sys.base_prefix, "bin", "python3"), "-s", "-c", "from srunddp.cli import main; main()"]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, "--quiet", str(script)],
                    cwd=tmp_path,
                    env=bare(slurm(rank, 3)) | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                    text=True,
                    stderr=subprocess.PIPE,
                )
            )
            for rank in range(3)
        ]
        for process in ranks:
            stack.callback(process.kill)
        until(lambda: all((tmp_path / f"ready.{rank}").exists() for rank in range(3)))
        environment.rename(tmp_path / "away")
        errors = "".join(process.communicate(timeout=LONG)[1] for process in ranks)
    assert [process.returncode for process in ranks] == [1, 1, 1], errors
    assert "rank 1 on" in errors
    assert "failed: OSError: [Errno 116] Stale file handle (exit code 1)" in errors
    assert "ModuleNotFoundError" not in errors
