"""A script below srunddp gets the signals that plain Python gets from the same Slurm, in kind,
number and order.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.cluster.cluster import Settings, beside, requirements
from tests.conftest import missing
from tests.recorded_signals import Recorded, differences, table
from tests.slurm.conftest import SlurmJobRunner, data_network
from tests.slurm.signals import ROWS, record

pytestmark = pytest.mark.slurm

Jobs = dict[str, dict[str, Recorded]]


TRACKINGS = {"cgroup": 11, "linuxproc": 12}  # with the number of its cluster


@pytest.fixture(scope="module")
def tables() -> Iterator[dict[str, Future[Jobs]]]:
    """For each tracking, every row with plain Python and with srunddp; all of it at once, as most
    of it is waiting.
    """
    if problem := requirements():
        missing(problem)
    with ThreadPoolExecutor(len(TRACKINGS)) as pool:
        yield {tracking: pool.submit(recorded, tracking) for tracking in TRACKINGS}


def recorded(tracking: str) -> Jobs:
    with beside(Settings(tracking=tracking), TRACKINGS[tracking]) as cluster:
        data_network(cluster)
        jobs = record(SlurmJobRunner(cluster))
    print(f"proctrack/{tracking}\n{table(jobs)}")
    return jobs


@pytest.mark.parametrize("tracking", TRACKINGS)
@pytest.mark.parametrize("row", ROWS)
def test_a_script_gets_what_plain_python_gets(
    row: str, tracking: str, tables: dict[str, Future[Jobs]]
) -> None:
    jobs = tables[tracking].result()[row]
    assert not differences(jobs["plain"], jobs["srunddp"])
