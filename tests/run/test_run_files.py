"""What follows from the command line for the folder of a run."""

from __future__ import annotations

import pytest

from srunddp.bootstrap.environment.detect import detect
from srunddp.run.run_files import run_name
from tests.support.launchers import PID, open_mpi, step


@pytest.mark.parametrize(
    ("variables", "exported", "name"),
    [
        (step(1, SLURM_STEP_ID="3"), {}, "1207.3"),
        (step(1, SLURM_STEP_ID="3"), {"PMIX_NAMESPACE": "x", "SLURM_JOB_ID": "8"}, "1207.3"),
        ({}, {}, "run"),
        ({}, {"SLURM_JOB_ID": "1207"}, "1207"),
        # mpirun does not tell the job on other nodes, and all ranks need one name.
        (open_mpi(1), {"SLURM_JOB_ID": "1207"}, "run"),
        (open_mpi(1), {"SLURM_JOB_ID": "1207", "PMIX_NAMESPACE": "prterun-7"}, "prterun-7"),
    ],
    ids=str,
)
def test_all_ranks_of_a_run_know_it_by_one_name(
    variables: dict[str, str], exported: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("SLURM_JOB_ID", "PMIX_NAMESPACE"):
        monkeypatch.delenv(each, raising=False)
    for each, value in exported.items():
        monkeypatch.setenv(each, value)
    assert run_name(detect(variables, pid=PID)) == name
