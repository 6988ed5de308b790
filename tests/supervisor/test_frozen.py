"""A file system below --log-dir that does not answer when a rank fails keeps nobody from hearing of
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.network import tool
from tests.conftest import missing
from tests.support.cases import slow_after
from tests.support.worlds import named, world


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """One of its own, on a loop device."""
    image = tmp_path / "image"
    mount = tmp_path / "disk"
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        missing("root and loop devices, for a file system that is frozen")
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    mount.mkdir()
    tool("mkfs.ext4", "-q", str(image))
    tool("mount", "-o", "loop", str(image), str(mount))
    try:
        yield mount
    finally:
        tool("umount", "--lazy", str(mount))


@pytest.mark.parametrize("rank", slow_after(1, [(0,), (1,)]))
def test_all_hear_of_a_failure_while_the_logs_are_frozen(
    tmp_path: Path, disk: Path, rank: int
) -> None:
    script = (
        f"if RANK == {rank}:\n    wait_for('frozen')\n    raise OSError('Stale file"
        " handle')\nrest()"
    )
    with world(
        tmp_path, script, "--log-dir", str(disk), limits={"files_written_within": 0.2}
    ) as it:
        it.workers()
        tool("fsfreeze", "--freeze", str(disk))
        try:
            (tmp_path / "frozen").touch()
            named(it.wait(), rank, 1, "OSError: Stale file handle")
        finally:
            tool("fsfreeze", "--unfreeze", str(disk))


HOOK = """
import builtins, os, pathlib, sys

class Recorder:
    def find_spec(self, name, path=None, target=None):
        here = pathlib.Path(f"supervisor.{os.environ['SLURM_PROCID']}")
        if pathlib.Path("over").exists() and here.exists() and here.read_text() == str(os.getpid()):
            with open("imported", "a") as file:
                file.write(name + chr(10))
sys.meta_path.insert(0, Recorder())
"""


@pytest.mark.parametrize(
    ("rank", "end"),
    slow_after(
        1,
        [
            (1, "raise OSError('Stale file handle')"),
            (1, "os.kill(os.getpid(), 9)"),
            (0, "os.kill(os.getppid(), 9)"),
        ],
    ),
)
def test_a_supervisor_imports_nothing_when_a_rank_fails(
    tmp_path: Path, rank: int, end: str
) -> None:
    """The environment's file system may be what has failed."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    script = f"if RANK == {rank}:\n    Path('over').touch()\n    {end}\nrest()"
    variables = {"PYTHONPATH": str(tmp_path / "hook")}
    with world(tmp_path, script, "--log-dir", "logs", variables=variables) as it:
        assert it.wait().codes[2] > 0
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
