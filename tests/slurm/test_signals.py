"""A script below srunddp gets the signals that plain Python gets from the same Slurm, in kind, number and order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Settings, beside, requirements
from tests.conftest import missing
from tests.recorded_signals import Recorded, differences, table
from tests.slurm.conftest import Bench, data_network
from tests.slurm.signals import ROWS, record

pytestmark = pytest.mark.slurm

Jobs = dict[str, dict[str, Recorded]]


@pytest.fixture(scope="module", params=["cgroup", "linuxproc"])
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Every row with plain Python and with srunddp, all at once; tracked by control groups, and by process trees."""
    if problem := requirements():
        missing(problem)
    number = 11 + ["cgroup", "linuxproc"].index(request.param)
    with beside(Settings(tracking=request.param), number) as cluster:
        recorded = record(Bench(cluster, data_network(cluster)))
        print(f"proctrack/{request.param}\n{table(recorded)}")
        yield recorded


@pytest.mark.parametrize("row", ROWS)
def test_a_script_gets_what_plain_python_gets(row: str, jobs: Jobs) -> None:
    assert not differences(jobs[row]["plain"], jobs[row]["srunddp"])
