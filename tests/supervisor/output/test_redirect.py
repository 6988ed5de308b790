"""A rank's output is all where it was sent, and neither the terminal nor the disk can hold or end
the rank.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from srunddp.errors import ConfigError, Scope
from srunddp.supervisor.output.redirect import (
    ANOTHER_START,
    OutputRedirect,
    OutputTarget,
    output_target,
)
from srunddp.supervisor.output.relay import LinePrefixer
from tests.conftest import PROGRAMS, ROOT
from tests.support.starting import LONG, bare, until, write

SCRIPT = "import os\nfor number in range(30_000): os.write(1, b'%099d\\n' % number)\n"  # 3 MB
ALL = b"".join(b"%099d\n" % number for number in range(30_000))


def planned(
    log_dir: str | None = "logs",
    prefix: bool = False,
    show_ranks: str | None = None,
    **changes: Any,
) -> OutputTarget:
    place: dict[str, Any] = {"rank": 3, "world_size": 8, "node": "node02", "run": "1207.3"}
    return output_target(log_dir, prefix, show_ranks, **place | changes)


@dataclass
class Rank:
    """One rank below tests/programs/logged.py: what it leaves, and where."""

    log: Path
    report: Path
    process: subprocess.Popen[bytes]

    @property
    def file(self) -> bytes:
        return self.log.read_bytes()

    def ended(self) -> dict[str, Any]:
        """Wait for the supervisor's end, without reading what it wrote; its report."""
        assert self.process.wait(LONG) == 0
        report: dict[str, Any] = json.loads(self.report.read_text())
        return report

    def read(self) -> tuple[bytes, bytes]:
        return self.process.communicate(timeout=LONG)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    ranks: list[Rank] = []

    def start_one(
        script: str,
        *,
        file: bool = True,
        terminal: bool = True,
        prefix: str = "",
        limit: float = LONG,
        **how: Any,
    ) -> Rank:
        log = tmp_path / "log"
        report = tmp_path / f"report{len(ranks)}"
        order = {"script": script, "terminal": terminal, "prefix": prefix, "limit": limit}
        order["limits"] = how.pop("limits", {})
        order |= {"file": str(log) if file else None, "report": str(report)}
        command = [
            *how.pop("before", ()),
            sys.executable,
            str(PROGRAMS / "logged.py"),
            json.dumps(order),
        ]
        standard: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process: subprocess.Popen[bytes] = subprocess.Popen(
            command, env=bare({"PYTHONPATH": str(ROOT)}), cwd=tmp_path, bufsize=0, **standard | how
        )
        ranks.append(Rank(log, report, process))
        return ranks[-1]

    yield start_one
    for rank in ranks:
        rank.process.kill()
        rank.process.wait()
        for pipe in (rank.process.stdin, rank.process.stdout, rank.process.stderr):
            if pipe:
                pipe.close()


@pytest.fixture
def tty() -> Iterator[tuple[int, int]]:
    """Its two ends, which stay open."""
    ours, theirs = pty.openpty()
    with open(ours, "rb"), open(theirs, "wb"):
        yield ours, theirs


# Which ranks, and which file.


@pytest.mark.parametrize(
    ("show_ranks", "shown"),
    [(None, [0]), ("0,3-5", [0, 3, 4, 5]), (" 7 , 1", [1, 7]), ("all", [*range(8)]), ("none", [])],
)
def test_each_rank_has_a_file_and_some_the_terminal(
    show_ranks: str | None, shown: list[int]
) -> None:
    plans = [planned(show_ranks=show_ranks, rank=rank) for rank in range(8)]
    assert [rank for rank in range(8) if plans[rank].terminal] == shown
    assert [str(each.file) for each in plans] == [
        f"logs/1207.3/node02.rank{rank}.log" for rank in range(8)
    ]


@pytest.mark.parametrize(
    "show_ranks", ["", "x", "1,", "3-1", "-1", "1-", "8", "0-8", "all,0", "1 2", "٣", "9" * 99]
)
def test_what_is_no_list_of_ranks_is_refused(show_ranks: str) -> None:
    with pytest.raises(ConfigError, match=r"^--show-ranks: .+; expected .+ -> .+") as caught:
        planned(show_ranks=show_ranks)
    assert caught.value.scope is Scope.JOB


def test_without_a_folder_there_is_the_terminal_alone() -> None:
    """And the prefix names node and rank on the terminal only."""
    assert planned(None) == OutputTarget(None, True, "")
    with pytest.raises(ConfigError, match="add --log-dir"):
        planned(None, show_ranks="0")
    assert (
        planned(None, prefix=True).prefix
        == planned(prefix=True, show_ranks="3").prefix
        == "node02:3: "
    )
    assert planned(prefix=True).prefix == ""


@pytest.mark.parametrize(
    ("run", "folder"),
    [("127.0.0.1:29500", "127.0.0.1_29500"), ("..", "_."), ("../a b", "_._a_b"), ("", "_")],
)
def test_no_name_of_a_run_leads_out_of_the_folder(run: str, folder: str) -> None:
    assert planned(run=run).file == Path("logs", folder, "node02.rank3.log")


@pytest.mark.parametrize("below", ["file", "file/below", "/proc/1207", "n" * 256])
def test_a_file_that_cannot_be_made_is_named_once_a_node(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=rf"^--log-dir: {tmp_path / below}.* cannot be written: .+ -> "
    ) as caught:
        OutputRedirect.open(planned(str(tmp_path / below)))
    assert caught.value.scope is Scope.NODE


@pytest.mark.parametrize(
    "what", ["a symbolic link", "No such device", "no plain file", "Is a directory"]
)
def test_only_a_plain_file_is_taken_in_the_log_s_place(tmp_path: Path, what: str) -> None:
    """No named pipe either, whether somebody reads it or not."""
    log = tmp_path / "log"
    precious = write(tmp_path / "precious", "all")
    if what == "a symbolic link":
        log.symlink_to(precious)
    elif what == "Is a directory":
        log.mkdir()
    else:
        os.mkfifo(log)
    reader = os.open(log if what == "no plain file" else precious, os.O_RDONLY | os.O_NONBLOCK)
    with (
        open(reader, "rb"),
        pytest.raises(ConfigError, match=f"{log} cannot be written: .*{what}") as caught,
    ):
        OutputRedirect.open(OutputTarget(log, False, ""))
    assert caught.value.scope is Scope.RANK
    assert precious.read_text() == "all"


def test_all_ranks_make_the_folders_at_once(tmp_path: Path) -> None:
    plans = [
        planned(str(tmp_path / "a" / "b"), rank=rank, world_size=64, show_ranks="none")
        for rank in range(64)
    ]
    with ThreadPoolExecutor(16) as pool:
        for output in pool.map(OutputRedirect.open, plans):
            output.start()  # closes
    assert len(list((tmp_path / "a" / "b" / "1207.3").iterdir())) == 64


def test_the_users_umask_decides_who_may_read_the_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        OutputRedirect.open(OutputTarget(tmp_path / "log", False, "")).start()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o640


# What is caught.


EVERY_WAY = """
import ctypes, os, subprocess, sys
print("print")
sys.stdout.flush()
os.write(1, b"write\\n")
libc = ctypes.CDLL(None)
libc.printf(b"printf\\n")
libc.fflush(None)
os.system("echo child")
subprocess.run(["sh", "-c", "echo child error >&2"])
print("error", file=sys.stderr, flush=True)
"""
OUT = b"print\nwrite\nprintf\nchild\n"
ERRORS = b"child error\nerror\n"


def test_a_rank_with_a_file_alone_writes_to_it_without_help(start: Any) -> None:
    rank = start(EVERY_WAY, terminal=False)
    assert rank.read() == (b"", b"")
    report = rank.ended()
    assert rank.file == OUT + ERRORS
    assert (report["threads"], report["opened"]) == (1, 0)


def test_a_file_and_the_terminal_both_have_all(start: Any) -> None:
    rank = start(EVERY_WAY)
    assert rank.read() == (OUT, ERRORS)
    report = rank.ended()
    assert sorted(rank.file.splitlines()) == sorted((OUT + ERRORS).splitlines())
    assert (report["code"], report["left"]) == (0, 0)


def test_a_rank_with_the_terminal_alone_keeps_what_it_inherited(start: Any) -> None:
    rank = start("import os; print(os.fstat(1).st_ino, os.fstat(2).st_ino)", file=False)
    inherited = [
        os.fstat(pipe.fileno()).st_ino for pipe in (rank.process.stdout, rank.process.stderr)
    ]
    assert [*map(int, rank.read()[0].split())] == inherited
    report = rank.ended()
    assert (report["threads"], report["opened"]) == (1, 0)


@pytest.mark.parametrize("terminal", [True, False])
def test_workers_have_no_more_than_three_descriptors(start: Any, terminal: bool) -> None:
    script = (
        "import os, subprocess\n"
        "print(*os.listdir('/proc/self/fd'), flush=True)\n"
        "subprocess.run(['ls', '/proc/self/fd'], close_fds=False)\n"
    )
    rank = start(script, terminal=terminal)
    rank.read()
    assert rank.file.split() == [b"0", b"1", b"2", b"3"] * 2  # 3 is the listing itself


def test_what_comes_apart_on_both_is_in_order(start: Any) -> None:
    script = (
        "import os\nfor number in range(6): os.write(1 + number % 2, b'%d\\n' % number); input()\n"
    )
    rank = start(script)
    for number in range(6):
        pipe = (rank.process.stdout, rank.process.stderr)[number % 2]
        assert pipe.readline() == b"%d\n" % number  # while the worker waits for us
        rank.process.stdin.write(b"\n")
        rank.process.stdin.flush()
    rank.read()
    assert rank.file == b"0\n1\n2\n3\n4\n5\n"


@pytest.mark.parametrize(
    "how", [{}, {"terminal": False}, {"before": ("sh", "-c", 'exec "$@" >&- 2>&-', "sh")}], ids=str
)
def test_a_requeued_run_appends(start: Any, how: dict[str, Any]) -> None:
    """Also where standard output and error are closed."""
    for word in ("first", "second"):
        rank = start(f"import os; os.write(1, b'{word}\\n'); os.write(2, b'error\\n')", **how)
        rank.read()
        rank.ended()
    assert rank.file == b"first\nerror\n" + ANOTHER_START + b"second\nerror\n"


# How it ends.


def test_output_before_a_signal_is_there(start: Any) -> None:
    rank = start("import os\nos.write(1, b'x' * 200_000)\nos.kill(os.getpid(), 9)\n")
    assert rank.read()[0] == rank.file == b"x" * 200_000
    assert rank.ended()["code"] == -signal.SIGKILL


LEAVES_ONE = """
import os, time
if os.fork() == 0:
    os.setsid()
    with open("left", "w") as file: print(os.getpid(), file=file, flush=True)
    {0}
while not os.path.exists("left"): time.sleep(0.01)
os.write(1, b"last")
"""


@pytest.fixture
def leave(start: Any, tmp_path: Path) -> Iterator[Any]:
    yield lambda does, **how: start(LEAVES_ONE.format(does), **how)
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)


def test_a_silent_process_that_was_left_behind_is_not_waited_for(leave: Any) -> None:
    rank = leave("time.sleep(3600)", prefix="node02:3: ")
    assert rank.ended()["took"] < LONG / 2
    assert rank.file == b"last"
    assert rank.process.stdout.readline() == b"node02:3: last\n"


def test_one_left_behind_is_heard_until_the_limit(leave: Any) -> None:
    # A busy machine may keep it from writing for a second, and that is not silence.
    rank = leave(
        "while True: os.write(2, b'on and on\\n'); time.sleep(0.01)",
        limit=6.0,
        limits={"relay_quiet": 3.0},
    )
    assert 5 < rank.ended()["took"] < LONG / 2
    assert rank.file.rpartition(b"last")[2].count(b"on and on") > 1


# The terminal, which may be slow, full or gone.


@pytest.mark.parametrize("on_tty", [False, True])
def test_a_worker_ends_though_nobody_reads_the_terminal(
    start: Any, tty: tuple[int, int], on_tty: bool
) -> None:
    """The file has all. A tty says that it is writable while it has room for a few bytes only."""
    rank = start(SCRIPT, limit=0.5, **({"stdout": tty[1]} if on_tty else {}))
    report = rank.ended()
    assert (report["code"], rank.file == ALL) == (0, True)
    assert report["took"] < LONG / 2


def test_the_terminal_is_told_how_much_it_missed_and_where_it_is(
    start: Any, tmp_path: Path
) -> None:
    rank = start(
        "import sys\n"
        + SCRIPT
        + "open('written', 'w').close()\nsys.stdin.read()\nprint('going on')\n"
    )
    until((tmp_path / "written").exists)
    until(lambda: len(rank.file) == len(ALL))
    shown = b""
    while b"has them\n" not in shown:
        shown += rank.process.stdout.read(1 << 16)
    shown += rank.read()[0]  # ends its input as well
    match = re.search(
        rb"^srunddp: (\d+) bytes left out here, which were not taken in time; (.+) has them\n",
        shown,
        re.M,
    )
    assert match
    assert match[2].decode() == str(rank.log)
    before = shown[: match.start()]
    after = shown[match.end() :]
    # The note is a line of its own, also where it comes in the middle of one.
    before = before if ALL.startswith(before) else before[:-1]
    assert ALL.startswith(before)
    assert after == b"going on\n"
    rank.ended()
    assert len(before) + int(match[1]) + len(after) == len(rank.file)


def test_a_burst_to_a_terminal_that_is_read_is_all_there(start: Any) -> None:
    # We may be slow to read.
    rank = start("import os; os.system('seq 500000')", limits={"relay_holds": LONG})
    shown, _ = rank.read()
    rank.ended()
    assert shown == rank.file == b"".join(b"%d\n" % number for number in range(1, 500_001))


def test_without_a_file_the_worker_waits_for_the_reader(start: Any, tmp_path: Path) -> None:
    rank = start(
        "open('started', 'w').close()\n" + SCRIPT + "open('written', 'w').close()\n",
        file=False,
        prefix="p: ",
    )
    until((tmp_path / "started").exists)
    first = rank.process.stdout.read(100)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.process.wait(0.5)
    assert not (tmp_path / "written").exists()
    shown = first + rank.read()[0]
    assert shown == b"".join(b"p: " + line for line in ALL.splitlines(keepends=True))
    rank.ended()


def test_without_file_and_reader_it_ends_within_its_limit(start: Any) -> None:
    rank = start(
        "import signal; signal.setitimer(signal.ITIMER_REAL, 0.5)\n" + SCRIPT,
        file=False,
        prefix="p: ",
        limit=1,
    )
    report = rank.ended()
    assert report["code"] == -signal.SIGALRM
    assert report["took"] < 10


@pytest.mark.parametrize("tty", [False, True])
def test_a_reader_that_leaves_ends_nothing(start: Any, tty: bool) -> None:
    """Nor does a tty that is hung up."""
    ours, theirs = pty.openpty()
    rank = start("import sys; sys.stdin.read()\n" + SCRIPT, **({"stdout": theirs} if tty else {}))
    os.close(theirs)
    os.close(ours)
    if not tty:
        rank.process.stdout.close()
    rank.process.stdin.close()
    report = rank.ended()
    assert (report["code"], rank.file == ALL) == (0, True)


@pytest.mark.parametrize("file", [True, False])
def test_a_full_disk_below_the_terminal_ends_nothing(start: Any, file: bool) -> None:
    with open("/dev/full", "wb") as full:
        rank = start(SCRIPT, file=file, prefix="p: ", stdout=full)
        report = rank.ended()
    assert report["code"] == 0
    assert not file or rank.file == ALL


def test_a_terminal_s_disk_with_room_again_is_written_again(start: Any, tmp_path: Path) -> None:
    script = (
        "import os, sys\nfor _ in range(1500): os.write(1, b'%099d\\n' %"
        " 0)\nsys.stdin.read()\nprint('again')\n"
    )
    with (tmp_path / "terminal").open("ab") as terminal:
        rank = start(
            script, file=False, prefix="p: ", stdout=terminal, before=("prlimit", "--fsize=100000")
        )
    until(lambda: (tmp_path / "terminal").stat().st_size == 100_000)
    os.truncate(tmp_path / "terminal", 0)
    rank.process.stdin.close()
    assert rank.ended()["code"] == 0
    assert b"p: again\n" in (tmp_path / "terminal").read_bytes()


def test_a_full_disk_below_the_file_ends_nothing(start: Any) -> None:
    """A limit of a file's size, which the report stays below, stands for the disk."""
    rank = start(
        "import os\nfor _ in range(900): os.write(1, b'x' * 1000)\n",
        before=("prlimit", "--fsize=100000"),
    )
    assert rank.read()[0] == b"x" * 900_000
    report = rank.ended()
    assert report["code"] == 0
    assert rank.file == b"x" * 100_000


def test_a_tty_gets_all_while_somebody_reads_it(start: Any, tty: tuple[int, int]) -> None:
    ours, theirs = tty
    rank = start(
        "import os\nprint('one')\nprint('two', end='')\n", prefix="node02:3: ", stdout=theirs
    )
    rank.ended()
    assert select.select([ours], [], [], LONG)[0]
    assert os.read(ours, 4096) == b"node02:3: one\r\nnode02:3: two\r\n"
    assert not fcntl.fcntl(theirs, fcntl.F_GETFL) & os.O_NONBLOCK


# The prefix.


def lines(*pieces: bytes) -> list[bytes]:
    prefixed = LinePrefixer(b"p: ")
    return [*(prefixed.feed(piece) for piece in pieces), prefixed.rest()]


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ((b"on", b"e\ntwo\nth", b"ree"), [b"", b"p: one\np: two\n", b"", b"p: three\n"]),
        ((b"\n\n",), [b"p: \np: \n", b""]),
        # A progress bar.
        ((b"\r 10%", b"\r 20%", b"\r 30%\n"), [b"", b"p:  10%\r", b"p:  20%\rp:  30%\n", b""]),
        # As on Windows.
        ((b"one\r\ntwo\r", b"\nthree\r\n"), [b"p: one\r\np: two\r", b"\np: three\r\n", b""]),
    ],
)
def test_each_line_has_the_prefix_when_it_is_complete(
    pieces: tuple[bytes, ...], shown: list[bytes]
) -> None:
    assert lines(*pieces) == shown


def test_a_line_without_end_comes_in_pieces() -> None:
    piece = b"x" * (1 << 16)
    assert (
        b"".join(lines(*[b"x" * 10_000] * 20))
        == (b"p: " + piece + b"\n") * 3 + b"p: " + b"x" * 3392 + b"\n"
    )


def test_ranks_that_share_a_terminal_do_not_mix_within_a_line(start: Any) -> None:
    script = (
        "import os\nfor number in range(10_000): os.write(1, b'%d ' % number + b'x' * (number %"
        " 300) + b'\\n')\n"
    )
    read, write = os.pipe()
    ranks = [
        start(script, file=False, prefix=f"node02:{rank}: ", stdout=write) for rank in range(2)
    ]
    os.close(write)
    with open(read, "rb") as shared:
        shown = shared.read().splitlines()
    for rank in range(2):
        ranks[rank].ended()
        theirs = [line for line in shown if line.startswith(b"node02:%d: " % rank)]
        assert theirs == [
            b"node02:%d: %d %s" % (rank, number, b"x" * (number % 300)) for number in range(10_000)
        ]
    assert len(shown) == 20_000
