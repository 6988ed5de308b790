"""SRUNDDP_WORKER=exec: a worker that is a program of its own does what a forked one does."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from srunddp.run.worker import WorkerContext
from srunddp.run.worker_exec import pack
from tests.support.cases import slow_after
from tests.support.starting import read_line, srunddp, started, until, write
from tests.support.worlds import SIZE, is_gone, named, run

EXEC = {"SRUNDDP_WORKER": "exec"}
SHOWS = """
import json, os, signal, sys
numbers = os.listdir("/proc/self/fd")
own = [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]
names = sorted(name for name in os.environ if name != "SRUNDDP_WORKER")
print(json.dumps({
    "argv": sys.argv,
    "file": __file__,
    "name": __name__,
    "path": sys.path,
    "flags": list(sys.flags),
    "cwd": os.getcwd(),
    "names": names,
    "mask": sorted(map(int, signal.pthread_sigmask(0, []))),
    "handlers": [str(signal.getsignal(number)) for number in (2, 10, 13, 15, 17)],
    "inheritable": [n for n in own if int(n) > 2 and os.get_inheritable(int(n))],
    "limits": __import__("resource").getrlimit(7),
    "main": sys.modules["__main__"].__file__,
}))
print("to stderr", file=sys.stderr)
sys.exit(5)
"""


@pytest.mark.parametrize(
    "flags", [{}, {"PYTHONSAFEPATH": "1", "PYTHONOPTIMIZE": "1", "PYTHONUNBUFFERED": "1"}]
)
def test_a_script_sees_what_it_sees_in_a_forked_one(tmp_path: Path, flags: dict[str, str]) -> None:
    write(tmp_path / "sub" / "train.py", SHOWS)
    words = ("--quiet", "sub/train.py", "--lr", "0.1", "ä b")
    ours, forked = (srunddp(*words, folder=tmp_path, **flags, **more) for more in (EXEC, {}))
    assert (
        (ours.returncode, ours.stderr) == (forked.returncode, forked.stderr) == (5, "to stderr\n")
    )
    assert json.loads(ours.stdout) == json.loads(forked.stdout)


def test_it_has_been_started_anew_and_ends_with_its_supervisor(tmp_path: Path) -> None:
    script = write(
        tmp_path / "train.py", "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    with started("--quiet", script, folder=tmp_path, **EXEC) as run:
        worker = int(read_line(run))
        assert b"srunddp.run.worker_exec" in Path(f"/proc/{worker}/cmdline").read_bytes()
        assert f"PPid:\t{run.pid}\n" in Path(f"/proc/{worker}/status").read_text()
        run.send_signal(signal.SIGKILL)
        until(lambda: is_gone(worker))


REDUCES = """
import torch, torch.distributed as dist, srunddp
srunddp.heartbeat()
place = srunddp.init()
x = torch.ones(1) * place.rank
dist.all_reduce(x)
print("sum", x.item(), flush=True)
"""


@pytest.mark.slow
def test_ranks_meet_and_reduce(tmp_path: Path) -> None:
    ended = run(tmp_path, REDUCES, variables=EXEC)
    assert ended.codes == [0] * SIZE, ended.text
    assert ["sum 3.0" in printed for printed in ended.printed] == [True] * SIZE


@pytest.mark.parametrize(
    "options",
    slow_after(1, [((),), (("--log-dir", "logs"),), (("--fast-exit", "--prefix"),)]),
    ids=str,
)
def test_ranks_write_where_they_should(tmp_path: Path, options: tuple[str, ...]) -> None:
    script = 'import srunddp\nsrunddp.heartbeat()\nprint("written by", RANK)\n'
    ended = run(tmp_path, script, *options, variables=EXEC)
    assert ended.codes == [0] * SIZE, ended.text
    log_dir = "--log-dir" in options
    if log_dir:
        files = sorted(tmp_path.glob("logs/*/*.log"))
    else:
        files = [tmp_path / f"stdout.{rank}" for rank in range(SIZE)]
    assert [f"written by {rank}" in path.read_text() for rank, path in enumerate(files)] == [
        True
    ] * SIZE


@pytest.mark.parametrize(
    ("end", "code", "cause"),
    slow_after(
        1,
        [
            ("raise ValueError('boom')", 1, "ValueError: boom"),
            ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV"),
            ("time.sleep(600)", 124, "no step for 1 s, in <module> (train.py:"),
        ],
    ),
)
def test_a_failure_is_named(tmp_path: Path, end: str, code: int, cause: str) -> None:
    script = f"import srunddp\nsrunddp.heartbeat()\nif RANK == 1:\n    {end}\nrest()"
    named(run(tmp_path, script, "--stall-timeout", "1", variables=EXEC), 1, code, cause)


def test_every_socket_of_its_context_is_inherited() -> None:
    """One that is not is another file's number in the new program, or nobody's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as standing,
        socket.create_server(("127.0.0.1", 0)) as deputy,
    ):
        context = SimpleNamespace(
            setup=SimpleNamespace(standing=standing, deputy=deputy),
            dump=SimpleNamespace(descriptor=0),
            page=SimpleNamespace(descriptor=1),
            output=SimpleNamespace(descriptors=[2]),
        )
        state, inherited = pack(cast(WorkerContext, context))
        os.close(state)
        assert sorted(inherited) == [0, 1, 2, *sorted((standing.fileno(), deputy.fileno()))]
