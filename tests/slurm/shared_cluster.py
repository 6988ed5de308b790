"""The cluster of all tests that need no other, a plugin of pytest.

In a conftest.py of one folder, tests of another that import the fixture would get a second cluster
beside it, and the machine has room for one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, ClusterError, Settings, requirements
from tests.conftest import BED, missing
from tests.slurm.conftest import SlurmJobRunner, data_network
from tests.slurm.spare_nodes import training

ENDS_WITHIN = 150.0  # seconds


@pytest.fixture(scope="session")
def runner() -> Iterator[SlurmJobRunner]:
    """The cluster; with accounting where this machine has what it takes, see `accounting`."""
    if problem := requirements():
        missing(problem)
    settings = Settings(
        interactive_step=True,
        accounting=requirements(accounting=True) is None,
        gathering=True,
        slurmd_timeout=20,
        # The kernel of User Mode Linux has no table of nftables for both families.
        open_management=BED.endswith("uml"),
    )
    with Cluster(settings) as cluster:
        data_network(cluster)
        yield SlurmJobRunner(cluster)


@pytest.fixture(scope="session")
def undisturbed(runner: SlurmJobRunner) -> str:
    """The weights of a training with spare nodes in which nothing is lost."""
    with training(runner, "undisturbed") as run:
        assert run.finish(ENDS_WITHIN) == 0, run.said()
        (found,) = run.weights()
    return found


@pytest.fixture(scope="session")
def accounting() -> None:
    """For a test that needs Slurm's accounting, of `runner` or of a cluster beside it."""
    if BED:
        pytest.skip("no accounting in a bed: slurmdbd does not run with that Debian's MariaDB")
    if problem := requirements(accounting=True):
        missing(problem)


@pytest.fixture(autouse=True)
def cancelled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave no job, and six nodes that take the next one, whatever a test has done."""
    yield
    if "runner" in request.fixturenames:
        cluster = request.getfixturevalue("runner").cluster
        try:
            cluster.cancel_all()
            cluster.await_all_nodes()
        except ClusterError:
            # It fails this test, and not the next.
            cluster.down()
            cluster.up()
            data_network(cluster)
            raise
