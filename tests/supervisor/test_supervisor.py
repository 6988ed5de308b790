"""What stands between the launcher and the script neither hangs, nor loops, nor swallows what
happens.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROGRAMS, ROOT
from tests.support.starting import LONG, bare, python, slurm, write

pytestmark = pytest.mark.slow

SRUNDDP = str(ROOT / "bin" / "srunddp")
COUNT = str(PROGRAMS / "count_signals.py")


@pytest.mark.parametrize("how", ["relative", "slashes", "symlinked-python"])
def test_no_spelling_of_the_environment_starts_it_for_ever(tmp_path: Path, how: str) -> None:
    script = write(
        tmp_path / "train.py", "import os, sys; print(sys.prefix, '_SRUNDDP_PYTHON' in os.environ)"
    )
    relative = os.path.relpath(sys.prefix, tmp_path)
    active = {"relative": relative, "slashes": f"{sys.prefix}//"}.get(how, str(tmp_path / "view"))
    if how == "symlinked-python":
        (tmp_path / "view" / "bin").mkdir(parents=True)
        (tmp_path / "view" / "bin" / "python").symlink_to(Path(sys.prefix, "bin", "python"))
        (tmp_path / "view" / "bin" / "srunddp").symlink_to(SRUNDDP)
    done = python(SRUNDDP, "--quiet", script, folder=tmp_path, VIRTUAL_ENV=active)
    if how == "symlinked-python":
        # Python takes this for no environment, so that the packages are not there; what counts is
        # that it says so.
        assert done.returncode == 78
        assert done.stderr.startswith("srunddp: error: Python 3.")
    else:
        assert (done.returncode, done.stdout) == (0, f"{sys.prefix} False\n"), done.stderr


def test_the_script_s_end_is_seen_where_sigchld_was_ignored(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "raise SystemExit(5)")
    command = ["bash", "-c", f"trap '' CHLD; exec {sys.executable} {SRUNDDP} --quiet {script}"]
    assert subprocess.run(command, env=bare(), timeout=LONG).returncode == 5


@pytest.mark.parametrize("options", [[], ["--log-dir=logs"]], ids=["terminal", "files"])
def test_sigurg_shows_where_the_script_is_and_does_not_reach_it(
    options: list[str], tmp_path: Path
) -> None:
    """In the rank's own log too, which is what one attaches to a ticket."""
    text = "import signal\nsignal.signal(signal.SIGURG, print)\ndef load():\n"
    # In one line: the signal may come before print() has returned.
    script = write(
        tmp_path / "train.py", text + "    print('here', flush=True) or input()\nload()\n"
    )
    shown = [
        "\n",
        f"srunddp: rank 0 on {socket.gethostname()} is in load (train.py:4)\n",
        "Stack (most recent call last):\n",
        f'  File "{script}", line 5, in <module>\n',
        f'  File "{script}", line 4, in load\n',
    ]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, SRUNDDP, "--quiet", *options, script],
        cwd=tmp_path,
        env=bare(),
        text=True,
        **pipes,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGURG)
        assert [process.stderr.readline() for _ in shown] == shown
        process.stdin.write("\n")
        process.stdin.close()
        assert (process.stdout.read(), process.stderr.read(), process.wait(LONG)) == ("", "", 0)
    logs = [path.read_text() for path in tmp_path.glob("logs/*/*.rank0.log")]
    assert logs == (["here\n" + "".join(shown)] if options else [])


def test_a_wrapper_below_the_launcher_can_end_the_script(tmp_path: Path) -> None:
    """The signal's sender is then not the launcher, and the worker has not got it."""
    wrapper = (
        "import signal, subprocess, sys\n"
        f"command = [sys.executable, {SRUNDDP!r}, '--quiet', {COUNT!r}]\n"
        "child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)\n"
        "assert child.stdout.readline() == 'ready\\n'\n"
        "child.send_signal(signal.SIGUSR1)\n"
        "print(child.stdout.readline(), end='')\n"
        "child.terminate()\n"
        "print(child.wait(20))\n"
    )
    done = python("-c", wrapper, folder=tmp_path, limit=LONG, **slurm(0, 1))
    assert done.stdout.splitlines() == ["signal 1", "143"], done.stderr


@pytest.mark.parametrize(
    ("end", "code"), [("raise RuntimeError('early')", 1), ("raise SystemExit(3)", 3)]
)
def test_without_a_supervisor_rank_zero_s_end_ends_the_others(
    tmp_path: Path, end: str, code: int
) -> None:
    script = write(
        tmp_path / "train.py",
        "import torch, torch.distributed as dist, srunddp\n"
        "world = srunddp.init()\n"
        f"if world.rank == 0: {end}\n"
        "dist.all_reduce(torch.ones(1))\n",
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "PYTHONPATH": str(ROOT),
        }
    common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with ThreadPoolExecutor(2) as pool:
        variables = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
        first, second = pool.map(lambda each: python(script, folder=tmp_path, **each), variables)
    assert first.returncode == code
    assert second.returncode != 0
