"""What stands between the launcher and the script neither hangs, nor loops, nor swallows what happens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROGRAMS, ROOT
from tests.support.starting import LONG, slurm, write

SRUNDDP = str(ROOT / "bin" / "srunddp")
COUNT = str(PROGRAMS / "count_signals.py")


def start(*words: str, **variables: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env={**os.environ, **variables}, text=True, **pipes)


@pytest.mark.parametrize("how", ["relative", "slashes", "symlinked-python"])
def test_no_spelling_of_the_environment_starts_it_for_ever(tmp_path: Path, how: str) -> None:
    script = write(tmp_path / "train.py", "import os, sys; print(sys.prefix, 'SRUNDDP_PYTHON' in os.environ)")
    active = {"relative": os.path.relpath(sys.prefix), "slashes": f"{sys.prefix}//"}.get(how, str(tmp_path / "view"))
    if how == "symlinked-python":
        (tmp_path / "view" / "bin").mkdir(parents=True)
        (tmp_path / "view" / "bin" / "python").symlink_to(Path(sys.prefix, "bin", "python"))
        (tmp_path / "view" / "bin" / "srunddp").symlink_to(SRUNDDP)
    done = start(sys.executable, SRUNDDP, "--quiet", str(script), VIRTUAL_ENV=active)
    output, errors = done.communicate(timeout=LONG)
    if how == "symlinked-python":
        # Python takes this for no environment, so that the packages are not there; what counts is that it says so.
        assert done.returncode == 78
        assert errors.startswith("srunddp: error: Python 3.")
    else:
        assert (done.returncode, output) == (0, f"{sys.prefix} False\n"), errors


def test_the_script_s_end_is_seen_where_sigchld_was_ignored(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "raise SystemExit(5)")
    done = start("bash", "-c", f"trap '' CHLD; exec {SRUNDDP} --quiet {script}")
    done.communicate(timeout=LONG)
    assert done.returncode == 5


def test_a_wrapper_below_the_launcher_can_end_the_script() -> None:
    """The signal's sender is then not the launcher, and the worker has not got it."""
    wrapper = (
        "import signal, subprocess, sys\n"
        f"child = subprocess.Popen([{SRUNDDP!r}, '--quiet', {COUNT!r}], stdout=subprocess.PIPE, text=True)\n"
        "assert child.stdout.readline() == 'ready\\n'\n"
        "child.send_signal(signal.SIGUSR1)\n"
        "print(child.stdout.readline(), end='')\n"
        "child.terminate()\n"
        "print(child.wait(20))\n"
    )
    done = start(sys.executable, "-c", wrapper, **slurm(0, 1))
    output, errors = done.communicate(timeout=LONG)
    assert output.splitlines() == ["signal 1", "143"], errors


@pytest.mark.parametrize("end", ["raise RuntimeError('early')", "raise SystemExit(3)"])
def test_without_a_supervisor_rank_zero_s_end_ends_the_others(tmp_path: Path, end: str) -> None:
    script = write(
        tmp_path / "train.py",
        "import torch, torch.distributed as dist, srunddp\n"
        "world = srunddp.init()\n"
        f"if world.rank == 0: {end}\n"
        "dist.all_reduce(torch.ones(1))\n",
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"PYTHONPATH": str(ROOT)}
    ranks = [start(sys.executable, str(script), **common, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]
    for rank in ranks:
        rank.communicate(timeout=LONG)
    assert ranks[0].returncode == (3 if "3" in end else 1)
    assert ranks[1].returncode != 0
