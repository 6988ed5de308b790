"""Time in which nothing happens: who stands still is named, and who has a reason to is left alone.

Such tests take their time, so all of them run at once.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.supervisor.test_verdict import WITHOUT
from tests.support.launcher import launched
from tests.support.starting import LONG, python, srunddp, until, write
from tests.support.worlds import (
    SIZE,
    Ended,
    has_handled_signals,
    is_gone,
    is_stopped,
    named,
    run,
    world,
)

pytestmark = pytest.mark.slow

SUSPENDED = 13.0  # longer than a stopped worker is given
SAVES = """
def save(*_):
    began = time.monotonic()
    while time.monotonic() < began + 3.0:
        time.sleep(0.05)
    say("saved")
    {then}
if RANK == {rank}:
    signal.signal(signal.SIGTERM, save)
    say("handles")
wait_for("handles.{rank}")
rest()
"""
# Its path is what tells that a rank waits for others.
COLLECTIVE = "import time\ndef all_reduce():\n    while True: time.sleep(0.05)\n"
STALLS = """
import importlib.util, srunddp
spec = importlib.util.spec_from_file_location("collective", "torch/distributed/collective.py")
collective = importlib.util.module_from_spec(spec)
spec.loader.exec_module(collective)
def load_batch():
    while True: time.sleep(0.05)
srunddp.heartbeat()
if RANK == 1: load_batch()
collective.all_reduce()
"""
GLOO = """
from datetime import timedelta
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
# Once all are connected, for which a busy machine may take longer.
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
def load_batch():
    while True: time.sleep(0.05)
if RANK == 2: load_batch()
dist.all_reduce(x)
"""
HOLDS = """
import ctypes, srunddp
for _ in range(3): srunddp.heartbeat()
if RANK == 1:
    ctypes.PyDLL(None).sleep(8)
    say("held")
wait_for("held.1")
"""


def stopped(folder: Path) -> tuple[Ended, float]:
    """Rank 2 for good, and rank 1 for a moment that its supervisor has seen."""
    with world(folder, "rest()") as it:
        one, two = it.workers()[1:]
        began = time.monotonic()
        it.send(signal.SIGSTOP, one, two)
        until(lambda: is_stopped(one) and has_handled_signals(it.ranks[1].pid))
        it.send(signal.SIGCONT, one)
        return it.wait(), time.monotonic() - began


def suspended(folder: Path, size: int) -> Ended:
    """The whole job, as by scontrol suspend; then it goes on to its end.

    In the worst order: every supervisor sees its worker stop, and is back before it. The kernels
    answer meanwhile, so that no connection is lost.
    """
    with world(folder, "wait_for('go')\nsay('went')", "--lost-after", "3", size=size) as it:
        supervisors = [rank.pid for rank in it.ranks]
        workers = it.workers()
        it.send(signal.SIGSTOP, *workers)
        until(lambda: all(map(is_stopped, workers)) and all(map(has_handled_signals, supervisors)))
        it.send(signal.SIGSTOP, *supervisors)
        time.sleep(SUSPENDED)
        it.send(signal.SIGCONT, *supervisors)
        until(lambda: all(map(has_handled_signals, supervisors)))
        it.send(signal.SIGCONT, *workers)
        (folder / "go").touch()
        return it.wait()


def asked(folder: Path, rank: int, then: str) -> tuple[Ended, bool]:
    with launched(folder, SAVES.format(rank=rank, then=then)) as launcher:
        until((folder / f"handles.{rank}").exists)
        launcher.send(signal.SIGTERM)
        return launcher.wait(), (folder / f"saved.{rank}").exists()


def stalled(folder: Path) -> Ended:
    (folder / "torch" / "distributed").mkdir(parents=True)
    (folder / "torch" / "distributed" / "collective.py").write_text(COLLECTIVE)
    return run(folder, STALLS, "--stall-timeout", "2")


SCENES: dict[str, Callable[[Path], Any]] = {
    "stopped": stopped,
    "suspended": lambda folder: suspended(folder, 3),
    "suspended alone": lambda folder: suspended(folder, 1),
    "rank 1 saves": lambda folder: asked(folder, 1, "sys.exit(0)"),
    "rank 0 saves": lambda folder: asked(folder, 0, "sys.exit(1)"),
    "stalled": stalled,
    "the GIL": lambda folder: run(folder, HOLDS, "--stall-timeout", "60"),
    "Gloo": lambda folder: run(folder, GLOO),
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    with ThreadPoolExecutor(len(SCENES)) as pool:
        yield {
            name: pool.submit(play, tmp_path_factory.mktemp(name.replace(" ", "_")))
            for name, play in SCENES.items()
        }


Scenes = dict[str, "Future[Any]"]


def test_who_saves_after_the_launcher_s_signal_has_time(scenes: Scenes) -> None:
    for name in ("rank 1 saves", "rank 0 saves"):
        ended, saved = scenes[name].result()
        assert saved, ended.text
        said = (
            "\nsrunddp: the launcher ended the run with SIGTERM, as for scancel or the time limit"
            " (exit code 143)\n"
        )
        assert ended.text == said
        assert ended.verdicts == []
        assert 143 in ended.codes
    ended, _ = scenes["rank 1 saves"].result()
    assert ended.codes == [143, 0, 143]


def test_ranks_that_stall_are_ended_with_the_cause_s_stack(scenes: Scenes) -> None:
    ended = scenes["stalled"].result()
    named(ended, 1, 124, "no step for 2 s, in load_batch (train.py:")
    assert "Stack (most recent call last):" in ended.text
    assert ", in load_batch\n" in ended.text
    assert "srunddp: ranks 0,2 on " in ended.text
    assert " in all_reduce (collective.py:3)\n" in ended.text


def test_a_rank_that_hangs_is_named_upon_the_time_limit_of_gloo(scenes: Scenes) -> None:
    """Other cases are in test_coordinator.py, with messages and times."""
    ended = scenes["Gloo"].result()
    named(ended, 2, 124, "it hangs in load_batch (train.py:")
    assert "Timed out waiting 5000ms" in ended.verdicts[0].cause
    assert ", in load_batch\n" in ended.text, "its stack"


def test_a_rank_that_holds_the_gil_is_left_alone_until_the_limit(scenes: Scenes) -> None:
    ended = scenes["the GIL"].result()
    assert (ended.codes, ended.text) == ([0, 0, 0], "")


def test_a_rank_that_is_stopped_for_ten_seconds_is_named(scenes: Scenes) -> None:
    ended, took = scenes["stopped"].result()
    named(ended, 2, 128 + signal.SIGSTOP, "stopped by SIGSTOP for 10 s")
    assert took > 9.0


@pytest.mark.parametrize(("scene", "size"), [("suspended", 3), ("suspended alone", 1)])
def test_a_job_that_was_suspended_goes_on(scenes: Scenes, scene: str, size: int) -> None:
    ended = scenes[scene].result()
    assert (ended.codes, ended.text) == ([0] * size, "")


@pytest.mark.parametrize("how", ["", "stubborn", "old Python"])
def test_the_launcher_s_end_leaves_nothing(tmp_path: Path, how: str) -> None:
    if how == "stubborn":
        ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    else:
        ignore = ""
    folder = write(
        tmp_path / "old" / "sitecustomize.py", WITHOUT if how == "old Python" else ""
    ).parent
    script = f"{ignore}say('waits')\nrest()"
    # Nothing is left for which --grace would be waited.
    with launched(tmp_path, script, "--grace", f"{10 * LONG}", PYTHONPATH=str(folder)) as launcher:
        until(lambda: all((tmp_path / f"waits.{rank}").exists() for rank in range(3)))
        launcher.process.kill()
        until(lambda: all(map(is_gone, (*launcher.supervisors, *launcher.workers))))
    assert (tmp_path / "stderr.0").read_text().count("has ended (exit code 137)") <= 1
    everything = "".join((tmp_path / f"stderr.{rank}").read_text() for rank in range(3))
    ends = re.findall(rf"process {launcher.process.pid}\b.* \(exit code 137\)", everything)
    assert len(ends) == 1


# What the end of a script may take: uploads in atexit end, and who does not end is ended.


KILL_AFTER = 0.2  # for ranks that have nothing to save
UPLOADS = """
def upload():
    time.sleep(1)
    say("uploaded")
atexit.register(upload)
"""
FAILS = UPLOADS + "if RANK == {rank}: raise ValueError('boom')\nrest()"
STOPS = UPLOADS + "from srunddp.errors import Stopped\nraise Stopped('stopped after step 5', 75)"


def uploads(folder: Path, script: str) -> tuple[Ended, list[int]]:
    """Which ranks had uploaded at the first bad end, when ``srun --kill-on-bad-exit=1`` kills all
    that is left.
    """
    with world(folder, script, limits={"kill_after": KILL_AFTER}) as it:
        it.workers()
        until(lambda: any(rank.poll() for rank in it.ranks))
        uploaded = [rank for rank in range(SIZE) if it.has_said(f"uploaded.{rank}")]
        return it.wait(), uploaded


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_rank_s_exit_handlers_end_first(tmp_path: Path, rank: int) -> None:
    ended, uploaded = uploads(tmp_path, FAILS.format(rank=rank))
    named(ended, rank, 1, "ValueError: boom")
    assert uploaded == [rank]


def test_after_a_stop_the_exit_handlers_of_all_ranks_end(tmp_path: Path) -> None:
    ended, uploaded = uploads(tmp_path, STOPS)
    assert ended.codes == [75] * SIZE, ended.text
    assert uploaded == [*range(SIZE)]


def test_an_end_that_takes_longer_than_grace_is_cut_short(tmp_path: Path) -> None:
    endless = "atexit.register(time.sleep, 600)\nif RANK == 1: raise ValueError('boom')\nrest()"
    with world(tmp_path, endless, "--grace", "1") as it:
        it.workers()
        began = time.monotonic()
        named(it.wait(), 1, 1, "ValueError: boom")
    assert 1.0 < time.monotonic() - began < 28.0, "the default is 30 s"


@pytest.mark.parametrize("end", ["raise ValueError('boom')", "sys.exit(3)"])
def test_a_single_process_has_no_limit(tmp_path: Path, end: str) -> None:
    script = write(
        tmp_path / "train.py",
        "import atexit, sys, time\natexit.register(print, 'uploaded')\natexit.register(time.sleep,"
        f" 1.5)\n{end}",
    )
    ours = srunddp("--quiet", "--grace", "0.1", script, folder=tmp_path)
    theirs = python(script, folder=tmp_path)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ours.stdout == "uploaded\n"
