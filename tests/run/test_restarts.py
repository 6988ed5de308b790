"""``--restarts``: a rank fails, and all ranks start anew in the same processes of the launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from srunddp.errors import ConfigError
from srunddp.run.restart import InheritedStart
from tests.support import starting, worlds
from tests.support.facts import tells
from tests.support.starting import started, until, write
from tests.support.worlds import SIZE, Ended, is_gone, world

pytestmark = pytest.mark.slow

START = """
import json, resource, subprocess, threading
import srunddp
START = srunddp.restart_count()

def report():
    same = [os.getppid(), os.getcwd(), sorted(os.sched_getaffinity(0))]
    same += [resource.getrlimit(resource.RLIMIT_NOFILE)]
    words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\\0")
    same += [len(words) + (1 if START == 0 else 0)]
    same += [sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))]
    same += [[n for n in os.environ if "SRUNDDP_RESTART" in n]]
    count = [os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]]
    processes = (os.getpid(), os.getppid())
    descriptors = [len(os.listdir(f"/proc/{process}/fd")) for process in processes]
    said = {"start": START, "same": same, "count": count, "descriptors": descriptors}
    print(json.dumps(said), flush=True)

report()
say(f'start{START}')
srunddp.heartbeat()
"""
FAILS = {
    "exception": ("raise ValueError('boom')", 1, "ValueError: boom"),
    "exit3": ("sys.exit(3)", 3, "sys.exit(3)"),
    "os_exit": ("os._exit(9)", 9, "the process ended with 9"),
    "sigkill": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
    "segv": ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV"),
}


def failing(how: str, times: int) -> str:
    """In each of the first starts another rank fails, and the others wait for it."""
    culprit = f"wait_for(*(f'start{{START}}.{{rank}}' for rank in range(SIZE)))\n        {how}"
    return (
        f"{START}\nif START < {times}:\n    if RANK == (START + 1) % SIZE:\n        {culprit}\n   "
        " rest()\n"
    )


def run(folder: Path, script: str, *options: str, size: int = SIZE) -> Ended:
    return worlds.run(folder, script, *options, size=size)


def lines(ended: Ended) -> list[str]:
    return re.findall(r"srunddp: ((?:not )?restart.*)", ended.text)


@pytest.mark.parametrize("kind", FAILS)
def test_all_ranks_start_anew_until_the_run_ends_well(kind: str, tmp_path: Path) -> None:
    how, code, cause = FAILS[kind]
    ended = run(tmp_path, failing(how, 2), "--restarts=2")
    assert ended.codes == [0] * SIZE, ended.text
    assert [(each.ranks, each.code) for each in ended.verdicts] == [((1,), code), ((2,), code)], (
        ended.text
    )
    assert all(cause in each.cause for each in ended.verdicts), ended.text
    first, second = lines(ended)
    assert tells(first, "restart 1 of 2")
    assert tells(second, "restart 2 of 2")
    assert "srunddp: ended with 0 after 2 restarts\n" in ended.text
    for printed in ended.printed:
        starts = [json.loads(line) for line in printed.splitlines()]
        assert [each["start"] for each in starts] == [0, 1, 2]
        assert [each["count"] for each in starts] == [[str(number), "2"] for number in range(3)]
        assert starts[0]["same"] == starts[1]["same"] == starts[2]["same"]
        assert (
            starts[1]["descriptors"][0]
            == starts[2]["descriptors"][0]
            <= starts[0]["descriptors"][0]
        )
        # One of the rendezvous may be there yet.
        assert starts[2]["descriptors"][1] <= starts[0]["descriptors"][1] + 2


def test_out_of_restarts_the_last_failure_is_the_exit_code(tmp_path: Path) -> None:
    ended = run(tmp_path, failing("sys.exit(3 + START)", 9), "--restarts=1")
    assert ended.codes == [4] * SIZE, ended.text
    first, last = lines(ended)
    assert tells(first, "restart 1 of 1")
    assert tells(last, "not restarted", "restart 1 of 1")


def test_a_script_that_makes_no_step_is_not_started_for_ever(tmp_path: Path) -> None:
    without = failing("sys.exit(3)", 9).replace("srunddp.heartbeat()", "")
    ended = run(tmp_path, without, "--restarts=9")
    assert ended.codes == [3] * SIZE, ended.text
    (last,) = lines(ended)[1:]
    assert tells(last, "not restarted", "without a step")


def test_what_a_start_left_is_gone_before_the_next(tmp_path: Path) -> None:
    """Also where it ignores SIGTERM, and was started in a session of its own."""
    script = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "words = ['sh', '-c', 'trap : TERM; while :; do sleep 1; done']\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    child = subprocess.Popen(words, start_new_session=True)\n"
        "    say('child', child.pid)\n"
        "    wait_for(*(f'child.{rank}' for rank in range(SIZE)))\n"
        "else:\n"
        "    assert all(is_gone(Path(f'child.{rank}').read_text()) for rank in range(SIZE))\n"
    )
    ended = run(
        tmp_path, "import subprocess\n" + script + failing("os._exit(9)", 1), "--restarts=1"
    )
    assert ended.codes == [0] * SIZE, ended.text


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.1, 0.2, 0.4])
def test_the_launchers_signal_wins_over_a_restart(delay: float, tmp_path: Path) -> None:
    """Whenever it comes, no further start follows, and nothing is left."""
    script = failing("os._exit(9)", 99).replace("report()\n", "report()\nsay('start', START)\n", 1)
    with world(tmp_path, script, "--restarts=99") as it:
        until(lambda: it.has_said("start.0") and int((tmp_path / "start.0").read_text()) >= 2)
        time.sleep(delay)
        workers = it.workers()
        for rank in it.ranks:  # as Open MPI and Hydra do
            os.killpg(rank.pid, signal.SIGTERM)
        ended = it.wait()
    assert ended.codes[0] in (9, 143), (
        ended.codes,
        ended.text,
    )  # the script itself may end with 9 before the signal
    assert ended.codes == ended.codes[:1] * SIZE, ended.text
    assert all(map(is_gone, workers))


def test_each_start_has_its_failure_and_its_part_of_the_log(tmp_path: Path) -> None:
    ended = run(tmp_path, failing("sys.exit(3 + START)", 2), "--restarts=2", "--log-dir=logs")
    assert ended.codes == [0] * SIZE, ended.text
    (folder,) = (tmp_path / "logs").iterdir()
    failures = {
        path.name: json.loads(path.read_text())["exit_code"] for path in folder.glob("failure*")
    }
    assert failures == {"failure.1.json": 3, "failure.2.json": 4}
    logs = [path.read_text() for path in folder.glob("*.log")]
    assert [log.count("srunddp: another start begins here") for log in logs] == [2] * SIZE


def test_each_start_has_its_own_files_of_the_monitor(tmp_path: Path) -> None:
    ended = run(tmp_path, failing("os._exit(9)", 1), "--restarts=1", "--monitor=0.5")
    assert ended.codes == [0] * SIZE, ended.text
    (folder,) = (tmp_path / "logs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["monitor.0", "monitor.0.1"]


def test_a_single_process_starts_anew_as_well(tmp_path: Path) -> None:
    ended = run(
        tmp_path, failing("os._exit(9)", 2).replace("% SIZE", "* 0"), "--restarts=2", size=1
    )
    assert ended.codes == [0], ended.text
    assert len(lines(ended)) == 2


def test_processes_that_cannot_be_killed_end_the_run() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        start = InheritedStart(
            remaining=[child.pid], environ={}, folder="/", cpus={0}, files=(1024, 1024)
        )
        with pytest.raises(
            ConfigError, match=f"processes {child.pid} of the previous start cannot be killed"
        ):
            start.check()
        child.kill()
    start.check()  # it was only slow


def test_a_signal_that_one_rank_has_handled_is_no_restart_on_any(tmp_path: Path) -> None:
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: say('handled'))\n"
        f"{START}\nwait_for('handled.1', 'fail')\nif RANK == 0: raise ValueError('boom')\nrest()\n"
    )
    with world(tmp_path, script, "--restarts=3") as it:
        until(lambda: all(it.has_said(f"start0.{rank}") for rank in range(SIZE)))
        # Not by the ranks' launcher, the test.
        subprocess.run(["kill", "-TERM", str(it.ranks[1].pid)], check=True)
        until(lambda: it.has_said("handled.1"))
        time.sleep(3.0)  # until rank 0 has heard of it, which nothing shows
        (tmp_path / "fail").touch()
        ended = it.wait()
    assert ended.codes == [1] * SIZE, ended.text
    (line,) = lines(ended)
    assert tells(line, "not restarted", "SIGTERM")


def test_scripts_that_are_over_do_not_begin_again(tmp_path: Path) -> None:
    """Whatever their teardown does."""
    script = (
        f"{START}\nif RANK == 1: atexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV))\n"
    )
    ended = run(tmp_path, script, "--restarts=3")
    assert ended.codes == [139] * SIZE, ended.text
    (line,) = lines(ended)
    assert tells(line, "not restarted", "scripts", "over")


def test_a_script_of_several_threads_starts_anew(tmp_path: Path) -> None:
    threads = "threading.Thread(target=rest, daemon=True).start()\n"
    ended = run(
        tmp_path,
        failing(f"{threads}        raise ValueError('boom')", 1),
        "--restarts=1",
        "--restart-grace=1s",
    )
    assert ended.codes == [0] * SIZE, ended.text


def test_the_result_is_written_whatever_the_launcher_makes_of_it(tmp_path: Path) -> None:
    ended = run(tmp_path, failing("os._exit(9)", 1), "--restarts=1", "--result=result.json")
    assert (ended.codes, (tmp_path / "result.json").read_text()) == (
        [0] * SIZE,
        '{"exit_code": 0, "restarts": 1}\n',
    )
    ended = run(tmp_path, failing("os._exit(9)", 9), "--restarts=0", "--result=result.json")
    assert (ended.codes, (tmp_path / "result.json").read_text()) == (
        [9] * SIZE,
        '{"exit_code": 9, "restarts": 0}\n',
    )


# What a start knows of the earlier ones.

HAS_STEPPED = """
import srunddp
START = srunddp.restart_count()
if START == 0:
    if RANK == 2:
        srunddp.heartbeat()
        sys.exit(9)
    rest()
"""


def test_a_hang_before_the_first_step_is_found_if_an_earlier_start_made_steps(
    tmp_path: Path,
) -> None:
    script = HAS_STEPPED + "def load(): time.sleep(1000)\n"
    script += "if START == 1 and RANK == 1: load()\nif START == 1: rest()\n"
    ended = run(tmp_path, script, "--restarts=2", "--stall-timeout=0.3")
    assert ended.codes == [0] * SIZE, ended.text
    crash, hang = ended.verdicts
    assert (crash.ranks, hang.ranks, hang.code) == ((2,), (1,), 124), ended.text
    assert tells(hang.cause, "no step in the first", "load (train.py")


def test_work_before_the_first_step_has_no_limit_where_none_is_expected(tmp_path: Path) -> None:
    """As after a last heartbeat; and the first start has none at all. It lasts longer than the
    limit, of about 4 s, in a start that says nothing.
    """
    script = HAS_STEPPED + "srunddp.heartbeat(last=True)\ntime.sleep(12.0)\nprint('worked')\n"
    ended = run(tmp_path, script, "--restarts=1", "--stall-timeout=0.2")
    assert ended.codes == [0] * SIZE, ended.text
    assert ended.printed == ["worked\n"] * SIZE


@pytest.mark.parametrize("ending", ["os._exit(9)", "raise ValueError('boom')"])
def test_steps_of_any_rank_are_progress(ending: str, tmp_path: Path) -> None:
    """As of the last rank of a pipeline, which alone knows the loss; also if it fails before the
    next ping.
    """
    script = (
        "import srunddp\nSTART = srunddp.restart_count()\n"
        f"if RANK == 2 and START < 3:\n    srunddp.heartbeat()\n    {ending}\n"
        "if START < 3: rest()\n"
    )
    ended = run(tmp_path, script, "--restarts=5")
    assert ended.codes == [0] * SIZE, ended.text
    assert "srunddp: ended with 0 after 3 restarts\n" in ended.text


def test_an_import_error_of_the_first_start_is_the_scripts_and_later_it_may_pass(
    tmp_path: Path,
) -> None:
    ended = run(tmp_path, "import not_there\n", "--restarts=3")
    (line,) = lines(ended)
    assert tells(line, "not restarted", "script would fail again")
    script = (
        "import srunddp\nSTART = srunddp.restart_count()\n"
        "if START == 1 and RANK == 1: import not_there\n"
        "srunddp.heartbeat()\n"
        "if START == 0 and RANK == 1: os._exit(9)\n"
        "if START < 2: rest()\n"
    )
    folder = tmp_path / "later"
    folder.mkdir()
    ended = run(folder, script, "--restarts=3")
    assert ended.codes == [0] * SIZE, ended.text
    assert len(lines(ended)) == 2


TAKEN = """
import srunddp
srunddp.heartbeat()
from srunddp.errors import ConfigError
class AnotherError(ConfigError):
    final = True
def fail():
    raise AnotherError("another run is here", expected="one", hint="end one")
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("fail()", 78),
        ("try: fail()\nexcept ConfigError as error: sys.exit(5)", 5),
        ("try: fail()\nexcept ConfigError as error: raise ValueError('lost') from error", 1),
    ],
)
@pytest.mark.parametrize("size", [1, SIZE])
def test_a_final_error_is_never_restarted(how: str, code: int, size: int, tmp_path: Path) -> None:
    """Whatever the script makes of it, and although it has made steps."""
    indented = how.replace("\n", "\n    ")
    script = f"{TAKEN}\nif RANK == SIZE - 1:\n    {indented}\nrest()\n"
    ended = run(tmp_path, script, "--restarts=3", size=size)
    assert ended.codes == [code] * size, ended.text
    (line,) = lines(ended)
    assert tells(line, "not restarted", "must not go on")


GUARD = """
import os, sys, time
import srunddp
from pathlib import Path
from srunddp.train import CheckpointManager
folder, other = Path(sys.argv[1]), Path(sys.argv[2])
with srunddp.init() as world:
    checkpoints = CheckpointManager(folder, world)
    state = checkpoints.load("auto")
    step = state["step"] if state else 0
    print(srunddp.restart_count(), flush=True)
    (folder / "begun").touch()
    while not other.exists():
        step += 1
        srunddp.heartbeat()
        checkpoints.save(step, {"step": step}, wait=True)
"""


def test_two_runs_on_one_folder_do_not_take_it_from_each_other(tmp_path: Path) -> None:
    """The second one goes on, and the first one ends for good."""
    script = write(tmp_path / "guard.py", GUARD)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    words = ("--restarts=3", script, folder, tmp_path / "end")
    with started(*words, folder=tmp_path) as first:
        until((folder / "begun").exists)
        with started(*words, folder=tmp_path) as second:
            code, printed, errors = starting.ended(first)
            (tmp_path / "end").touch()
            result = starting.ended(second)
    assert (code, printed) == (78, "0\n"), errors
    assert "another run has since begun" in errors
    assert "srunddp: not restarted: " in errors
    assert result[:2] == (0, "0\n"), result
