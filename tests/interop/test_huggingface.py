"""Hugging Face's Trainer and Accelerate beside what test_same_bits.py has, and datasets'
streams.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.conftest import FOR_ACCELERATE, Run, mpirun, srun
from tests.slurm.conftest import SlurmJobRunner

for_accelerate = pytest.mark.parametrize("name", FOR_ACCELERATE)


@for_accelerate
@pytest.mark.mpirun
def test_hydras_own_variables_lead_to_the_same_ranks(
    name: str, own: Callable[[str], Run], tmp_path: Path
) -> None:
    """PMI_RANK and PMI_SIZE are what accelerate looks for without a GPU."""
    assert mpirun(name, tmp_path, mpi="mpich").results() == own(name).results()


@for_accelerate
@pytest.mark.slurm
def test_on_two_nodes_both_are_local_rank_0_with_the_same_losses(
    name: str, own: Callable[[str], Run], runner: SlurmJobRunner
) -> None:
    ours = srun(runner, name, nodes=2, per_node=1, options=("--mpi=pmi2",))
    assert ours.places() == [(0, 0, 2), (1, 0, 2)]
    assert ours.losses() == own(name).losses()


@pytest.mark.mpirun
def test_a_stream_of_datasets_is_read_once_by_all_workers(tmp_path: Path) -> None:
    """The recipe of the reference: each epoch has every row once, in another order, and a resume
    has the rest of it.
    """
    records = mpirun("hf_stream", tmp_path).records
    for epoch in (0, 1):
        batches = [batch for record in records for batch in record["epochs"][epoch]]
        assert sorted(row for batch in batches for row in batch) == list(range(52))
    for record in records:
        first, second = record["epochs"]
        assert record["rest"] == first[2:]
        assert first != second
