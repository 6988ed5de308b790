"""A push and a clean from their command to a node, with an srun and an sbcast that know this one
node alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from srunddp.stage.paths import VARIABLE, read
from tests.support.facts import tells
from tests.support.starting import srunddp, until, write
from tests.support.worlds import is_gone

SRUN = """#!/bin/bash
while [ -e silent ] && read -r _; do :; done
while [[ $1 == --* ]]; do shift; done
[[ $* == *sdd-step* ]] || { sleep 600 >/dev/null & echo $! >child; }
SLURM_STEP_ID=5 SLURMD_NODENAME=node09 exec "$@"
"""
SBCAST = """#!/bin/bash
[ ! -e no-room ] || { echo "sbcast: error: no room" >&2; exit 1; }
cp "${@: -2:1}" "${@: -1}"
"""
Stage = Callable[..., CompletedProcess[str]]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Runs ``srunddp stage`` in a job of one node, whose disk is ``tmp_path/disk``."""
    for name, text in {"srun": SRUN, "sbcast": SBCAST}.items():
        write(tmp_path / "bin" / name, text).chmod(0o755)
    (tmp_path / "disk").mkdir()
    write(tmp_path / "data" / "sample", "a sample")
    job = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NUM_NODES": "1",
    }

    def act(*words: str, **variables: str) -> CompletedProcess[str]:
        return srunddp(
            "stage", *words, f"--dir={tmp_path}/disk", folder=tmp_path, **job | variables
        )

    yield act
    act("clean")


@pytest.mark.slow
def test_push_brings_a_folder_and_clean_removes_it(stage: Stage, tmp_path: Path) -> None:
    job = tmp_path / "disk" / f"sdd-{os.getuid()}-17"
    done = stage("push", "--data=data", "--all-nodes")
    assert (done.returncode, done.stdout) == (0, f"{job}/srunddp\n"), done
    # It would kill the step after srun's end.
    until(lambda: is_gone(int((tmp_path / "child").read_text())))
    said = re.fullmatch(
        r"srunddp: node09 staged -> (\S+)\nsrunddp: data: 1 files, 0 MiB, packed in .*\n",
        done.stderr,
    )
    assert said, done
    assert Path(said[1], "sample").read_text() == "a sample"
    again = stage("push", "--data=data", "--all-nodes")
    assert again.stderr == f"srunddp: node09 staged before -> {said[1]}\n"
    write(tmp_path / "more" / "sample", "")
    stage("push", "--data=more", "--all-nodes")
    places = {place.path: place.here for place in read({VARIABLE: str(job)}).places}
    assert [*places] == [f"{tmp_path}/more", f"{tmp_path}/data"]
    assert places[f"{tmp_path}/data"] == said[1]
    seen = stage("push", "--data=data").stderr
    assert seen.count("\n") == 1
    assert tells(seen, "all nodes", f"{tmp_path}/data")
    Path(said[1], "result").write_text("done")
    kept = stage("clean").stderr
    assert kept.count("\n") == 1
    assert tells(kept, "node09", "1 file", job)
    assert [path.name for path in job.rglob("*") if path.is_file()] == [
        f"{Path(said[1]).name}.kept-1.unpacked",
        "result",
    ]


def test_failed_push_leaves_nothing_on_a_node(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "no-room").touch()
    done = stage("push", "--data=data", "--all-nodes")
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.count("\n") == 1
    assert tells(done.stderr, "srunddp: error: ", "no room", "; expected ", " -> ")
    assert not list((tmp_path / "disk").iterdir())


def test_refusal_of_a_node_and_missing_srun_are_named(stage: Stage, tmp_path: Path) -> None:
    planted = write(tmp_path / "disk" / f"sdd-{os.getuid()}-17", "")
    done = stage("push", "--data=data", "--all-nodes")
    assert (done.returncode, done.stdout) == (69, "")
    assert tells(done.stderr, "srunddp: error: ", "node09", planted, os.getuid(), "-rw")
    done = stage("push", "--data=data", PATH="/nowhere")
    assert done.returncode == 69
    assert tells(done.stderr, "srunddp: error: ", "srun", "No such file")


def test_node_that_does_not_answer_ends_a_push_in_time(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "silent").touch()
    done = stage("push", "--data=data", "--timeout=1")
    (tmp_path / "silent").unlink()
    found = "srunddp: error: no answer from some nodes within 1 s"
    assert (done.returncode, done.stdout, done.stderr.partition(";")[0]) == (69, "", found)
