"""What looks like a failure and is none ends nothing, and what is one is not hidden by its looks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.coordinator import Coordinator
from srunddp.supervisor.failure import Failure, FailureKind
from srunddp.supervisor.participant import Participant
from tests.support.launcher import launched
from tests.support.socket_pairs import hear, pair, pairs, post, tell
from tests.support.starting import LONG, SRUNDDP, bare, python, srunddp, until, write
from tests.support.worlds import named, run


def test_ranks_that_needed_minutes_to_meet_have_not_been_silent() -> None:
    with pairs(range(1, 3)) as (ours, _), pair() as (line, _):
        zero, other = Coordinator(post(), ours), Participant(post(1), line)
        zero.tick(1000.0)
        other.tick(1000.0)
        assert zero.verdict is other.verdict is None


def test_a_traceback_in_any_letters_arrives(tmp_path: Path) -> None:
    """Of each of these JSON makes six bytes, or twelve."""
    ended = run(tmp_path, "if RANK == 1: raise ValueError('first ' + '\u6570\U0001f525' * 9000)\nrest()")
    named(ended, 1, 1, "ValueError: first \u6570")
    assert "srunddp/run" not in ended.text


def test_a_message_that_the_kernel_takes_in_parts_arrives_whole() -> None:
    with pair() as (ours, theirs):
        wire, far = SupervisorConnection(ours), SupervisorConnection(theirs)
        long = {"failure": "x" * 500_000}
        wire.send(long)
        found: list[object] = []

        def arrived() -> bool:
            wire.send({})
            found.extend(far.read())
            return long in found

        until(arrived)


def test_a_rank_that_is_through_is_expected_to_make_no_step() -> None:
    """It may be saving or uploading for long; and so may one that has said so by its last heartbeat."""
    with pairs(range(1, 3)) as (ours, theirs):
        zero = Coordinator(post(stall_timeout=3.0, step=lambda: 7), ours)
        for line in theirs.values():
            tell(line, ping=7)
        hear(zero)
        zero.tick(1.0)
        zero.done()
        for line in theirs.values():
            tell(line, goodbye=True)
            tell(line, ping=8)
        hear(zero)
        for now in (2.0, 5.0, 8.0, 11.0, 14.0):
            zero.tick(now)
        assert zero.verdict is None


def test_a_rank_whose_last_word_was_taken_back_by_its_kernel_has_left() -> None:
    with pairs(range(1, 3)) as (ours, theirs):
        zero = Coordinator(post(), ours)
        tell(theirs[1], goodbye=True)
        hear(zero)
        ours[1].send(b"{}\n")  # unread at the other end, which then ends the line by a reset
        theirs[1].close()
        hear(zero)
        assert zero.verdict is None


def test_nothing_is_looked_at_again_and_again_while_a_rank_saves() -> None:
    with pairs(range(1, 3)) as (ours, theirs):
        zero = Coordinator(post(stall_timeout=3.0, step=lambda: 7), ours)
        zero.tick(1.0)
        zero.fail(Failure(1, "node02", "the launcher ended the run", 143, FailureKind.ASKED), 2.0)
        for line in theirs.values():
            tell(line, ping=1)
        hear(zero, now=9.0)
        zero.tick(10.0)
        assert zero.tick(10.1) > 0.1


def test_a_fork_of_the_script_that_runs_to_the_script_s_end_ends_for_itself_alone(tmp_path: Path) -> None:
    script = write(
        tmp_path / "train.py",
        "import os, sys\npid = os.fork()\nif pid == 0: sys.exit(3)\nprint(os.waitpid(pid, 0)[1])\n",
    )
    ours, theirs = srunddp("--quiet", script, folder=tmp_path), python(script, folder=tmp_path)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout) == (0, "768\n")


def test_what_fails_in_the_handler_of_the_launcher_s_signal_is_told(tmp_path: Path) -> None:
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
