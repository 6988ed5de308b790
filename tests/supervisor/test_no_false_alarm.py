"""What looks like a failure and is none ends nothing, and what is one is not hidden by its looks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.launcher import launched
from tests.support.starting import LONG, SRUNDDP, bare, python, srunddp, until, write
from tests.support.worlds import named, run


def test_a_traceback_in_any_letters_arrives(tmp_path: Path) -> None:
    """Of each of these JSON makes six bytes, or twelve."""
    ended = run(tmp_path, "if RANK == 1: raise ValueError('first ' + '\u6570\U0001f525' * 9000)\nrest()")
    named(ended, 1, 1, "ValueError: first \u6570")
    assert "srunddp/run" not in ended.text


def test_a_fork_that_reaches_the_script_s_end_ends_alone(tmp_path: Path) -> None:
    script = write(
        tmp_path / "train.py",
        "import os, sys\npid = os.fork()\nif pid == 0: sys.exit(3)\nprint(os.waitpid(pid, 0)[1])\n",
    )
    ours, theirs = srunddp("--quiet", script, folder=tmp_path), python(script, folder=tmp_path)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout) == (0, "768\n")


def test_what_fails_in_a_handler_of_the_signal_is_told(tmp_path: Path) -> None:
    script = "def save(*_): raise KeyError('epoch')\nsignal.signal(signal.SIGTERM, save)\nsay('handles')\nrest()"
    with launched(tmp_path, script) as launcher:
        until(lambda: all((tmp_path / f"handles.{rank}").exists() for rank in range(3)))
        launcher.send(15)
        ended = launcher.wait()
    assert "the launcher ended the run with SIGTERM" in ended.text
    assert "KeyError: 'epoch'" in ended.text


def test_a_full_pipe_as_standard_error_keeps_nobody_waiting(tmp_path: Path) -> None:
    """As where srun's output goes to a pager that nobody scrolls."""
    read, full = os.pipe()
    os.set_blocking(full, False)
    try:
        while True:
            os.write(full, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(full, True)
    script = write(tmp_path / "train.py", "import os; os.kill(os.getpid(), 9)")
    with subprocess.Popen((*SRUNDDP, str(script)), env=bare(), stderr=full, cwd=tmp_path) as process:
        assert process.wait(LONG) == 137
    os.close(read)
    os.close(full)
