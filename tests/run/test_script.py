"""A script below srunddp finds what it finds under Python itself, and its end is told as Python
would tell it.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import termios
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from srunddp.util.kernel_file import children_of
from tests.conftest import ROOT, missing
from tests.support.starting import (
    LONG,
    SRUNDDP,
    bare,
    ended,
    python,
    read_line,
    slurm,
    srunddp,
    started,
    write,
)
from tests.support.worlds import run

SHOW = """
import json, sys
spec = __spec__ and __spec__.name
shown = {"argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__}
shown |= {"package": __package__, "spec": spec, "flags": sys.flags.interactive}
shown |= {"main": vars(sys.modules["__main__"]) is globals()}
print(json.dumps(shown))
"""
WAITS = "import os, signal\nprint(os.getpid())\nwhile True:\n    signal.pause()\n"
ODD_ARGUMENTS = ("--backend", "x", "-m", "--help", "--", "--quiet", "-", "", "a b", "--explain")


# What it finds.


@pytest.mark.parametrize("how", ["absolute", "in-folder", "from-above", "symlink"])
def test_a_script_sees_what_python_would_show_it(tmp_path: Path, how: str) -> None:
    script = write(tmp_path / "folder" / "train.py", SHOW)
    (tmp_path / "link.py").symlink_to(script)
    names = {
        "absolute": str(script),
        "in-folder": "train.py",
        "from-above": "folder/train.py",
        "symlink": "link.py",
    }
    folder = script.parent if how == "in-folder" else tmp_path
    arguments = (names[how], *ODD_ARGUMENTS)
    ours, theirs = (
        json.loads(start(*arguments, folder=folder).stdout) for start in (srunddp, python)
    )
    for seen in (ours, theirs):
        seen["file"] = str(folder / seen["file"])  # whether it is absolute is the next test
        seen["package"] = seen["package"] or None
    assert ours == theirs


@pytest.mark.parametrize("module", ["train", "package", "package.part"])
def test_a_module_sees_what_python_m_would_show_it(tmp_path: Path, module: str) -> None:
    for name in ("train.py", "package/__init__.py", "package/__main__.py", "package/part.py"):
        write(tmp_path / name, SHOW if name != "package/__init__.py" else "")
    ours = srunddp("-m", module, *ODD_ARGUMENTS, folder=tmp_path)
    assert json.loads(ours.stdout) == json.loads(
        python("-m", module, *ODD_ARGUMENTS, folder=tmp_path).stdout
    )


def test_a_script_imports_its_neighbours_and_none_of_bins(tmp_path: Path) -> None:
    """And finds its folder after it has left."""
    write(tmp_path / "folder" / "neighbour.py", "WORD = 'here'")
    train = (
        "import neighbour, os, pathlib, sys; os.chdir('/'); print(neighbour.WORD,"
        " pathlib.Path(__file__).parent)"
    )
    write(
        tmp_path / "folder" / "train.py",
        f"{train}; print([path for path in sys.path if path.endswith('bin')])",
    )
    assert srunddp("folder/train.py", folder=tmp_path).stdout == f"here {tmp_path}/folder\n[]\n"


def test_a_script_from_a_shells_pipe_runs(tmp_path: Path) -> None:
    command = f"{' '.join(SRUNDDP)} --quiet <(echo 'print(6 * 7)')"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=bare(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_pythons_safe_path_stays_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "lib" / "module.py", "WORD = 'lib'")
    write(tmp_path / "module.py", "WORD = 'neighbour'")
    write(tmp_path / "train.py", "import module; print(module.WORD)")
    variables = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path / "lib")}
    assert srunddp("train.py", folder=tmp_path, **variables).stdout == "lib\n"


def test_what_an_unbuffered_script_printed_last_is_not_lost(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import os; print('almost', end=''); os.kill(os.getpid(), 9)")
    assert srunddp("train.py", folder=tmp_path, PYTHONUNBUFFERED="1").stdout == "almost"


def test_a_line_that_c_code_has_printed_is_there_when_the_script_is_killed(
    tmp_path: Path,
) -> None:
    write(
        tmp_path / "train.py",
        "import ctypes, os; ctypes.CDLL(None).puts(b'by C'); os.kill(os.getpid(), 9)",
    )
    assert srunddp("train.py", folder=tmp_path).stdout == "by C\n"


def test_a_script_may_start_srunddp_itself(tmp_path: Path) -> None:
    write(tmp_path / "inner.py", "print('inner')")
    command = [str(ROOT / "bin" / "srunddp"), "--quiet"]
    write(
        tmp_path / "train.py",
        f"import subprocess; subprocess.run({[*command, 'inner.py']!r}, check=True)",
    )
    done = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, env=bare(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "inner\n"), done.stderr


@pytest.mark.parametrize("name", ["--odd.py", "-m", "--version"])
def test_a_script_named_like_an_option_runs_after_two_dashes(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, "import sys; print(sys.argv)")
    assert (
        srunddp("--quiet", "--", name, "--quiet", folder=tmp_path).stdout
        == f"{[name, '--quiet']}\n"
    )


def test_a_script_named_run_is_run_with_the_command_before_it(tmp_path: Path) -> None:
    write(tmp_path / "run", "print('ran')")
    assert srunddp("run", "run", folder=tmp_path).stdout == "ran\n"


def test_a_world_of_one_has_all_that_torchrun_would_export(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import os, json; print(json.dumps(dict(os.environ)))")
    seen = json.loads(
        srunddp("train.py", folder=tmp_path, TORCHELASTIC_USE_AGENT_STORE="False").stdout
    )
    expected = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    expected |= {"GROUP_RANK": "0", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    assert {name: seen.get(name) for name in expected} == expected
    assert 1024 <= int(seen["MASTER_PORT"]) < 65536
    assert seen["TORCHELASTIC_RUN_ID"]
    assert seen["TORCHELASTIC_USE_AGENT_STORE"] == "True"


SPAWN = """
import multiprocessing, os, pickle, sys
class Thing:
    def __init__(self, value): self.value = value
def work(thing): return Thing(thing.value * 2)
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Thing(3))).value == 3
    for how in sys.argv[1:]:
        pool = multiprocessing.get_context(how).Pool(1)
        print(how, [thing.value for thing in pool.map(work, [Thing(1), Thing(2)])])
        pool.close()
        pool.join()
print("imported as", __name__)
"""


@pytest.mark.parametrize("how", ["spawn", "forkserver", "fork"])
def test_processes_that_a_script_starts_know_its_functions(tmp_path: Path, how: str) -> None:
    """DataLoader workers: a spawned one imports the script again, and must not start srunddp
    again.
    """
    write(tmp_path / "train.py", SPAWN)
    ours = srunddp("--quiet", "train.py", how, folder=tmp_path)
    theirs = python("train.py", how, folder=tmp_path)
    assert (ours.returncode, ours.stderr) == (0, "")
    assert sorted(ours.stdout.splitlines()) == sorted(theirs.stdout.splitlines())
    assert f"{how} [2, 4]" in ours.stdout


def test_output_comes_line_by_line_and_input_goes_in(tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        "import sys\nprint('out')\nprint('error', file=sys.stderr)\nprint('heard',"
        " sys.stdin.readline().strip())\n",
    )
    with started("--quiet", "train.py", folder=tmp_path) as process:
        assert read_line(process) == "out"  # while the script waits for us
        assert process.stderr is not None
        assert process.stderr.readline() == "error\n"
        assert process.stdin is not None
        process.stdin.write("word\n")
        process.stdin.flush()
        assert ended(process) == (0, "heard word\n", "")


# How it ends.


ENDS = {
    "pass": 0,
    "import sys; sys.exit()": 0,
    "import sys; sys.exit(None)": 0,
    "import sys; sys.exit(0)": 0,
    "import sys; sys.exit(7)": 7,
    "import sys; sys.exit(300)": 44,
    "import sys; sys.exit(-1)": 255,
    "import sys; sys.exit(True)": 1,
    "import sys; sys.exit('a reason')": 1,
    "import sys; sys.exit((1, 2))": 1,
    "raise SystemExit": 0,
    "exit(3)": 3,
    "1 / 0": 1,
    "import os; os._exit(9)": 9,
    "import sys, threading; threading.Thread(target=sys.exit, args=[5]).start()": 0,
    "import os; os.kill(os.getpid(), 9)": 137,
    "import os; os.kill(os.getpid(), 11)": 139,
    "import os; os.kill(os.getpid(), 15)": 143,
    "import os; os.abort()": 134,
}


@pytest.mark.slow
def test_every_way_to_end_has_pythons_exit_code_and_output(tmp_path: Path) -> None:
    """A script that a signal ended leaves 128 and its number, as a shell would say it; of a crash
    there is a word.
    """

    def both(number: int, text: str) -> list[tuple[int, str, str]]:
        script = write(tmp_path / f"end{number}.py", text)
        ours = srunddp("--quiet", script, folder=tmp_path)
        theirs = python(script, folder=tmp_path)
        return [(done.returncode, done.stdout, done.stderr) for done in (ours, theirs)]

    with ThreadPoolExecutor(4) as pool:
        seen = dict(zip(ENDS, pool.map(both, range(len(ENDS)), ENDS), strict=True))
    for text, (ours, theirs) in seen.items():
        assert ours[0] == ENDS[text] == (theirs[0] if theirs[0] >= 0 else 128 - theirs[0]), text
        assert ours[1] == theirs[1], text
        crashed = ours[0] in (134, 137, 139)
        assert ours[2].startswith("\nsrunddp: rank 0 on ") if crashed else ours[2] == theirs[2], (
            text
        )


FAILURES = {
    "function": "def fail():\n    raise ValueError('wrong')\nfail()\n",
    "chained": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error\n"
    ),
    "import": "import there_is_no_such_module\n",
    "syntax": "x = 1\nif x\n",
    "hook": "import sys\nsys.excepthook = lambda *error: print('hook', error[0].__name__)\n1 / 0\n",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_traceback_begins_at_the_scripts_own_frame(tmp_path: Path, failure: str) -> None:
    """It is what Python prints, to the letter."""
    script = write(tmp_path / "train.py", FAILURES[failure])
    ours = srunddp("--quiet", script, folder=tmp_path)
    theirs = python(script, folder=tmp_path)
    assert (ours.returncode, ours.stdout, ours.stderr) == (1, theirs.stdout, theirs.stderr)


# With --fast-exit Python's teardown is skipped, and nothing else.


@pytest.mark.parametrize(
    ("size", "options"), [(1, ("--fast-exit",)), (2, ("--fast-exit",)), (1, ())]
)
def test_output_and_exit_handlers_are_as_without_it(
    tmp_path: Path, size: int, options: tuple[str, ...]
) -> None:
    script = """
import threading
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread's end"))).start()
atexit.register(lambda: print("at exit", end=""))
sys.stdout.reconfigure(line_buffering=False)
print("written last")
"""
    ended = run(tmp_path, script, *options, size=size)
    assert (ended.codes, ended.text) == ([0] * size, "")
    for rank in range(size):
        assert (tmp_path / f"stdout.{rank}").read_text() == "written last\na thread's end\nat exit"


@pytest.mark.parametrize("fast", [True, False])
def test_only_the_teardown_is_skipped(tmp_path: Path, fast: bool) -> None:
    script = """
class Torn:
    def __del__(self): os.write(1, b"torn down")
torn = Torn()
"""
    ended = run(tmp_path, script, *(["--fast-exit"] if fast else []), size=1)
    assert ended.codes == [0]
    assert (tmp_path / "stdout.0").read_text() == ("" if fast else "torn down")


def test_the_code_of_a_script_that_fails_is_its_own(tmp_path: Path) -> None:
    assert run(tmp_path, "sys.exit(5)", "--fast-exit", size=1).codes == [5]


# Without it Python's teardown is whole, and so is C's.


TEARDOWN = """
import ctypes, torch
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.puts, b"C's handler", None)
libc.fopen.restype = ctypes.c_void_p
ctypes.CDLL(None).fputs(b"buffered by C", ctypes.c_void_p(libc.fopen(b"c.txt", b"w")))
left_open = open("python.txt", "w")
left_open.write("buffered by Python")
class Torn:
    def __del__(self): os.write(1, b"torn down\\n")
torn = Torn()
sys.exit({code})
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 5])
def test_the_teardown_is_whole(tmp_path: Path, code: int) -> None:
    ended = run(tmp_path, TEARDOWN.format(code=code), size=1)
    assert (ended.codes, ended.text) == ([code], "")
    assert (tmp_path / "stdout.0").read_text() == "torn down\nC's handler\n"
    files = [path.read_text() for path in sorted(tmp_path.rglob("*.txt"))]
    assert files == ["buffered by C", "buffered by Python"]


@pytest.mark.slow
def test_what_a_thread_uses_stays_to_the_end(tmp_path: Path) -> None:
    """And the names of modules, functions and classes stay for all."""
    script = """
import threading, torch
class Slow:
    def __del__(self): time.sleep(0.3), os.write(1, text())
def text(): return json.dumps("gone").encode()
def use():
    while True: shared.append(len(shared))
import json
shared, slow = [], Slow()
"""
    for thread in ("threading.Thread(target=use, daemon=True).start()", ""):
        ended = run(tmp_path, script + thread, size=1)
        assert (ended.codes, ended.text) == ([0], "")
    assert (tmp_path / "stdout.0").read_text() == '"gone"'


# Signals.


COUNTS = """
import signal, time
heard = []
for name in ("SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"):
    hear = lambda number, _: heard.append(signal.Signals(number).name)
    signal.signal(getattr(signal, name), hear)
signal.signal(signal.SIGTERM, lambda *_: heard.append("end"))
print("ready")
while "end" not in heard:
    time.sleep(0.01)
    while len(heard) > globals().get("told", 0):
        told = globals().get("told", 0) + 1
        print(heard[told - 1])
print("heard", *heard)
raise SystemExit(5)
"""


def test_a_signal_reaches_the_script_once(tmp_path: Path) -> None:
    write(tmp_path / "train.py", COUNTS)
    with started("--quiet", "train.py", folder=tmp_path) as process:
        assert read_line(process) == "ready"
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
            process.send_signal(number)
            assert read_line(process) == number.name
        process.send_signal(signal.SIGTERM)
        code, rest, errors = ended(process)
    assert (code, errors) == (5, "")
    assert rest.splitlines()[-1] == "heard SIGUSR1 SIGUSR2 SIGHUP SIGINT end"


def test_an_alarm_that_was_set_before_the_start_ends_the_script(tmp_path: Path) -> None:
    """The kernel sends it to the supervisor alone. On a busy machine one of a second comes before
    there is any.
    """
    write(tmp_path / "train.py", WAITS)
    start = f"os.execv({SRUNDDP[0]!r}, {[*SRUNDDP, '--quiet', 'train.py']!r})"
    for seconds in (1, 4, 16):
        command = [SRUNDDP[0], "-c", f"import os, signal; signal.alarm({seconds}); {start}"]
        done = subprocess.run(command, cwd=tmp_path, env=bare(), capture_output=True, timeout=LONG)
        if done.returncode != -signal.SIGALRM:
            break
    assert done.returncode == 142


@pytest.mark.slow
def test_a_signal_from_outside_a_container_reaches_the_script(tmp_path: Path) -> None:
    """Its sender has no process id in there."""
    if os.geteuid():
        missing("root, for a process namespace")
    write(tmp_path / "train.py", COUNTS)
    command = ["unshare", "--pid", "--fork", *SRUNDDP, "--quiet", "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=bare(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert read_line(process) == "ready"
        (inside,) = children_of(process.pid)
        os.kill(inside, signal.SIGUSR1)
        assert read_line(process) == "SIGUSR1"
        os.kill(inside, signal.SIGTERM)
        assert process.wait(LONG) == 5


def test_a_launcher_s_signal_to_all_reaches_the_script_once(tmp_path: Path) -> None:
    """Slurm, Open MPI and Hydra signal the worker as well as the supervisor; we are their
    stand-in.
    """
    write(tmp_path / "train.py", COUNTS)
    with started("--quiet", "train.py", folder=tmp_path, **slurm(0, 1)) as process:
        assert read_line(process) == "ready"
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.killpg(process.pid, number)
            assert read_line(process) == number.name
        # Somebody else's signal, to the supervisor alone, is passed on.
        subprocess.run(["kill", "-HUP", str(process.pid)], check=True)
        assert read_line(process) == "SIGHUP"
        os.killpg(process.pid, signal.SIGTERM)
        code, rest, _ = ended(process)
    assert code == 5
    assert rest.splitlines()[-1] == "heard SIGUSR1 SIGUSR2 SIGHUP end"


def test_a_terminals_interrupt_reaches_the_script_once(tmp_path: Path) -> None:
    """The terminal itself sends it to the whole foreground group."""
    write(tmp_path / "train.py", COUNTS)
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [*SRUNDDP, "--quiet", "train.py"],
        cwd=tmp_path,
        env=bare(),
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    with process:
        os.close(theirs)
        assert read_line(process) == "ready"
        os.write(ours, b"\x03")
        assert read_line(process) == "SIGINT"
        process.send_signal(signal.SIGTERM)
        _ = process.wait(LONG)
        if process.stdout:
            rest = process.stdout.read()
        else:
            rest = ""
        os.close(ours)
    assert rest.splitlines()[-1] == "heard SIGINT end"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_that_ends_the_script_is_its_exit_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    write(tmp_path / "train.py", WAITS)
    with started("--quiet", "train.py", folder=tmp_path) as process:
        read_line(process)
        process.send_signal(number)
        code, out, errors = ended(process)
    # By SIGINT Python ends itself, which a shell's loop has to see.
    assert (code, out) == (-number if number == signal.SIGINT else 128 + number, "")
    assert errors == "" or (number == signal.SIGINT and errors.endswith("KeyboardInterrupt\n")), (
        errors
    )
    assert "srunddp/run" not in errors
