"""--offline on every rank of a real step; its plugin for affinity is task/none, as where a site has
none.
"""

from __future__ import annotations

import os

import pytest

from tests.conftest import PROGRAMS
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner

REPORT = str(PROGRAMS / "report.py")
CPUS = len(os.sched_getaffinity(0))
pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(
    ("layout", "threads"),
    [
        (("-N2", "--ntasks-per-node=1", "--cpus-per-task=1"), 1),
        (("-N2", "--ntasks-per-node=1"), CPUS),
        (("-N2", "--ntasks-per-node=2"), max(1, CPUS // 2)),
    ],
)
def test_ranks_have_offline_switches_and_threads_for_their_cpus(
    runner: SlurmJobRunner, layout: tuple[str, ...], threads: int
) -> None:
    """No more than were asked for, though each may run on all of the machine."""
    done = runner.srun(
        *layout, "env", "-u", "OMP_NUM_THREADS", SRUNDDP, "--quiet", "--offline", REPORT
    )
    assert done.code == 0, done.errors
    for report in done.by_rank().values():
        assert (
            report["HF_HUB_OFFLINE"]
            == report["TRANSFORMERS_OFFLINE"]
            == report["HF_DATASETS_OFFLINE"]
            == "1"
        )
        assert os.path.isabs(report["HF_HOME"])
        assert report["OMP_NUM_THREADS"] == str(threads)
    assert len({report["node"] for report in done.by_rank().values()}) == 2
