"""The numbers of ranks that a run with ``--min-nodes`` may have."""

import math
from collections.abc import Collection, Sequence


def world_sizes(node_sizes: Sequence[int], min_nodes: int) -> tuple[int, ...]:
    """Return the numbers of ranks that the remaining nodes may have, the greatest first.

    Args:
        node_sizes: How many ranks each node has.
        min_nodes: How many nodes remain at least.
    """
    # Bit r of possible[n] says whether n nodes may have r ranks in all. With nodes of many sizes
    # there are too many combinations of nodes to list, but few numbers of ranks.
    possible = [1, *(0 for _ in node_sizes)]
    for size in node_sizes:
        # From the most nodes to the fewest, so that no node is counted twice.
        for nodes in range(len(node_sizes), 0, -1):
            possible[nodes] |= possible[nodes - 1] << size
    found = 0
    for each in possible[min_nodes:]:
        found |= each
    return tuple(ranks for ranks in range(sum(node_sizes), -1, -1) if found >> ranks & 1)


def accumulation_for(first: int, later: Collection[int]) -> int:
    """Return the smallest ``gradient_accumulation_steps`` with which a step can keep its number of
    samples on every number of ranks. Its multiples can do so too, and no other number.

    Args:
        first: The number of ranks in the first start.
        later: The numbers of ranks that the run may have.
    """
    return math.lcm(*(size // math.gcd(size, first) for size in later))
