"""Who acts for rank 0, by who can be reached."""

from __future__ import annotations

import pytest

from tests.support.connections import IMPATIENT, deputies, listening, silent


@pytest.mark.parametrize(
    ("rank", "closed", "lost", "first"),
    [
        (9, (), False, 1),
        (9, (), True, 2),  # the first one is on rank 0's node
        (9, (1,), False, 2),
        (9, (2,), True, 3),
        (1, (2,), False, 1),  # whoever asks is there
        (1, (1, 2), False, 3),  # unless its worker has ended, so that it listens no more
        (1, (2, 3), True, None),
        (9, (1, 2, 3), False, None),
    ],
)
def test_the_first_that_can_be_reached_acts(
    rank: int, closed: tuple[int, ...], lost: bool, first: int | None
) -> None:
    with listening("127.0.0.1", "127.0.0.2", "127.0.0.3") as sockets:
        found = deputies(*sockets, rank=rank)
        for number in closed:
            sockets[number - 1].close()
        assert found.first(lost=lost) == first
        assert found.here == (rank == 1 and 1 not in closed)


@pytest.mark.parametrize("here", [2, 9])
def test_the_network_is_up_where_a_third_node_answers(here: int) -> None:
    """Rank 0's node shows nothing, and this one itself nothing either."""
    with listening("127.0.0.1", "127.0.0.2", "127.0.0.3") as sockets, silent("127.0.0.4") as mute:
        for others, up in (
            ([], True),
            ([sockets[2]], True),
            ([mute], False),
            ([mute, sockets[2]], True),
        ):
            own = sockets[:2] if here == 2 else sockets[:1]
            assert deputies(*own, *others, rank=here, limits=IMPATIENT).network_is_up() == up
