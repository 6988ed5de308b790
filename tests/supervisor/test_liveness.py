"""Who is still there, as rank 0 knows it: silence, pings, and which node is lost."""

from __future__ import annotations

from typing import Any

import pytest

from srunddp.supervisor.liveness import Liveness
from srunddp.supervisor.messages import Pong
from tests.support.connections import FakeConnection, context_of, fold


class Ranks(Liveness):
    """With connections, that a test ends; all have been heard of at 1 s."""

    def __init__(self, size: int = 3, **changes: Any) -> None:
        self.ends: dict[int, Any] = {rank: FakeConnection() for rank in range(1, size)}
        super().__init__(context_of(0, **{"size": size} | changes), self.ends)
        for rank in self.ends:
            self.note(rank, 1.0)

    def lose(self, rank: int) -> None:
        self.ends[rank].open = False
        self.ends[rank].lost = True


@pytest.mark.parametrize(("silent_for", "node"), [(29.0, "node02"), (31.0, "node01")])
def test_where_all_others_are_silent_rank_0_s_own_node_is_lost(
    silent_for: float, node: str
) -> None:
    """Their connections end one after the other: half of the time tells."""
    ranks = Ranks()
    ranks.note(2, 100.0 - silent_for)
    ranks.lose(1)
    assert ranks.lost_node(1, 100.0, is_cut_off=False) == node


@pytest.mark.parametrize("per_node", [1, 2])
def test_of_two_nodes_the_other_is_lost_unless_the_own_link_is_down(per_node: int) -> None:
    size = 2 * per_node
    for link_is_up in (True, False):
        ranks = Ranks(**fold(size, per_node), link_is_up=lambda up=link_is_up: up)
        ranks.lose(size - 1)
        node = ranks.lost_node(size - 1, 100.0, is_cut_off=False)
        assert node == ("node02" if link_is_up else "node01")


def test_without_an_answer_of_most_tasks_the_own_node_is_lost() -> None:
    ranks = Ranks()
    ranks.note(2, 100.0)
    ranks.lose(1)
    assert ranks.lost_node(1, 100.0, is_cut_off=True) == "node01"


def test_a_silent_supervisor_has_a_kernel_that_answers() -> None:
    """What has ended is no silence, and neither is a rank of which nothing was expected yet."""
    ranks = Ranks(size=5, lost_after=9.0)
    ranks.lose(1)
    ranks.note(2, 30.0)
    assert ranks.silent_supervisors(40.0) == set()
    assert ranks.silent_supervisors(40.1) == {3, 4}
    late = Liveness(context_of(0, 2, lost_after=9.0), {1: FakeConnection()})
    late.look(1000.0)
    assert late.silent_supervisors(1039.0) == set()
    assert late.silent_supervisors(1039.1) == {1}


def test_pings_go_to_the_ranks_that_are_there() -> None:
    ranks = Ranks()
    ranks.lose(1)
    ranks.ping([0, 1, 2])
    assert [each.messages for each in ranks.ends.values()] == [[], [Pong()]]


def test_the_first_look_is_an_interval_after_the_rendezvous() -> None:
    ranks = Ranks(lost_after=8.0)
    assert ranks.next_look == 2.0
    ranks.look(3.0)
    assert ranks.next_look == 5.0
