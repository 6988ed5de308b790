"""Ranks that agree to stop do so after one step, with one line that blames nobody, and one exit
code.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, ROOT
from tests.support.starting import LONG, SRUNDDP, bare, until
from tests.support.worlds import World, is_gone, named, world
from tests.train.conftest import fake_command

pytestmark = pytest.mark.slow

FEW = 2  # ranks; each imports torch
PREEMPTED = f"""
sys.path.insert(0, {str(PROGRAMS)!r})
import preempted
preempted.main(Path())
"""
FOLDER = r"checkpoint step-(\d{8})\.pt"
LEFT = rf"stopped after step (\d+) by SIGTERM; {FOLDER}"
AGAIN = "start it again with resume=auto"
NOT_REQUEUED = (
    rf"stopped after step (\d+) by SIGUSR2; {FOLDER}; not requeued: %s -> requeue it, or {AGAIN}"
)
NO_JOB = (NOT_REQUEUED % "no job of Slurm").replace(f"requeue it, or {AGAIN}", AGAIN)
REQUEUED = rf"stopped after step (\d+) by SIGUSR2; {FOLDER}; the job is requeued"


def stopped(errors: str, sentence: str, code: int) -> int:
    """After which step, of which there is a whole checkpoint; nothing else was said."""
    # A supervisor begins with an empty line, as a script may have left a line unfinished.
    line = errors.removeprefix("\n")
    found = re.fullmatch(rf"srunddp: {sentence} \(exit code {code}\)\n", line)
    assert found, errors
    assert int(found[1]) == int(found[2])
    return int(found[1])


def checkpoint(folder: Path) -> int:
    (path,) = folder.glob("step-*.pt")
    (step,) = set(path.read_text().splitlines())
    assert not list(folder.glob(".*.tmp"))
    return int(step)


def at_work(it: World) -> list[int]:
    """The workers, once all are past their first step."""
    until(lambda: all(it.has_said(f"at.0.{rank}") for rank in range(len(it.ranks))))
    return it.workers()


def scontrol(folder: Path, body: str) -> dict[str, str]:
    return {"PATH": fake_command(folder, "scontrol", body)["PATH"]}


@pytest.mark.parametrize(
    ("size", "rank", "whom"), [(2, 0, "worker"), (3, 2, "worker"), (2, 1, "supervisor")]
)
def test_one_signalled_rank_is_enough_to_leave_with_75(
    tmp_path: Path, size: int, rank: int, whom: str
) -> None:
    with world(tmp_path, PREEMPTED, size=size, variables={"PATH": str(tmp_path)}) as it:
        workers = at_work(it)
        # Not by ourselves: we are their launcher, whose signals reach both.
        subprocess.run(
            ["kill", "-USR2", str(workers[rank] if whom == "worker" else it.ranks[rank].pid)],
            check=True,
        )
        ended = it.wait()
    assert ended.codes == [75] * size, ended.text
    assert stopped(ended.text, NOT_REQUEUED % "no scontrol in PATH", 75) == checkpoint(tmp_path)
    assert ended.errors[1:] == [""] * (size - 1)


def test_after_a_requeue_all_wait_for_slurm_s_sigterm(tmp_path: Path) -> None:
    """It goes to every process of the step, scontrol too, before that has its answer."""
    with world(
        tmp_path, PREEMPTED, size=FEW, variables=scontrol(tmp_path, "kill -TERM $$ $PPID")
    ) as it:
        workers = at_work(it)
        it.send(signal.SIGUSR2, workers[1])
        until((tmp_path / "calls").exists)
        time.sleep(1.0)
        assert not any(map(is_gone, workers))
        it.send(signal.SIGTERM, *workers)
        ended = it.wait()
    assert ended.codes == [143] * FEW, ended.text
    assert stopped(ended.text, REQUEUED, 143) == checkpoint(tmp_path)
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_a_scontrol_that_is_ended_leaves_the_job_to_slurm(tmp_path: Path) -> None:
    """It may be requeued by now, or cancelled: a job script that requeues upon 75 must not do
    so.
    """
    body = (
        "import os, signal; signal.pthread_sigmask(signal.SIG_UNBLOCK, [15]); os.kill(os.getppid(),"
        " 15); os.kill(0, 15)"
    )
    variables = scontrol(tmp_path, f'exec {sys.executable} -c "{body}"')
    with world(tmp_path, PREEMPTED, size=FEW, variables=variables) as it:
        it.send(signal.SIGUSR2, *at_work(it))
        ended = it.wait()
    assert ended.codes == [143] * FEW, ended.text
    stopped(ended.text, LEFT.replace("TERM", "USR2"), 143)


@pytest.mark.parametrize("late", [0, 1])
def test_a_stopped_rank_waits_for_one_that_is_saving(tmp_path: Path, late: int) -> None:
    """Its word ends nobody, and rank 0, which hosts the store, stays until all have stopped."""
    script = PREEMPTED.replace("preempted.main(Path())", "try: preempted.main(Path())\nfinally:")
    script += f"    say('saving')\n    if RANK == {late}: wait_for('go')\n"
    with world(tmp_path, script, size=FEW, limits={"kill_after": 0.1}) as it:
        workers = at_work(it)
        it.launcher_sends(signal.SIGTERM)
        until(lambda: all(it.has_said(f"saving.{rank}") for rank in range(FEW)))
        time.sleep(0.5)  # longer than one that is to end has time for
        assert not any(map(is_gone, workers))
        (tmp_path / "go").touch()
        ended = it.wait()
    assert ended.codes == [143] * FEW, ended.text
    assert stopped(ended.text, LEFT, 143) == checkpoint(tmp_path)


def test_a_worker_knows_that_it_is_ended_for_another(tmp_path: Path) -> None:
    script = """
from srunddp import telemetry
signal.signal(signal.SIGTERM, lambda *_: (say("ending", telemetry.is_terminating()), os._exit(0)))
say("set", telemetry.is_terminating())
wait_for(*(f"set.{rank}" for rank in range(SIZE)))
if RANK == 1: raise ValueError("boom")
rest()
"""
    with world(tmp_path, script) as it:
        named(it.wait(), 1, 1, "ValueError: boom")
    for rank in (0, 2):
        assert [(tmp_path / f"{when}.{rank}").read_text() for when in ("set", "ending")] == [
            "False",
            "True",
        ]


@pytest.mark.parametrize(
    "command", [(*SRUNDDP, "--quiet"), (sys.executable,)], ids=["guarded", "alone"]
)
def test_a_world_of_one_says_it_once(tmp_path: Path, command: tuple[str, ...]) -> None:
    environ = bare({"PATH": "/nowhere", "PYTHONPATH": str(ROOT)})
    words = [*command, str(PROGRAMS / "preempted.py"), str(tmp_path)]
    with subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True) as process:
        until((tmp_path / "at.0.0").exists)
        process.send_signal(signal.SIGUSR2)
        _, errors = process.communicate(timeout=LONG)
    assert process.returncode == 75, errors
    stopped(errors.replace(f"{tmp_path}/", ""), NO_JOB, 75)
