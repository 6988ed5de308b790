"""Files that are replaced, and what is written to instead."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from srunddp.util.atomic_file import is_stream, write_output
from tests.support.starting import srunddp, write

WRITE = """
import sys
from pathlib import Path
from srunddp.util.atomic_file import write_output
print("before", flush=True)
write_output(Path("/dev/stdout"), b"content\\n")
"""


@contextmanager
def read(fifo: Path) -> Iterator[int]:
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield reader
    finally:
        os.close(reader)


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    with read(fifo) as reader:
        write_output(fifo, b"content\n")
        assert os.read(reader, 99) == b"content\n"
    assert (fifo.is_fifo(), os.listdir(tmp_path)) == (True, ["fifo"])


def test_a_link_to_a_pipe_is_that_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("fifo")
    with read(tmp_path / "fifo") as reader:
        write_output(tmp_path / "link", b"content\n")
        assert os.read(reader, 99) == b"content\n"
    assert (tmp_path / "link").is_symlink()


def test_a_pipe_that_nobody_reads_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    write_output(tmp_path / "fifo", b"")
    with pytest.raises(OSError, match="No such device"):
        write_output(tmp_path / "fifo", b"content\n")
    assert (tmp_path / "fifo").is_fifo()


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_standard_output_keeps_what_it_has(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE]
    if kind == "pipe":
        text = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    else:
        with (tmp_path / "out").open("w") as out:
            subprocess.run(command, check=True, stdout=out)
        text = (tmp_path / "out").read_text()
    assert text == "before\ncontent\n"


def test_only_what_is_no_file_is_a_stream(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for path in ("file", "link", "missing", "."):
        assert not is_stream(tmp_path / path)
    assert is_stream("/dev/null")
    write_output(tmp_path / "link", b"content")
    assert not (tmp_path / "link").is_symlink()  # as of a file of one's own
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(
    ("command", "options", "start"),
    [
        ("run", ("--quiet", "--result=fifo"), b'{"exit_code": 0'),
        ("sbatch", ("--write=fifo",), b"#!/bin/bash\n"),
    ],
    ids=str,
)
def test_an_option_may_name_a_pipe(
    command: str, options: tuple[str, ...], start: bytes, tmp_path: Path
) -> None:
    write(tmp_path / "train.py", "print()\n")
    fifo = tmp_path / "fifo"
    with read(fifo) as reader:
        before = fifo.stat()
        done = srunddp(command, *options, "train.py", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert os.read(reader, 1 << 16).startswith(start)
    assert fifo.stat().st_mode == before.st_mode


def test_the_result_may_go_to_standard_output(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "print('trained')\n")
    done = srunddp("run", "--quiet", "--result=/dev/stdout", "train.py", folder=tmp_path)
    assert done.stdout == 'trained\n{"exit_code": 0, "restarts": 0}\n'
