"""However a rank of a local world fails: all end with its code, and one verdict names it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.starting import NODE, python, srunddp, until, write
from tests.support.worlds import is_gone, named, run, world

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


@pytest.mark.parametrize(("culprit", "way"), [(0, "an exception"), (0, "sys.exit(3)"), *((1, way) for way in WAYS)])
def test_however_a_script_ends_one_verdict_names_its_rank(tmp_path: Path, culprit: int, way: str) -> None:
    how, code, cause = WAYS[way]
    ended = run(tmp_path, f"if RANK == {culprit}:\n    {how}\n{VICTIM}\nrest()")
    named(ended, culprit, code, cause)
    assert ended.text.count("Traceback") == (way in ("an exception", "an interrupt")), ended.text
    assert "a victim" not in ended.text
    taken = ",".join(str(rank) for rank in range(3) if rank != culprit)
    assert f"srunddp: ended with it: ranks {'1-2' if culprit == 0 else taken} on {NODE}\n" in ended.text


@pytest.mark.parametrize("name", SIGNALS)
def test_whatever_signal_ends_a_script_one_verdict_names_it(tmp_path: Path, name: str) -> None:
    ended = run(tmp_path, f"if RANK == 2: os.kill(os.getpid(), signal.{name})\n{VICTIM}\nrest()")
    named(ended, 2, 128 + getattr(signal, name), f"killed by {name}")
    assert "a victim" not in ended.text
    # A crash leaves its stack in the verdict.
    assert ('train.py", line' in ended.text) == (name in ("SIGSEGV", "SIGABRT")), ended.text


# An echo, raised before its cause; the culprit fails when rank 0 has been told of it.
ECHOES = {
    "a connection's error": "raise RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer')",
    "torch's class": (
        "class DistError(RuntimeError): pass\n    class Backend(DistError): pass\n    raise Backend('ncclSystemError')"
    ),
    "one that was caught": "try: raise RuntimeError('Broken pipe')\n    except RuntimeError: sys.exit(1)",
}


@pytest.mark.parametrize("echo", ECHOES)
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


def test_an_echo_without_a_cause_is_named_all_the_same(tmp_path: Path) -> None:
    named(
        run(tmp_path, "if RANK == 1: raise RuntimeError('Connection reset by peer')\nrest()"), 1, 1, "Connection reset"
    )


def test_a_rank_that_left_with_0_is_named_if_missed(tmp_path: Path) -> None:
    script = """
if RANK == 1:
    sys.exit(0)
wait_for_end(1)
raise RuntimeError("Connection closed by peer")
"""
    ended = run(tmp_path, script)
    assert [(each.ranks, each.code) for each in ended.verdicts] == [((1,), 1)], ended.text
    assert "it left with exit code 0 while others still worked; then rank " in ended.verdicts[0].cause
    assert (ended.codes[0], ended.codes[2]) == (1, 1)


def test_a_rank_that_left_with_0_is_not_blamed(tmp_path: Path) -> None:
    script = "if RANK == 1: sys.exit(0)\nwait_for_end(1)\nif RANK == 2: raise ValueError('boom')\nrest()"
    ended = run(tmp_path, script)
    assert [(each.ranks, each.code) for each in ended.verdicts] == [((2,), 1)], ended.text


def test_an_abort_waits_for_its_cause(tmp_path: Path) -> None:
    script = """
if RANK == 2:
    os.abort()
if RANK == 1:
    while not is_gone(Path("ready.2").read_text()):
        time.sleep(0.01)
    raise IndexError("the cause")
rest()
"""
    named(run(tmp_path, script), 1, 1, "IndexError: the cause")


def test_peers_that_ignore_sigterm_are_gone_soon(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("deaf")
wait_for(*(f"deaf.{rank}" for rank in range(SIZE)))
if RANK == 1:
    wait_for("go")
    raise ValueError("boom")
rest()
"""
    with world(tmp_path, script) as it:
        workers = it.workers()
        until(lambda: all(it.has_said(f"deaf.{rank}") for rank in range(3)))
        began = time.monotonic()
        (tmp_path / "go").touch()
        ended = it.wait()
        took = time.monotonic() - began
    named(ended, 1, 1, "ValueError: boom")
    assert took < 2.5
    assert all(map(is_gone, workers))


@pytest.mark.parametrize(("killed", "speaker"), [(0, 1), (1, 0)])
def test_a_killed_supervisor_is_said_by_the_lowest_other(tmp_path: Path, killed: int, speaker: int) -> None:
    with world(tmp_path, "rest()") as it:
        workers = it.workers()
        it.ranks[killed].kill()
        ended = it.wait()
        until(lambda: all(map(is_gone, workers)))
    assert ended.codes == [-signal.SIGKILL if rank == killed else 137 for rank in range(3)]
    assert [each.ranks for each in ended.verdicts] == [(killed,)], ended.text
    assert f"rank {killed} on" in ended.errors[speaker]
    assert "srunddp itself was killed (exit code 137)" in ended.errors[speaker]


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
    began = time.monotonic()
    ended = run(tmp_path, "rest()", below={0: ["prlimit", "--nofile=66:66"]})
    said = "srunddp: error: rank 0 may open 66 files; expected 67, one for each of 3 ranks and some more -> raise "
    assert ended.errors[0].startswith(said)
    assert (ended.codes, ended.text.count("error:")) == ([78, 78, 78], 1), ended.text
    assert time.monotonic() - began < 20.0


# With a folder for logs.


def test_failure_json_and_the_victims_own_traceback(tmp_path: Path) -> None:
    script = """
if RANK == 2:
    raise RuntimeError("Connection closed by peer")
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
    assert list(entry) == ["rank", "ranks", "node", "time", "exit_code", "cause", "traceback", "notes", "victims"]
    assert (entry["rank"], entry["ranks"], entry["node"], entry["exit_code"]) == (1, [1], NODE, 1)
    assert entry["cause"] == "ValueError: boom"
    assert entry["traceback"].rstrip().endswith("ValueError: boom")
    assert [victim["rank"] for victim in entry["victims"]] == [0, 2]
    assert entry["victims"][0] == {"rank": 0, "node": NODE, "cause": ""}
    assert entry["victims"][1]["cause"] == "RuntimeError: Connection closed by peer"
    logs = [(file.parent / f"{NODE}.rank{rank}.log").read_text() for rank in range(3)]
    assert "RuntimeError: Connection closed by peer" in logs[2]
    assert logs[2].count("Traceback") == 1
    assert "ValueError: boom" in logs[1]
    assert "Traceback" not in logs[0]


def test_the_failure_of_an_earlier_attempt_is_set_aside(tmp_path: Path) -> None:
    variables = {"SLURM_JOB_ID": str(os.getpid())}
    for text in ("first", "second"):
        for ready in tmp_path.glob("*.[0-2]"):
            ready.unlink()
        run(tmp_path, f"raise ValueError('{text}')", "--log-dir", "log", size=1, variables=variables)
    folder = tmp_path / "log" / f"{os.getpid()}.3"
    causes = [json.loads((folder / name).read_text())["cause"] for name in ("failure.1.json", "failure.json")]
    assert causes == ["ValueError: first", "ValueError: second"]
    assert not (folder / "failure.2.json").exists()


def test_what_c_printed_is_in_the_file_after_a_kill(tmp_path: Path) -> None:
    script = """
import ctypes
for number in range(3):
    ctypes.CDLL(None).printf(b"C %d\\n", number)
    print("Python", number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run(tmp_path, script, "--log-dir", "log", "--tee", "none", size=1)
    (file,) = (tmp_path / "log").rglob("*.log")
    assert file.read_text().splitlines() == [f"{who} {number}" for number in range(3) for who in ("C", "Python")]


# A single process behaves as Python does.


@pytest.mark.parametrize("way", ["raise ValueError('boom')", "sys.exit('no data')", "sys.exit(3)", "os._exit(9)", "1"])
def test_a_world_of_one_says_what_python_says_and_no_more(tmp_path: Path, way: str) -> None:
    write(tmp_path / "train.py", f"import os, sys\n{way}\n")
    ours, theirs = srunddp("--quiet", "train.py", folder=tmp_path), python("train.py", folder=tmp_path)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ours.stderr == theirs.stderr.replace('"train.py"', f'"{tmp_path}/train.py"')


def test_single_process_calls_a_users_hook_once(tmp_path: Path) -> None:
    hook = "import sys\nsys.excepthook = lambda kind, error, trace: print('hook:', error, file=sys.stderr)\n"
    write(tmp_path / "train.py", f"{hook}raise ValueError('boom')\n")
    done = srunddp("--quiet", "train.py", folder=tmp_path)
    assert (done.returncode, done.stderr) == (1, "hook: boom\n")


@pytest.mark.parametrize(("name", "said"), [("SIGTERM", False), ("SIGKILL", True), ("SIGSEGV", True)])
def test_single_process_says_an_unasked_end_only(tmp_path: Path, name: str, said: bool) -> None:
    write(tmp_path / "train.py", f"import os, signal\nos.kill(os.getpid(), signal.{name})\n")
    done = srunddp("--quiet", "train.py", folder=tmp_path)
    assert done.returncode == 128 + getattr(signal, name)
    assert (f"failed: killed by {name}" in done.stderr) == said
    assert said or done.stderr == ""


def test_a_core_that_was_written_is_told(tmp_path: Path) -> None:
    script = "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (-1, -1))\nif RANK == 1: os.abort()\nrest()"
    ended = run(tmp_path, script)
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    piped_away = pattern.startswith("|")
    cores = list(tmp_path.glob("core*"))
    assert piped_away or ("core dumped" in ended.text) == bool(cores), (pattern, ended.text)
