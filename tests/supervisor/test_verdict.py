"""However a rank of a local world fails: all end with its code, and one verdict names it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.cases import slow_after
from tests.support.facts import tells
from tests.support.launcher import launched
from tests.support.starting import LONG, NODE, SRUNDDP, bare, python, srunddp, until, write
from tests.support.worlds import Ended, is_gone, named, run, world

# What a victim says of its own end, which is nobody's business.
VICTIM = """
def end(*_): raise KeyError("a victim")
signal.signal(signal.SIGTERM, end)
"""
WAYS = {
    "an exception": ("raise ValueError('boom')", 1, "ValueError: boom"),
    "sys.exit(3)": ("sys.exit(3)", 3, "sys.exit(3)"),
    "sys.exit('text')": ("sys.exit('no data')", 1, "sys.exit(1): no data"),
    "os._exit(9)": ("os._exit(9)", 9, "the process ended with 9, by os._exit or a library"),
    "an interrupt": ("signal.raise_signal(signal.SIGINT)", 130, "KeyboardInterrupt"),
}
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGHUP", "SIGUSR1")
WAYS |= {
    name: (f"os.kill(os.getpid(), signal.{name})", 128 + getattr(signal, name), f"killed by {name}")
    for name in SIGNALS
}


# Those first which differ in who fails and in how it is known.
CULPRITS = [(0, "an exception"), (1, "sys.exit(3)"), (1, "SIGSEGV"), (0, "sys.exit(3)")]
CULPRITS += [(1, way) for way in WAYS if (1, way) not in CULPRITS]


@pytest.mark.parametrize(("culprit", "way"), slow_after(3, CULPRITS))
def test_however_a_script_ends_one_verdict_names_its_rank(
    tmp_path: Path, culprit: int, way: str
) -> None:
    how, code, cause = WAYS[way]
    ended = run(tmp_path, f"if RANK == {culprit}:\n    {how}\n{VICTIM}\nrest()")
    named(ended, culprit, code, cause)
    raises = way in ("an exception", "an interrupt")
    assert ended.text.count("Traceback") == raises, ended.text
    # A crash leaves its stack in the verdict.
    assert ('train.py", line' in ended.text) == (raises or way in ("SIGSEGV", "SIGABRT")), (
        ended.text
    )
    assert "a victim" not in ended.text
    assert tells(ended.text, "ended with it", "ranks 0,2" if culprit else "ranks 1-2", NODE)


# Pythons that were built against an old glibc, as Miniforge's and uv's, have neither memfd_create
# nor pidfd_open.
WITHOUT = (
    "import os\nfor name in ('memfd_create', 'pidfd_open', 'copy_file_range'): vars(os).pop(name,"
    " None)\n"
)


def test_a_crash_comes_with_its_stack_below_an_old_python(tmp_path: Path) -> None:
    folder = write(tmp_path / "old" / "sitecustomize.py", WITHOUT).parent
    crash = (
        "assert not hasattr(os, 'memfd_create')\ndef crash(): os.kill(os.getpid(),"
        " signal.SIGSEGV)\n"
    )
    ended = run(
        tmp_path, f"{crash}if RANK == 1: crash()\nrest()", variables={"PYTHONPATH": str(folder)}
    )
    named(ended, 1, 128 + signal.SIGSEGV, "killed by SIGSEGV")
    assert "in crash\n" in ended.text


# An echo, raised before its cause; the culprit fails when rank 0 has been told of it.
ECHOES = {
    "a connection's error": "miss_peer()",
    "torch's class": (
        "class DistError(RuntimeError): pass\n    class Backend(DistError): pass\n    raise"
        " Backend('ncclSystemError')"
    ),
    "one that was caught": "try: miss_peer()\n    except RuntimeError: sys.exit(1)",
}


@pytest.mark.parametrize("echo", slow_after(1, ((name,) for name in ECHOES)))
def test_a_collectives_error_is_an_echo_even_if_first(tmp_path: Path, echo: str) -> None:
    script = f"""
if RANK == 2:
    {ECHOES[echo]}
if RANK == 1:
    wait_for_end(2)
    raise IndexError("the cause")
rest()
"""
    ended = run(tmp_path, script)
    named(ended, 1, 1, "IndexError: the cause")
    assert ended.text.count("Traceback") == 1, ended.text


def test_a_rank_that_left_with_0_is_named_if_missed(tmp_path: Path) -> None:
    script = """
if RANK == 1:
    sys.exit(0)
wait_for_end(1)
miss_peer()
"""
    ended = run(tmp_path, script)
    assert [(each.ranks, each.code) for each in ended.verdicts] == [((1,), 1)], ended.text
    assert tells(ended.verdicts[0].cause, "exit code 0", "then rank")
    assert (ended.codes[0], ended.codes[2]) == (1, 1)


def test_peers_that_ignore_sigterm_are_gone_soon(tmp_path: Path) -> None:
    """They have no --grace."""
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("deaf")
wait_for(*(f"deaf.{rank}" for rank in range(SIZE)))
if RANK == 1:
    wait_for("go")
    raise ValueError("boom")
rest()
"""
    with world(tmp_path, script, "--grace", f"{10 * LONG}") as it:
        workers = it.workers()
        until(lambda: all(it.has_said(f"deaf.{rank}") for rank in range(3)))
        (tmp_path / "go").touch()
        ended = it.wait()
    named(ended, 1, 1, "ValueError: boom")
    assert all(map(is_gone, workers))


@pytest.mark.parametrize(("killed", "speaker"), [(0, 1), (1, 0)])
def test_a_killed_supervisor_is_said_by_the_lowest_other(
    tmp_path: Path, killed: int, speaker: int
) -> None:
    """And by no other, which may end later than that one."""
    with world(
        tmp_path, "if RANK == 2: signal.signal(signal.SIGTERM, signal.SIG_IGN)\nrest()"
    ) as it:
        workers = it.workers()
        it.ranks[killed].kill()
        ended = it.wait()
        until(lambda: all(map(is_gone, workers)))
    assert ended.codes == [-signal.SIGKILL if rank == killed else 137 for rank in range(3)]
    assert [each.ranks for each in ended.verdicts] == [(killed,)], ended.text
    assert f"rank {killed} on" in ended.errors[speaker]
    assert tells(ended.errors[speaker], "srunddp itself", "exit code 137")


def test_a_users_hook_is_called_once_beside_the_verdict(tmp_path: Path) -> None:
    hook = "sys.excepthook = lambda kind, error, trace: print('hook:', error, file=sys.stderr)\n"
    ended = run(tmp_path, f"{hook}if RANK == 1: raise ValueError('boom')\nrest()")
    named(ended, 1, 1, "ValueError: boom")
    assert ended.text.count("hook: boom") == 1


def test_no_failure_says_nothing_leaves_no_process(tmp_path: Path) -> None:
    with world(tmp_path, "") as it:
        ended = it.wait()
        assert all(map(is_gone, it.workers()))
    assert (ended.codes, ended.text) == ([0, 0, 0], "")


def test_rank_0_without_enough_files_says_so_no_rank_waits(tmp_path: Path) -> None:
    ended = run(tmp_path, "rest()", below={0: ["prlimit", "--nofile=66:66"]})
    said = (
        "srunddp: error: rank 0 may open 66 files; expected 67, one for each of 3 ranks and some"
        " more -> raise "
    )
    assert ended.errors[0].startswith(said)
    assert (ended.codes, ended.text.count("error:")) == ([78, 78, 78], 1), ended.text


# With a folder for logs.


def test_failure_json_and_the_victims_own_traceback(tmp_path: Path) -> None:
    script = """
if RANK == 2:
    miss_peer()
if RANK == 1:
    wait_for_end(2)
    raise ValueError("boom")
rest()
"""
    with world(tmp_path, script, "--log-dir", "log") as it:
        ended = it.wait()
    named(ended, 1, 1, "ValueError: boom")
    (file,) = (tmp_path / "log").rglob("failure.json")
    entry = json.loads(file.read_text())
    assert list(entry) == [
        "rank",
        "ranks",
        "node",
        "time",
        "exit_code",
        "cause",
        "traceback",
        "notes",
        "gpu_faults",
        "victims",
    ]
    assert (entry["rank"], entry["ranks"], entry["node"], entry["exit_code"]) == (1, [1], NODE, 1)
    assert entry["cause"] == "ValueError: boom"
    assert entry["traceback"].rstrip().endswith("ValueError: boom")
    assert [victim["rank"] for victim in entry["victims"]] == [0, 2]
    assert entry["victims"][0] == {"rank": 0, "node": NODE, "cause": ""}
    missed = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    assert entry["victims"][1]["cause"] == missed
    logs = [(file.parent / f"{NODE}.rank{rank}.log").read_text() for rank in range(3)]
    assert missed in logs[2]
    assert logs[2].count("Traceback") == 1
    assert "ValueError: boom" in logs[1]
    assert "Traceback" not in logs[0]


def test_the_failure_of_an_earlier_attempt_is_set_aside(tmp_path: Path) -> None:
    variables = {"SLURM_JOB_ID": str(os.getpid())}
    for text in ("first", "second", "third"):
        for ready in tmp_path.glob("*.[0-2]"):
            ready.unlink()
        run(
            tmp_path, f"raise ValueError('{text}')", "--log-dir", "log", size=1, variables=variables
        )
    folder = tmp_path / "log" / f"{os.getpid()}.3"
    names = ("failure.1.json", "failure.2.json", "failure.json")
    causes = [json.loads((folder / name).read_text())["cause"] for name in names]
    assert causes == ["ValueError: first", "ValueError: second", "ValueError: third"]


def test_what_c_printed_is_in_the_file_after_a_kill(tmp_path: Path) -> None:
    script = """
import ctypes
for number in range(3):
    ctypes.CDLL(None).printf(b"C %d\\n", number)
    print("Python", number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run(tmp_path, script, "--log-dir", "log", "--show-ranks", "none", size=1)
    (file,) = (tmp_path / "log").rglob("*.log")
    assert file.read_text().splitlines() == [
        f"{who} {number}" for number in range(3) for who in ("C", "Python")
    ]


def test_a_core_that_was_written_is_told(tmp_path: Path) -> None:
    script = (
        "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (-1, -1))\nif RANK == 1:"
        " os.abort()\nrest()"
    )
    ended = run(tmp_path, script)
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    piped_away = pattern.startswith("|")
    cores = list(tmp_path.glob("core*"))
    assert piped_away or ("core dumped" in ended.text) == bool(cores), (pattern, ended.text)


# What looks like a failure and is none ends nothing, and what is one is not hidden by its looks.


def test_a_traceback_in_any_letters_arrives(tmp_path: Path) -> None:
    """Of each of these JSON makes six bytes, or twelve."""
    ended = run(
        tmp_path, "if RANK == 1: raise ValueError('first ' + '\u6570\U0001f525' * 9000)\nrest()"
    )
    named(ended, 1, 1, "ValueError: first \u6570")
    assert "srunddp/run" not in ended.text


def test_a_fork_that_reaches_the_script_s_end_ends_alone(tmp_path: Path) -> None:
    script = write(
        tmp_path / "train.py",
        "import os, sys\npid = os.fork()\nif pid == 0: sys.exit(3)\nprint(os.waitpid(pid, 0)[1])\n",
    )
    ours = srunddp("--quiet", script, folder=tmp_path)
    theirs = python(script, folder=tmp_path)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout) == (0, "768\n")


def test_what_fails_in_a_handler_of_the_signal_is_told(tmp_path: Path) -> None:
    script = (
        "def save(*_): raise KeyError('epoch')\nsignal.signal(signal.SIGTERM,"
        " save)\nsay('handles')\nrest()"
    )
    with launched(tmp_path, script) as launcher:
        until(lambda: all((tmp_path / f"handles.{rank}").exists() for rank in range(3)))
        launcher.send(15)
        ended = launcher.wait()
    assert tells(ended.text, "launcher", "SIGTERM")
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
    with subprocess.Popen(
        (*SRUNDDP, str(script)), env=bare(), stderr=full, cwd=tmp_path
    ) as process:
        assert process.wait(LONG) == 137
    os.close(read)
    os.close(full)


# A script that is over and whose process does not end: it is said where it is, and it keeps nobody
# for ever.

PYTHON = "def flush(): time.sleep(600)\nif RANK == {rank}: atexit.register(flush)"
C = """
import ctypes
libc = ctypes.CDLL(None)
if RANK == {rank}: libc.__cxa_atexit(libc.pause, None, None)
"""


def lingering(folder: Path, script: str, grace: str) -> Ended:
    return run(folder, script, "--grace", grace, limits={"ends_within": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "codes", "script", "place"),
    [(1, [124, 124, 0], PYTHON, "flush (train.py:"), (0, [124, 0, 0], C, "no stack")],
)
def test_it_is_named_and_then_ended(
    tmp_path: Path, rank: int, codes: list[int], script: str, place: str
) -> None:
    ended = lingering(tmp_path, script.format(rank=rank), "1")
    assert ended.codes == codes, ended.text
    assert tells(ended.errors[rank], "script is over", "1 s", place)
    (verdict,) = ended.verdicts
    assert (verdict.ranks, verdict.code) == ((rank,), 124)
    assert tells(verdict.cause, "script is over", "2 s", place)


@pytest.mark.slow
def test_one_that_ends_in_time_is_left_alone(tmp_path: Path) -> None:
    ended = lingering(
        tmp_path, "atexit.register(say, 'uploaded')\natexit.register(time.sleep, 2)", "20"
    )
    assert (ended.codes, ended.verdicts) == ([0, 0, 0], []), ended.text
    assert all((tmp_path / f"uploaded.{rank}").exists() for rank in range(3))
