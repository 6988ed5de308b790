"""What torch says of elastic, and elastic's variables, are under srunddp what they are under
torchrun.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.conftest import Run, mpirun, srun, torchrun
from tests.slurm.conftest import SlurmJobRunner

NAME = "elastic_variables"


def texts(run: Run) -> set[str]:
    """Of all ranks: which of the variables with a text they have in common, and that is not
    empty.
    """
    said = [record["launch"] for record in run.records]
    return {name for name in said[0] if said[0][name] and len({one[name] for one in said}) == 1}


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return torchrun(NAME, tmp_path_factory.mktemp("torchrun"))


@pytest.mark.mpirun
def test_below_mpirun_it_finds_what_torchrun_sets(under_torchrun: Run, tmp_path: Path) -> None:
    ours = mpirun(NAME, tmp_path)
    assert ours.results() == under_torchrun.results()
    assert texts(ours) == texts(under_torchrun)


@pytest.mark.slurm
def test_below_srun_it_finds_what_torchrun_sets(
    under_torchrun: Run, runner: SlurmJobRunner
) -> None:
    ours = srun(runner, NAME)
    assert ours.results() == under_torchrun.results()
    assert texts(ours) == texts(under_torchrun)


@pytest.mark.slurm
def test_on_two_nodes_each_is_a_group(under_torchrun: Run, runner: SlurmJobRunner) -> None:
    ours = srun(runner, NAME, nodes=2, per_node=2)
    for rank, record in enumerate(ours.records):
        assert record["numbers"] == under_torchrun.records[rank % 2]["numbers"] | {
            "RANK": rank,
            "WORLD_SIZE": 4,
            "GROUP_RANK": rank // 2,
            "GROUP_WORLD_SIZE": 2,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": 4,
        }
        assert record["sum"] == 6
    assert texts(ours) == texts(under_torchrun)
