"""What a worker leaves behind ends with its rank, and what its wrapper has started does not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from srunddp.supervisor.descendants import Earlier
from srunddp.util.kernel_file import children_of
from tests.support.starting import LONG, SRUNDDP, bare, until, workers_of, write
from tests.support.worlds import World, is_gone, run, world

# What a wrapper does before it becomes srunddp; each helper writes its process id to a file.
HELPERS = {
    "plain": "sleep 600 & echo $! > helper.$SLURM_PROCID",
    "own session": "setsid sleep 600 & echo $! > helper.$SLURM_PROCID",
    "ignores SIGTERM": "sh -c 'trap \"\" TERM; exec sleep 600' & echo $! > helper.$SLURM_PROCID",
    "with a child": (
        "sh -c 'sleep 600 & echo $! > .$SLURM_PROCID; mv .$SLURM_PROCID helper.$SLURM_PROCID; wait'"
        " &"
    ),
}
# In each start but the last, rank 0 fails while a daemon of its own is there.
FAILS = """
import subprocess
START = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
daemon = subprocess.Popen(["setsid", "sleep", "600"], stdin=subprocess.DEVNULL)
say(f"daemon{START}", daemon.pid)
wait_for(*(f"daemon{START}.{rank}" for rank in range(SIZE)))
if START < %d:
    import srunddp
    srunddp.heartbeat()
    if RANK == 0: sys.exit(3)
    rest()
say("helper_was_there", not is_gone(int(Path(f"helper.{RANK}").read_text())))
"""


def wrapped(helper: str, size: int) -> dict[int, list[str]]:
    """For each rank a wrapper that becomes srunddp by exec."""
    return {rank: ["bash", "-c", f'{helper}\nexec "$@"', "wrapper"] for rank in range(size)}


def pid(folder: Path, name: str) -> int:
    return int((folder / name).read_text())


@contextmanager
def ending(folder: Path, *patterns: str) -> Iterator[None]:
    """End the processes in these files in any case."""
    try:
        yield
    finally:
        for pattern in patterns:
            for file in folder.glob(pattern):
                if not is_gone(int(file.read_text())):
                    os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", HELPERS)
def test_a_wrappers_helper_outlives_restarts_and_the_end(
    kind: str, size: int, tmp_path: Path
) -> None:
    """The daemons of each start do not."""
    with ending(tmp_path, "helper.*"):
        ended = run(
            tmp_path, FAILS % 3, "--restarts=3", size=size, below=wrapped(HELPERS[kind], size)
        )
        assert ended.codes == [0] * size, ended.text
        for rank in range(size):
            assert (tmp_path / f"helper_was_there.{rank}").read_text() == "True"
            assert not is_gone(pid(tmp_path, f"helper.{rank}"))
            assert all(is_gone(pid(tmp_path, f"daemon{start}.{rank}")) for start in range(4))


def test_a_wrapper_may_pass_the_output_on(tmp_path: Path) -> None:
    """Its ``tee`` may still have all lines before it when srunddp has ended."""
    wrapper = "exec > >(while [ ! -e over ]; do sleep 0.1; done; exec tee log) 2>&1"
    log = tmp_path / "log"
    ended = run(tmp_path, "print('last words')\nsys.exit(3)", size=1, below=wrapped(wrapper, 1))
    assert ended.codes == [3]
    (tmp_path / "over").touch()
    until(lambda: log.exists() and "last words" in log.read_text(), 10.0)


ORPHANS = {
    # The helper ends, and its child becomes the supervisor's: it is older than the worker.
    "older than the worker": "sh -c 'sleep 600 & echo $! > helper.0; wait' & echo $! > parent",
    # The child is younger than the worker, but in the session of a helper that is still there.
    "in a helper's session": (
        "setsid sh -c 'sleep 600 & (while [ ! -e go ]; do sleep 0.1; done; "
        'sh -c "sleep 600 & echo \\$! > .h; mv .h helper.0"); wait\' &'
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ORPHANS)
def test_an_orphan_of_a_helper_is_spared_if_it_cannot_be_the_workers(
    kind: str, tmp_path: Path
) -> None:
    script = """
Path("go").touch()
if Path("parent").exists(): os.kill(int(Path("parent").read_text()), signal.SIGKILL)
wait_for("helper.0")
orphan = int(Path("helper.0").read_text())
def parent(): return int(Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1])
while parent() != os.getppid(): time.sleep(0.01)
"""
    with ending(tmp_path, "helper.0"):
        ended = run(tmp_path, script, size=1, below=wrapped(ORPHANS[kind], 1))
        assert ended.codes == [0], ended.text
        assert not is_gone(pid(tmp_path, "helper.0"))


def test_a_helper_that_ends_meanwhile_is_not_missed(tmp_path: Path) -> None:
    script = """
os.kill(int(Path("helper.0").read_text()), signal.SIGKILL)
while not is_gone(int(Path("helper.0").read_text())): time.sleep(0.01)
"""
    ended = run(tmp_path, script, size=1, below=wrapped(HELPERS["plain"], 1))
    assert ended.codes == [0], ended.text


def test_a_process_with_the_id_of_an_earlier_one_is_not_spared() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            earlier = Earlier.note()
            assert child.pid not in earlier.without(children_of(os.getpid()))
            # Now as if the one that was noted had ended, and another had got its id since.
            noted = tuple(replace(each, started=each.started - 1) for each in earlier.processes)
            assert child.pid in replace(earlier, processes=noted).without([child.pid])
        finally:
            child.kill()


def test_a_helpers_orphan_that_has_come_meanwhile_is_not_taken_for_the_first_fork() -> None:
    """Others of its orphans may be younger than that one, and older than the first fork."""
    command = ["sleep", "600"]
    with ExitStack() as stack:
        children = []
        for _ in range(4):
            children.append(stack.enter_context(subprocess.Popen(command)))
            stack.callback(children[-1].kill)
            time.sleep(0.03)  # the kernel's times of their starts have ticks of 10 ms
        pids = [child.pid for child in children]
        earlier = Earlier().with_first_fork(reversed(pids[2:]))
        assert earlier.without(pids) == pids[2:]
        assert earlier.with_first_fork(pids) == earlier, "a later start"


def test_a_helper_beside_srunddp_in_a_script_is_no_business_of_it(tmp_path: Path) -> None:
    """There the helper is no child of it."""
    write(tmp_path / "train.py", "print('done')")
    line = f"sleep 600 & echo $! > helper.0; {' '.join(SRUNDDP)} --quiet train.py; exit $?"
    with ending(tmp_path, "helper.0"):
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=bare(), timeout=LONG)
        assert done.returncode == 0
        assert not is_gone(pid(tmp_path, "helper.0"))


# Launchers that a script starts.

SRUN = """#!/bin/bash
# A launcher whose task is not below it, as on another node.
echo $$ > launcher.pid
%s
touch launcher.ready
while :; do sleep 0.1; done
"""
STARTS_LAUNCHER = """
import subprocess
def start_launcher():
    srun = subprocess.Popen(%s, start_new_session=True, stdin=subprocess.DEVNULL)
    wait_for("launcher.ready")
    return srun
"""


def fake_launcher(folder: Path, trap: str, name: str = "srun") -> None:
    (write(folder / name, SRUN % trap)).chmod(0o755)


@pytest.mark.parametrize("name", ["srun", "mpirun", "mpiexec.hydra"])
@pytest.mark.parametrize("how", ["['./NAME']", "['bash', '-c', './NAME; true']"])
@pytest.mark.parametrize(
    "end", ["", "sys.exit(3)", "srun.send_signal(signal.SIGSTOP)\nos._exit(4)"]
)
@pytest.mark.slow
def test_a_launcher_of_the_script_can_end_its_tasks(
    end: str, how: str, name: str, tmp_path: Path
) -> None:
    fake_launcher(tmp_path, "trap 'sleep 0.5; touch ended; exit' TERM", name)
    script = f"{STARTS_LAUNCHER % how.replace('NAME', name)}\nsrun = start_launcher()\n{end}"
    ended = run(tmp_path, script, size=1)
    assert is_gone(pid(tmp_path, "launcher.pid"))
    assert (tmp_path / "ended").exists(), ended.text


@pytest.mark.slow
def test_a_launcher_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    fake_launcher(tmp_path, "trap '' TERM")
    script = f"{STARTS_LAUNCHER % ['./srun']}\nstart_launcher()\nsay('end', time.monotonic())"
    limits = {"launchers_end_within": 1.0}
    ended = run(tmp_path, script, size=1, limits=limits)
    took = time.monotonic() - float((tmp_path / "end.0").read_text())
    assert ended.codes == [0], ended.text
    assert is_gone(pid(tmp_path, "launcher.pid"))
    assert took >= 1.0


def test_a_launcher_does_not_delay_the_end_of_the_worker(tmp_path: Path) -> None:
    """It is asked when the worker is gone."""
    # The launcher writes down whether the worker is there when its SIGTERM comes.
    trap = "trap '[ -e /proc/$(cat ready.0)/status ] && touch too_early; touch asked; exit' TERM"
    fake_launcher(tmp_path, trap)
    script = f"{STARTS_LAUNCHER % ['./srun']}\nstart_launcher()\nos.kill(os.getpid(), 9)"
    ended = run(tmp_path, script, size=1)
    assert ended.codes == [137], ended.text
    assert (tmp_path / "asked").exists()
    assert not (tmp_path / "too_early").exists()


# What a script leaves whose worker ends with 0, while another rank works.

LEAVES = """
import subprocess
def child(name, *words, **how):
    say(name, subprocess.Popen([*words, "sleep", "600"], stdin=subprocess.DEVNULL, **how).pid)
def twice():  # forks twice, as daemons do
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            say("twice", os.getpid())
            rest()
        os._exit(0)
if RANK == 1:
    child("plain")
    child("session", start_new_session=True)
    child("stubborn", "env", "--ignore-signal=TERM")
    twice()
    wait_for("twice.1")
    print("last words", flush=True)
    END
wait_for("go")
"""


def leaves(it: World, folder: Path) -> None:
    until(lambda: it.has_said("twice.1"))
    names = ("plain", "session", "stubborn", "twice")
    until(lambda: all(is_gone(pid(folder, f"{name}.1")) for name in names))
    assert it.ranks[0].poll() is None
    assert it.ranks[1].poll() is None
    (folder / "go").touch()
    ended = it.wait()
    assert ended.codes == [0, 0], ended.text


@pytest.mark.slow
@pytest.mark.parametrize("end", ["sys.exit()", "os._exit(0)"])
@pytest.mark.parametrize("options", [(), ("--log-dir=logs", "--show-ranks=all"), ("--prefix",)])
def test_what_a_rank_has_left_is_gone_while_another_still_works(
    end: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    with world(tmp_path, LEAVES.replace("END", end), *options, size=2) as it:
        leaves(it, tmp_path)
        assert "last words" in it.written("stdout")[1]


@pytest.mark.slow
def test_the_sampler_and_a_helper_stay_where_a_rank_is_over(tmp_path: Path) -> None:
    """Rank 0 samples the node also for the rank that still works."""
    script = """
import subprocess
if RANK == 0:
    child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
    say("left", child.pid)
    os._exit(0)  # by sys.exit() rank 0's worker would stay, as it has the store
wait_for("go")
"""
    below = {0: wrapped(HELPERS["plain"], 1)[0]}
    options = ("--monitor=0.1", "--monitor-dir=samples")
    with (
        ending(tmp_path, "helper.*"),
        world(tmp_path, script, *options, size=2, below=below) as it,
    ):
        until(lambda: it.has_said("left.0") and is_gone(pid(tmp_path, "left.0")))
        worker = it.worker(0)
        until(lambda: is_gone(worker))
        time.sleep(1.0)  # many looks of the supervisor
        children = set(workers_of(it.ranks[0].pid)) - {worker}
        assert len(children) == 2
        assert pid(tmp_path, "helper.0") in children
        (tmp_path / "go").touch()
        ended = it.wait()
        assert ended.codes == [0, 0], ended.text
        assert not is_gone(pid(tmp_path, "helper.0"))


@pytest.mark.slow
def test_a_launcher_that_a_rank_has_left_can_end_its_tasks(tmp_path: Path) -> None:
    fake_launcher(tmp_path, "trap 'sleep 0.5; touch ended; exit' TERM")
    script = f"{STARTS_LAUNCHER % ['./srun']}\nif RANK == 1: start_launcher()\nelse: wait_for('go')"
    with world(tmp_path, script, size=2) as it:
        until(lambda: it.has_said("ended"))
        assert it.ranks[1].poll() is None
        (tmp_path / "go").touch()
        assert it.wait().codes == [0, 0]
