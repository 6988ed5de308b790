"""Input that can be read once, and a run that starts several times."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from tests.support.facts import tells
from tests.support.starting import LONG, SRUNDDP, bare, slurm, write

pytestmark = pytest.mark.slow

CONFIG = '{"lr": 1}\n'
# Each start says what it has read, and the first one fails.
READS = (
    "import os, sys\n"
    "start = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
    "print(start, sys.stdin.readline(), end='', flush=True)\n"
    "if start == '0': os._exit(7)\n"
)
# It fails in every start, which an empty script does not.
FAILS = "print('read', flush=True)\nraise ValueError('boom')\n"


def run(
    shell: str, folder: Path, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A line of bash, in which ``"$@"`` is srunddp with its options."""
    return subprocess.run(
        ("bash", "-c", shell, "bash", *SRUNDDP, "--quiet", *options),
        cwd=folder,
        env=bare(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONG,
    )


READ_ONCE = {
    "standard input": 'cat fails.py | "$@" /dev/stdin',
    "its descriptor": 'cat fails.py | "$@" /dev/fd/0',
    "its descriptor in proc": 'cat fails.py | "$@" /proc/self/fd/0',
    "a process substitution": '"$@" <(cat fails.py)',
    "a named pipe": 'mkfifo pipe && (: > pipe &) && "$@" pipe; code=$?; cat pipe; exit $code',
    "an argument": '"$@" fails.py --config <(echo lr: 1)',
    "the value of an option": '"$@" fails.py --config=<(echo lr: 1)',
    "an argument from standard input": 'echo lr: 1 | "$@" fails.py --config /dev/stdin',
    "the program": '"$1" <(cat "$2") "${@:3}" fails.py',
    "the program from standard input": 'cat "$2" | "$1" - "${@:3}" fails.py',
}


@pytest.mark.parametrize("shell", READ_ONCE.values(), ids=READ_ONCE.keys())
def test_a_run_that_may_restart_refuses_what_can_be_read_once(shell: str, tmp_path: Path) -> None:
    write(tmp_path / "fails.py", FAILS)
    if "$2" in shell:
        shell = f'export PYTHONPATH="${{2%/bin/*}}"; {shell}'
    done = run(shell, tmp_path, "--restarts=2")
    assert (done.returncode, done.stdout) == (78, ""), done.stderr
    assert tells(done.stderr, "--restarts", "expected", "read again", "write it to a file")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["standard input", "a process substitution", "an argument"])
def test_without_restarts_it_runs(name: str, tmp_path: Path) -> None:
    write(tmp_path / "fails.py", FAILS)
    done = run(READ_ONCE[name], tmp_path)
    assert (done.returncode, done.stdout) == (1, "read\n"), done.stderr


READ_AGAIN = {
    "a regular file as standard input": '"$@" /dev/stdin < fails.py',
    "a link": 'ln -s fails.py link.py; "$@" link.py',
    "a folder": 'mkdir d; cp fails.py d/__main__.py; "$@" d',
    "a module": '"$@" -m fails',
    "a pipe to write into": '"$@" fails.py --log >(cat > /dev/null)',
    "a file": 'echo lr: 1 > config; "$@" fails.py --config /dev/stdin < config',
    "a number that is no descriptor": '"$@" fails.py /dev/fd/99999999999999999999 /dev/fd/77',
}


@pytest.mark.parametrize("shell", READ_AGAIN.values(), ids=READ_AGAIN.keys())
def test_what_can_be_read_again_is_read_in_each_start(shell: str, tmp_path: Path) -> None:
    write(tmp_path / "fails.py", FAILS)
    done = run(shell, tmp_path, "--restarts=1")
    assert (done.returncode, done.stdout) == (1, "read\nread\n"), done.stderr


@pytest.mark.parametrize("pipes", [(0,), (1,), (0, 1)], ids=str)
def test_all_ranks_end_before_anything_starts(pipes: tuple[int, ...], tmp_path: Path) -> None:
    """Whichever rank has the pipe: mpirun gives standard input to rank 0 alone."""
    write(tmp_path / "fails.py", FAILS)
    ranks = []
    for rank in (0, 1):
        command = [*SRUNDDP, "--quiet", "--restarts=2", "fails.py", "--config=/dev/stdin"]
        ranks.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=bare(slurm(rank)),
                stdin=subprocess.PIPE if rank in pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [rank.communicate(timeout=LONG) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [78, 78], said
    assert [out for out, _ in said] == ["", ""]
    assert "".join(errors for _, errors in said).count("write it to a file") == 1


def test_each_start_reads_standard_input_from_where_the_first_one_has(tmp_path: Path) -> None:
    """And whoever shares it goes on where the last start has ended."""
    write(tmp_path / "config", f"skipped\n{CONFIG}next\n")
    # os.read: a buffered reader takes more than a line, and leaves nothing to the shell.
    write(
        tmp_path / "reads.py",
        READS.replace("sys.stdin.readline()", f"os.read(0, {len(CONFIG)}).decode()"),
    )
    shell = '{ read; "$@" --restarts=1 reads.py; cat; } < config'
    done = run(shell, tmp_path)
    assert done.stdout == f"0 {CONFIG}1 {CONFIG}next\n", done.stderr


def test_each_rank_reads_its_own_standard_input_again(tmp_path: Path) -> None:
    """As with srun --input=FILE.%t. One of them may have been ended before it has read."""
    write(tmp_path / "reads.py", READS)
    ranks = []
    for rank in (0, 1):
        with open(write(tmp_path / f"config.{rank}", f"rank {rank}\n")) as config:
            ranks.append(
                subprocess.Popen(
                    [*SRUNDDP, "--quiet", "--restarts=1", "reads.py"],
                    cwd=tmp_path,
                    env=bare(slurm(rank)),
                    stdin=config,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
    said = [rank.communicate(timeout=LONG) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for rank, (out, errors) in enumerate(said):
        assert out.splitlines()[-1] == f"1 rank {rank}", errors


def rank_with_a_pipe(folder: Path, rank: int, stdin: int | IO[str] | None) -> subprocess.Popen[str]:
    """A rank of two of a run of train.py with its own pipe as standard input, as srun makes it."""
    return subprocess.Popen(
        [*SRUNDDP, "--quiet", "--restarts=1", "train.py"],
        cwd=folder,
        env=bare(slurm(rank)),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(folder: Path, script: str, text: str) -> list[str]:
    """What two ranks print that both have this text as their standard input."""
    write(folder / "train.py", script)
    text_file = write(folder / "text", text)
    with ExitStack() as stack:
        ranks = []
        for rank in (0, 1):
            launcher = subprocess.Popen(["cat", text_file], stdout=subprocess.PIPE, text=True)
            stack.enter_context(launcher)
            ranks.append(stack.enter_context(rank_with_a_pipe(folder, rank, launcher.stdout)))
            stack.callback(ranks[-1].kill)
            assert launcher.stdout
            launcher.stdout.close()
        said = [rank.communicate(timeout=LONG) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return [out for out, _ in said]


@pytest.mark.parametrize("size", [10, 1 << 16, (1 << 16) + 1, 1 << 20])
def test_each_start_reads_what_a_launcher_passes_on(size: int, tmp_path: Path) -> None:
    """One rank may have been ended before it has read."""
    script = READS.replace("sys.stdin.readline(), end=''", "len(sys.stdin.read())")
    for out in printed(tmp_path, script, "x" * size):
        assert out.endswith(f"1 {size}\n")


def test_more_than_is_kept_is_read_once(tmp_path: Path) -> None:
    script = "import sys; print(len(sys.stdin.read()))"
    assert printed(tmp_path, script, "x" * (5 << 20)) == [f"{5 << 20}\n"] * 2


def test_a_pipe_that_stays_open_is_read_as_it_is_written(tmp_path: Path) -> None:
    """As behind a terminal: the script waits for what comes, and not for the end."""
    write(tmp_path / "train.py", "print('begins', flush=True)\nprint(input(), flush=True)")
    with ExitStack() as stack:
        ranks = []
        for number in (0, 1):
            ranks.append(stack.enter_context(rank_with_a_pipe(tmp_path, number, subprocess.PIPE)))
            stack.callback(ranks[-1].kill)
        for rank in ranks:
            assert rank.stdin
            assert rank.stdout
            assert rank.stdout.readline() == "begins\n"
            rank.stdin.write("an answer\n")
            rank.stdin.flush()
            assert rank.stdout.readline() == "an answer\n"
        assert [rank.wait(LONG) for rank in ranks] == [0, 0]


def test_without_a_launcher_a_pipe_is_left_to_the_shell(tmp_path: Path) -> None:
    """A loop of the shell reads the names of its runs there."""
    write(tmp_path / "train.py", "import sys; print(sys.argv[1])")
    loop = "printf '%s\\n' one two | while read name; do"
    done = run(f'{loop} "$@" train.py $name; done', tmp_path, "--restarts=1")
    assert done.stdout == "one\ntwo\n", done.stderr


def test_a_closed_standard_input_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "fails.py", FAILS)
    done = run('"$@" fails.py <&-', tmp_path, "--restarts=1")
    assert (done.returncode, done.stdout) == (1, "read\nread\n"), done.stderr
    assert os.listdir(tmp_path) == ["fails.py"]
