"""--staged where slurmstepd could not enter the step's working directory."""

from __future__ import annotations

import json

import pytest

from tests.conftest import PROGRAMS
from tests.slurm.conftest import PYTHON, SRUNDDP, Bench

UNSEEN = "/shared-that-no-node-sees/project"
pytestmark = pytest.mark.slurm


def test_every_rank_runs_the_copy_of_a_project_that_slurm_could_not_enter(bench: Bench) -> None:
    folder = bench.cluster.shared / "staged"
    copy = folder / "project-1a2b"
    copy.mkdir(parents=True)
    folder.chmod(0o700)
    (copy / "train.py").write_text((PROGRAMS / "report.py").read_text())
    places = [{"role": "project", "path": UNSEEN, "here": str(copy)}]
    (folder / "places.json").write_text(json.dumps({"places": places}))
    (folder / "lock").touch()
    for file in ("places.json", "lock"):
        (folder / file).chmod(0o600)
    env = {"SRUNDDP_STAGED": str(folder), "PWD": UNSEEN}
    # By Python itself: a `python3` in PATH that is a shell's script, such as pyenv's, would correct PWD to /tmp.
    options = ("--staged", "train.py", f"--data={UNSEEN}/x")
    done = bench.srun(f"--chdir={UNSEEN}", "-N2", "-n2", PYTHON, SRUNDDP, *options, env=env)
    assert done.code == 0, done.errors
    assert "going to /tmp instead" in done.errors
    assert done.errors.count(f"srunddp: this node does not see {UNSEEN}: ") == 1
    assert [report["arguments"] for report in done.by_rank().values()] == [[f"--data={copy}/x"]] * 2
