"""When a node is cut off the data network, all ranks on both sides end within 20 s, and the node is
named.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.chaos.network import link_down, packets_dropped
from tests.chaos.plan import Plan
from tests.chaos.run import Result, Site, started
from tests.cluster.nodes import Node, node
from tests.slurm.conftest import SlurmJobRunner, gated, site_mpi

pytestmark = pytest.mark.slurm

CUT_OFF = 60.0
LOST = 69
FAULTS: dict[str, Callable[[Node], AbstractContextManager[None]]] = {
    "link down": link_down,
    "all packets dropped": lambda cut: packets_dropped(cut, "input", "output"),
    "packets to it dropped": lambda cut: packets_dropped(cut, "input"),
    "packets from it dropped": lambda cut: packets_dropped(cut, "output"),
}


@pytest.fixture
def site(runner: SlurmJobRunner) -> Site:
    return Site(runner.cluster.shared, runner.cluster, runner.ifaces, tuple(site_mpi().items()))


def cut_off(fault: str, name: str, site: Site) -> Result:
    with started(Plan(options=("--lost-after", "9")), site) as run:
        run.ready()
        run.failing()
        with FAULTS[fault](node(name)):
            return run.finish(CUT_OFF + 10.0)


@pytest.mark.parametrize("fault", gated(FAULTS, "link down"))
def test_a_node_that_is_cut_off_is_named_and_both_sides_end(fault: str, site: Site) -> None:
    result = cut_off(fault, "node02", site)
    assert result.gone is not None, result.describe()
    assert result.gone < CUT_OFF
    assert (result.code, len(result.verdicts)) == (LOST, 1), result.describe()
    verdict = result.verdicts[0]
    assert (verdict.ranks, verdict.node, verdict.code, verdict.lost) == (
        (2, 3),
        "node02",
        LOST,
        True,
    )


def test_rank_0_s_node_cut_off_ends_all_on_both_sides(site: Site) -> None:
    """Each side sees the other lost: rank 0 all others, the others rank 0's node."""
    result = cut_off("link down", "node01", site)
    assert result.gone is not None, result.describe()
    assert result.gone < CUT_OFF
    assert result.code == LOST
    assert any(each.node == "node01" and each.ranks == (0, 1) for each in result.verdicts), (
        result.describe()
    )
