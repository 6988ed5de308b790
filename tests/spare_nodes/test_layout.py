from __future__ import annotations

import pytest

from srunddp.bootstrap.environment.detect import detect
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.rendezvous.rank_setup import SpareNodeTerms
from srunddp.errors import ConfigError
from srunddp.spare_nodes.layout import in_next_start, ranks_of_nodes, set_spare_nodes
from tests.support.launchers import PID, open_mpi, step


def on_nodes(counts: str, rank: int = 0, **changes: str) -> Environment:
    """A task of a step on nodes of so many tasks each."""
    sizes = [int(count) for count in counts.split(",")]
    variables = {
        "SLURM_STEP_NODELIST": f"n[1-{len(sizes)}]",
        "SLURM_STEP_NUM_NODES": str(len(sizes)),
        "SLURM_STEP_NUM_TASKS": str(sum(sizes)),
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_GTIDS": "",
    }
    return detect(step(rank, **variables | changes), pid=PID)


@pytest.mark.parametrize(
    ("counts", "spare", "sizes", "spares"),
    [
        ("2,2,2", 1, (2, 2), 2),
        ("2,2,2", 2, (2,), 4),
        ("3,1,3,3", 2, (3, 1), 6),
        ("1,1,1", 1, (1, 1), 1),
    ],
)
def test_the_tasks_of_the_last_nodes_are_no_ranks(
    counts: str, spare: int, sizes: tuple[int, ...], spares: int
) -> None:
    for rank in range(sum(sizes) + spares):
        found = set_spare_nodes(on_nodes(counts, rank), spare)
        assert (found.rank, found.world_size, found.node_sizes, found.spares) == (
            rank,
            sum(sizes),
            sizes,
            spares,
        )
        assert (found.is_spare, found.one_node) == (rank >= sum(sizes), False)


@pytest.mark.parametrize(
    ("environment", "spare", "said"),
    [
        (detect(open_mpi(1)), 1, "--spare-nodes under .*; expected a step of Slurm"),
        (
            on_nodes("2,2", SLURM_DISTRIBUTION="cyclic"),
            1,
            "distribution cyclic; expected tasks in the order",
        ),
        (
            on_nodes("2,2", SLURM_DISTRIBUTION="arbitrary"),
            1,
            "distribution arbitrary; expected tasks in the order",
        ),
        (on_nodes("2,2"), 2, "--spare-nodes=2 of 2 nodes; expected 2 ranks or more on the others"),
        (on_nodes("2,2"), 3, "--spare-nodes=3 of 2 nodes; expected 2 ranks or more on the others"),
        (on_nodes("1,1"), 1, "--spare-nodes=1 of 2 nodes; expected 2 ranks or more on the others"),
        (on_nodes("2,3,2"), 1, "2 tasks on a spare node, and 3 on another; expected no fewer"),
        (on_nodes("2,2,1"), 2, "1 tasks on a spare node, and 2 on another; expected no fewer"),
    ],
)
def test_what_cannot_have_spare_nodes_is_said(
    environment: Environment, spare: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        set_spare_nodes(environment, spare)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_with_fewer_nodes_allowed_the_tasks_of_all_are_ranks(rank: int) -> None:
    """In a later start some numbers have no task any more."""
    first = set_spare_nodes(on_nodes("2,1,3", rank), 0, 2)
    assert (first.rank, first.world_size, first.spares, first.min_nodes) == (rank, 6, 0, 2)
    assert (first.node_sizes, first.is_spare, first.may_shrink) == ((2, 1, 3), False, True)
    assert not first.one_node
    terms = SpareNodeTerms(
        rank=1,
        ranks_per_node="2,3",
        layout=1,
        lost_after=15.0,
        within=20.0,
        expected=(),
        not_before=0.0,
        quorum=1,
    )
    again = in_next_start(first, terms)
    assert (again.rank, again.world_size, again.spares) == (1, 5, 1)
    assert (again.node_sizes, again.layout, again.may_shrink) == ((2, 3), 1, False)
    assert again.first_world_size == 6
    both = set_spare_nodes(on_nodes("2,2,2", rank), 1, 2)
    assert (both.world_size, both.spares, both.may_shrink) == (4, 2, False)


@pytest.mark.parametrize(
    ("environment", "spare", "fewest", "said"),
    [
        (detect(open_mpi(1)), 0, 2, "--min-nodes under .*; expected a step of Slurm"),
        (
            on_nodes("2,2", SLURM_DISTRIBUTION="cyclic"),
            0,
            1,
            "--min-nodes with the distribution cyclic",
        ),
        (on_nodes("2,2"), 0, 3, "--min-nodes=3 of 2 nodes with ranks; expected 2 at most"),
        (on_nodes("2,2,2"), 1, 3, "--min-nodes=3 of 2 nodes with ranks; expected 2 at most"),
        (on_nodes("1,1,1"), 0, 1, "--min-nodes=1, and a node with 1 rank; expected 2 ranks"),
        (on_nodes("2,1"), 0, 1, "--min-nodes=1, and a node with 1 rank; expected 2 ranks"),
        (on_nodes("1"), 0, 1, "--min-nodes=1 of 1 nodes; expected 2 ranks or more ->"),
    ],
)
def test_what_cannot_go_on_with_fewer_nodes_is_said(
    environment: Environment, spare: int, fewest: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        set_spare_nodes(environment, spare, fewest)


def test_the_ranks_of_a_node_go_together() -> None:
    assert ranks_of_nodes((3, 1, 2)) == [range(3), range(3, 4), range(4, 6)]
