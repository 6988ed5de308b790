"""Below srun a script that imports mpi4py at its top may start processes, as it may without MPI."""

from __future__ import annotations

import pytest

from tests.conftest import PROGRAMS
from tests.slurm.conftest import OPEN_MPI, SRUNDDP, SlurmJobRunner

CHILDREN = str(PROGRAMS / "children.py")
pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(
    "channel", [pytest.param(name, marks=OPEN_MPI) for name in ("slurm", "mpi")]
)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_each_start_method_work_beside_mpi(
    runner: SlurmJobRunner, channel: str, method: str
) -> None:
    """Whether srunddp has started MPI or the script does."""
    words = (SRUNDDP, "--quiet", "--channel", channel, CHILDREN, method)
    done = runner.srun("--mpi=pmix", "-N2", "--ntasks-per-node=1", *words, env={"PROBE": "here"})
    assert done.code == 0, done.errors
    lines = done.output.splitlines()
    for line in (
        "Pool [0, 1, 4, 9]",
        "ProcessPoolExecutor [0, 1, 4, 9]",
        "below it 25",
        "terminated -15",
        "the last process has ended",
    ):
        assert lines.count(line) == 2, done.output
    assert {line for line in lines if line.startswith("variables")} == {
        "variables ['here', '0']",
        "variables ['here', '1']",
    }
