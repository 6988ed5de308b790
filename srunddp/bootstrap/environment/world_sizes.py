"""The numbers of ranks that a run with ``--min-nodes`` may have."""

import math
from collections import Counter
from collections.abc import Collection, Sequence


def world_sizes(node_sizes: Sequence[int], min_nodes: int) -> tuple[int, ...]:
    """Return the numbers of ranks that the remaining nodes may have, the greatest first.

    Args:
        node_sizes: How many ranks each node has.
        min_nodes: How many nodes remain at least.
    """
    # Collect the numbers of ranks, not the combinations of nodes that have them: with nodes of many
    # sizes there are too many combinations to list, but many have the same number of ranks.
    left = {(0, 0)}  # pairs of a number of nodes and their number of ranks
    for size, most in Counter(node_sizes).items():
        left = {
            (nodes + count, ranks + count * size)
            for nodes, ranks in left
            for count in range(most + 1)
        }
    return tuple(sorted({ranks for nodes, ranks in left if nodes >= min_nodes}, reverse=True))


def accumulation_for(first: int, later: Collection[int]) -> int:
    """Return the smallest ``gradient_accumulation_steps`` with which a step can keep its number of
    samples on every number of ranks. Its multiples can do so too, and no other number.

    Args:
        first: The number of ranks in the first start.
        later: The numbers of ranks that the run may have.
    """
    return math.lcm(*(size // math.gcd(size, first) for size in later))
