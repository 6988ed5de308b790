"""mpirun inside an allocation: its ranks inherit the daemon's SLURM_* and must not believe them."""

from __future__ import annotations

import shlex

import pytest

from tests.conftest import PROGRAMS
from tests.mpirun.conftest import there
from tests.slurm.conftest import SRUNDDP, Outcome, SlurmJobRunner, gated

pytestmark = [pytest.mark.slurm, pytest.mark.mpirun]

# mpirun's own daemons must be told the data network too, as the management network carries Slurm
# only.
NETWORK = {
    "openmpi4": {"OMPI_MCA_oob_tcp_if_include": "10.88.0.0/24"},
    "openmpi5": {"PRTE_MCA_prte_if_include": "10.88.0.0/24"},
    "mpich": {"HYDRA_IFACE": "ens1f1"},
}


def mpirun(runner: SlurmJobRunner, name: str, program: str, *options: str) -> Outcome:
    """A batch job whose body is mpirun of srunddp and the program."""
    mpi = there(name)
    exports = "".join(
        f"export {key}={shlex.quote(value)}\n" for key, value in (mpi.env() | NETWORK[name]).items()
    )
    return runner.batch(f"{exports}{mpi.mpirun} {SRUNDDP} {PROGRAMS / program}", *options)


@pytest.mark.parametrize("name", gated(sorted(NETWORK), "mpich", "openmpi5"))
def test_mpirun_takes_the_allocations_tasks_and_its_own_ranks(
    runner: SlurmJobRunner, name: str
) -> None:
    done = mpirun(runner, name, "report.py", "-N2", "--ntasks-per-node=2")
    assert done.code == 0, done.errors
    ranks = done.by_rank()
    assert sorted(ranks) == [0, 1, 2, 3]
    assert [ranks[rank]["local_rank"] for rank in range(4)] == [0, 1, 0, 1]
    assert [ranks[rank]["node_rank"] for rank in range(4)] == [0, 0, 1, 1]
    assert {report["world_size"] for report in done.reports} == {4}
    assert f"launcher {there(name).name}," in done.errors


@pytest.mark.parametrize("name", sorted(NETWORK))
def test_a_torchrun_script_reduces_over_two_nodes_under_mpirun(
    runner: SlurmJobRunner, name: str
) -> None:
    done = mpirun(runner, name, "torchrun_style.py", "-N2", "--ntasks-per-node=1")
    assert done.code == 0, done.errors
    ranks = done.by_rank()
    assert {rank: report["sum"] for rank, report in ranks.items()} == {0: 3.0, 1: 3.0}
    assert [ranks[rank]["node"] for rank in (0, 1)] == ["node01", "node02"]
    assert f"2 ranks on 2 nodes, launcher {there(name).name}, " in done.errors
