"""What a script is and what it leaves behind is the same below srunddp as below plain Python."""

from __future__ import annotations

import py_compile
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.starting import LONG, SRUNDDP, bare, one_message, python, srunddp, write
from tests.support.worlds import run

pytestmark = pytest.mark.slow

# All that a script can see of itself: at its top, in a thread that goes on after its last line, and
# in an exit handler.
LOOKS = """
import atexit, pickle, sys, threading, time

def look(when):
    main = sys.modules["__main__"]
    print(when, vars(main) is globals(), sys.argv, sys.path[0], sys.orig_argv[1:])
    print(pickle.loads(pickle.dumps(look)) is look)
    if when == "top":
        for name, value in sorted(globals().items()):
            if name.startswith("__"):
                kept = isinstance(value, str) or value in (None, {})
                print(name, value if kept else (type(value), getattr(value, "name", "")))

def look_later():
    time.sleep(0.3)
    look("thread")

look("top")
atexit.register(look, "exit handler")
threading.Thread(target=look_later).start()
"""
WAYS = {
    "a file": ["train.py", "--lr", "1"],
    "a path with a dot": ["./train.py"],
    "compiled code": ["compiled.pyc"],
    "a folder": ["folder", "a"],
    "an archive": ["archive.pyz"],
    "a module": ["-m", "train", "x"],
    "a package": ["-m", "package"],
    "a module of a package": ["-m", "package.part"],
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script in all forms in which Python can run it."""
    folder = tmp_path_factory.mktemp("project")
    train = write(folder / "train.py", LOOKS)
    for name in ("folder/__main__.py", "package/__main__.py", "package/part.py"):
        write(folder / name, LOOKS)
    write(folder / "package" / "__init__.py", "")
    py_compile.compile(str(train), cfile=str(folder / "compiled.pyc"))
    with zipfile.ZipFile(folder / "archive.pyz", "w") as archive:
        archive.write(train, "__main__.py")
    return folder


@pytest.mark.parametrize("safe_path", ["", "1"])
@pytest.mark.parametrize("way", WAYS)
def test_a_script_sees_of_itself_what_it_sees_below_python(
    project: Path, way: str, safe_path: str
) -> None:
    # Without a folder in sys.path -m finds modules by PYTHONPATH alone.
    path = str(project)
    ours = srunddp("--quiet", *WAYS[way], folder=project, PYTHONPATH=path, PYTHONSAFEPATH=safe_path)
    theirs = python(*WAYS[way], folder=project, PYTHONPATH=path, PYTHONSAFEPATH=safe_path)
    assert theirs.returncode == 0, theirs.stderr
    assert theirs.stdout.count("True") == 6, theirs.stdout
    assert ours.stdout.splitlines() == theirs.stdout.splitlines()
    assert (ours.returncode, ours.stderr) == (0, theirs.stderr)


OWN_ERROR = "def step():\n    raise KeyError('the step of the user')\nstep()\n"
SCRIPTS = {
    "a decorator that a profiler would bring": """
if not hasattr(__builtins__, "profile"):
    __builtins__.profile = lambda function: function
@profile
def work():
    print("works")
work()
""",
    "names of a main module": "print(__cached__, __annotations__, __loader__.path == __file__)",
    "annotations": "import sys\nx: int = 1\nprint(sys.modules['__main__'].__annotations__)",
    "its source": "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))",
    "closed descriptors": "import os; os.closerange(3, 256); print('trained')",
    "all descriptors closed": "import os; os.closerange(3, 1 << 16); print('trained')",
    "an error after closing": f"import os; os.closerange(3, 256)\n{OWN_ERROR}",
    "an error after closing all": f"import os; os.closerange(3, 1 << 16)\n{OWN_ERROR}",
    "own files after closing": """
import os
os.closerange(3, 1 << 16)
names = [f"own{number}" for number in range(60)]
files = [open(name, "wb") for name in names]
print([file.write(b"own") for file in files], files[0].fileno())
1 / 0
""",
    "starts itself again": """
import os, sys
print(len(sys.argv), flush=True)
if len(sys.argv) < 3:
    os.execv(sys.executable, [*sys.orig_argv, "more"])
""",
    "a thread's work": """
import threading, time
def work():
    time.sleep(0.5)
    print("done")
threading.Thread(target=work).start()
""",
    "a pool that nobody shuts down": """
from concurrent.futures import ThreadPoolExecutor
print(ThreadPoolExecutor(2).submit(pow, 2, 3).result())
""",
    "a thread that fails": """
import threading
threading.Thread(target=lambda: 1 / 0, name="t").start()
""",
    "an exit handler that fails": "import atexit; atexit.register(lambda: 1 / 0)",
    "an exit handler that ends": "import atexit, os; atexit.register(os._exit, 5)",
    "a signal's handler while a thread works": """
import os, signal, sys, threading, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
def work():
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.5)
threading.Thread(target=work).start()
""",
}
CODES = ("2**70", "-2**70", "2**63 - 1", "2**63", "-2**63", "256", "-3", "1.5", "'text'", "(1, 2)")
SCRIPTS |= {f"sys.exit({code})": f"import sys; sys.exit({code})" for code in (*CODES, "False")}


def test_odd_scripts_end_as_below_python(tmp_path: Path) -> None:
    """With the same words, the same exit code, and their own files as they have written them."""

    def both(number: int, text: str) -> list[tuple[int, str, str, dict[str, bytes]]]:
        seen: list[tuple[int, str, str, dict[str, bytes]]] = []
        for start in (lambda *a, **k: srunddp("--quiet", *a, **k), python):
            folder = tmp_path / f"{number}{len(seen)}"
            write(folder / "train.py", text)
            done = start("train.py", folder=folder)
            files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
            # An address of memory differs from run to run.
            stderr = re.sub(r"0x[0-9a-f]+", "", done.stderr.replace(str(folder), ""))
            seen.append((done.returncode, done.stdout.replace(str(folder), ""), stderr, files))
        return seen

    with ThreadPoolExecutor(4) as pool:
        found = dict(
            zip(SCRIPTS, pool.map(both, range(len(SCRIPTS)), SCRIPTS.values()), strict=True)
        )
    differ = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
    assert not differ


CLOSED = ["<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"]
WRITES = """
import os, sys
def attempt(number):
    try:
        return os.write(number, b"by number\\n")
    except OSError as error:
        return error.errno
seen = [attempt(1), attempt(2), os.system("echo of a child; echo error >&2")]
print("printed")
with open("seen", "w") as file:
    print(seen, file.fileno(), file=file)
sys.exit("a reason")
"""


@pytest.mark.parametrize("worker", ["fork", "exec"])
@pytest.mark.parametrize("closed", CLOSED)
def test_closed_standard_streams_are_closed_for_the_script(
    tmp_path: Path, closed: str, worker: str
) -> None:
    """So no word of the script goes into a file or a connection of srunddp's."""
    ends = []
    for name, command in {"ours": [*SRUNDDP, "--quiet"], "theirs": [sys.executable]}.items():
        write(tmp_path / name / "train.py", WRITES)
        done = subprocess.run(
            ["bash", "-c", f"{' '.join(command)} train.py {closed}"],
            cwd=tmp_path / name,
            env=bare({"SRUNDDP_WORKER": worker}),
            capture_output=True,
            text=True,
            timeout=LONG,
        )
        text = (tmp_path / name / "seen").read_text()
        ends.append((done.returncode, done.stdout, done.stderr, text))
    assert ends[0] == ends[1]


def test_a_thread_that_works_on_is_no_script_that_does_not_end(tmp_path: Path) -> None:
    """However long it takes, as Python waits for it; rank 0 has long ended."""
    script = """
import threading
def work():
    time.sleep(4 * (RANK == 1))
    print("worked")
threading.Thread(target=work).start()
"""
    ended = run(tmp_path, script, "--grace", "0.1", size=2, limits={"ends_within": 0.2})
    assert (ended.codes, ended.text) == ([0, 0], "")
    assert (tmp_path / "stdout.1").read_text() == "worked\n"


@pytest.mark.parametrize("below", [512, 1 << 16])
def test_ranks_that_close_what_they_have_inherited_train_as_below_torchrun(
    tmp_path: Path, below: int
) -> None:
    script = (
        f"os.closerange(3, {below})"
        + """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print(one.item())
"""
    )
    ended = run(tmp_path, script, size=2)
    assert (ended.codes, ended.text) == ([0, 0], "")
    assert [(tmp_path / f"stdout.{rank}").read_text() for rank in range(2)] == ["2.0\n", "2.0\n"]


def test_a_rank_whose_descriptors_are_closed_shows_its_own_error(tmp_path: Path) -> None:
    script = """
os.closerange(3, 1 << 16)
if RANK == 1:
    raise KeyError('the step of the user')
rest()
"""
    ended = run(tmp_path, script, size=2)
    assert ended.text.count("KeyError: 'the step of the user'") == 1
    assert ended.codes == [1, 1]


def with_open_files(limit: int, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script with this limit of open files."""
    write(folder / "train.py", "print('runs')")
    command = f"ulimit -n {limit}; exec {' '.join([*SRUNDDP, '--quiet', *options])} train.py"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=bare(),
        capture_output=True,
        text=True,
        timeout=LONG,
    )


@pytest.mark.parametrize("limit", [12, 16, 20, 31])
def test_a_limit_of_few_open_files_is_one_message(tmp_path: Path, limit: int) -> None:
    done = with_open_files(limit, tmp_path)
    one_message(done)
    assert f"a limit of {limit} open files" in done.stderr


def test_a_script_runs_with_the_fewest_open_files_that_are_accepted(tmp_path: Path) -> None:
    done = with_open_files(32, tmp_path, "--restarts", "1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "runs\n", "")
