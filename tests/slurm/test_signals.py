"""A script below srunddp gets the signals that plain Python gets from the same Slurm, in kind,
number and order.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from tests.cluster.cluster import Settings, beside, requirements
from tests.conftest import BED, missing
from tests.recorded_signals import Recorded, differences, table
from tests.slurm.conftest import SlurmJobRunner, data_network
from tests.slurm.signals import ROWS, processes, record
from tests.support.starting import until

pytestmark = pytest.mark.slurm

Jobs = dict[str, dict[str, Recorded]]


TRACKINGS = {"cgroup": 11, "linuxproc": 12, "pgid": 13}  # with the number of its cluster
if BED.endswith("uml"):
    # Python takes seconds to start there, and the other trackings do not need control groups.
    TRACKINGS = {"cgroup": TRACKINGS["cgroup"]}


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
    # As in `runner`: User Mode Linux lacks what the firewall needs.
    settings = Settings(tracking=tracking, open_management=BED.endswith("uml"))
    with beside(settings, TRACKINGS[tracking]) as cluster:
        data_network(cluster)
        jobs = record(SlurmJobRunner(cluster))
    print(f"proctrack/{tracking}\n{table(jobs)}")
    return jobs


@pytest.mark.parametrize("tracking", TRACKINGS)
def test_after_scancel_nothing_is_left(tracking: str, tables: dict[str, Future[Jobs]]) -> None:
    """Of the children of a script, either: some trackings leave them to their process group."""
    for job in tables[tracking].result()["scancel"].values():
        until(partial(is_gone, job))


def is_gone(job: Recorded) -> bool:
    return not processes(job)


@pytest.mark.parametrize("tracking", TRACKINGS)
@pytest.mark.parametrize("row", ROWS)
def test_a_script_gets_what_plain_python_gets(
    row: str, tracking: str, tables: dict[str, Future[Jobs]]
) -> None:
    jobs = tables[tracking].result()[row]
    assert not differences(jobs["plain"], jobs["srunddp"])
