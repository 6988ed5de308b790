"""What is published: the site, the packages, and the commands that the pages tell users to type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, Settings, requirements
from tests.conftest import missing
from tests.docs.packages import build, copy_sources
from tests.slurm.conftest import SlurmJobRunner, data_network


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docs)
            assert isinstance(item, pytest.Function)
            if not {"runner", "site"}.isdisjoint(item.fixturenames):
                item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def runner() -> Iterator[SlurmJobRunner]:
    """A cluster with as many CPUs as the pages ask for."""
    if problem := requirements(accounting=True):
        missing(problem)
    with Cluster(Settings(accounting=True, cpus=64)) as cluster:
        data_network(cluster)
        yield SlurmJobRunner(cluster)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone has."""
    folder = tmp_path_factory.mktemp("source")
    copy_sources(folder)
    return folder


@pytest.fixture(scope="session")
def built(source: Path) -> dict[str, Path]:
    """The sdist and the wheel, by their suffixes."""
    return build(source)
