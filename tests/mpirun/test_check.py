"""A check before a job, below mpirun: all ranks are seen, and a script that uses MPI passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS
from tests.mpirun.conftest import Mpi, there
from tests.slurm.conftest import SRUNDDP

pytestmark = pytest.mark.mpirun

QUICK = {"PYTHONPATH": str(PROGRAMS / "other_torch")}  # the real one takes seconds to import


def test_a_healthy_world_passes_under_mpirun(mpi: Mpi, tmp_path: Path) -> None:
    done = mpi.run(
        2, SRUNDDP, "check", f"--output-dir={tmp_path}", str(PROGRAMS / "report.py"), env=QUICK
    )
    assert (done.code, done.errors) == (0, ""), done
    assert "check: 2 of 2 ranks on 1 node, all is well\n" in done.output
    assert f"2 of 2 ranks by {mpi.name}, channel {mpi.channel}\n" in done.output
    report = json.loads((tmp_path / "preflight.local.json").read_text())
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]


def test_a_script_that_does_not_parse_ends_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("for x in:\n")
    words = (SRUNDDP, "check", f"--output-dir={tmp_path}", str(tmp_path / "train.py"))
    done = there("openmpi5").run(2, *words, env=QUICK)
    assert done.code == 69
    assert (
        done.output.count("train.py:1: invalid syntax; expected a Python script -> correct it\n")
        == 1
    )
    assert "Traceback" not in done.errors
