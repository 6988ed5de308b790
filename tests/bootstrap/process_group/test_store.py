"""What torchrun tells its ranks, ours are told; and how many threads each takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from srunddp.bootstrap.environment.cpus import threads
from tests.support.starting import LONG, bare, srunddp, write
from tests.support.worlds import world

TELL = """
import json, os
from pathlib import Path
Path(f"told.{os.environ['RANK']}").write_text(json.dumps(dict(os.environ)))
"""
# The store's place, and what is torchrun's own way of doing things; docs/coming-from/torchrun.md has them.
OTHERS = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
}
OTHERS |= {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_SIGNALS_TO_HANDLE"}


def test_each_rank_is_told_what_torchrun_tells_it(tmp_path: Path) -> None:
    write(tmp_path / "tell.py", TELL)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "tell.py")
    subprocess.run(torchrun, cwd=tmp_path, env=bare(), check=True, capture_output=True, timeout=LONG)
    theirs = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(2)]
    with world(tmp_path, TELL, size=2) as it:
        assert it.wait().codes == [0, 0]
    for rank in range(2):
        ours = json.loads((tmp_path / f"told.{rank}").read_text())
        told = {name: value for name, value in theirs[rank].items() if name not in OTHERS | {*bare()}}
        assert {"ROLE_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"} <= {*told}
        assert {name: ours.get(name) for name in told} == told


def test_the_restart_count_is_slurms(tmp_path: Path) -> None:
    with world(tmp_path, TELL, size=2, variables={"SLURM_RESTART_COUNT": "3"}) as it:
        assert it.wait().codes == [0, 0]
    assert json.loads((tmp_path / "told.1").read_text())["TORCHELASTIC_RESTART_COUNT"] == "3"


def test_a_rank_that_has_its_node_alone_leaves_threads_to_torch(tmp_path: Path) -> None:
    write(tmp_path / "tell.py", TELL)
    assert srunddp("tell.py", folder=tmp_path).returncode == 0
    assert "OMP_NUM_THREADS" not in json.loads((tmp_path / "told.0").read_text())


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_threads_that_the_user_gave_stay(name: str) -> None:
    """torch looks at OMP_NUM_THREADS first."""
    assert threads({name: "7"}, 2) == {}


def test_threads_are_no_more_than_slurm_was_asked_for() -> None:
    assert threads({"SLURM_CPUS_PER_TASK": "1"}, 1) == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("script", "options", "code"), [("", (), 0), ("sys.exit(3)", (), 3), ("", ("--log-dir=logs",), 0)]
)
def test_pythons_development_mode_has_nothing_to_say(
    tmp_path: Path, script: str, options: tuple[str, ...], code: int
) -> None:
    with world(tmp_path, script, *options, size=2, variables={"PYTHONDEVMODE": "1"}) as it:
        ended = it.wait()
    assert (ended.codes, "Warning" in ended.text) == ([code, code], False), ended.text


def test_nor_has_it_where_ranks_do_not_come_to_meet(tmp_path: Path) -> None:
    with world(tmp_path, "", "--ifaces=absent", size=2, variables={"PYTHONDEVMODE": "1"}) as it:
        ended = it.wait()
    assert (ended.codes, "Warning" in ended.text) == ([78, 78], False), ended.text
