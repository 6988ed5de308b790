"""What a run with ``--min-nodes`` means for training: after the loss of a node there are fewer
ranks, and a step should have as many samples as before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from srunddp.bootstrap.process_group.store import current_context
from srunddp.errors import ConfigError, Scope, one_of
from srunddp.train.config import Config


@dataclass(frozen=True)
class WorldSizes:
    """The numbers of ranks that a run may have.

    Attributes:
        first: In the first start.
        now: In this start.
        later: In this start or a later one, the greatest first.
    """

    first: int
    now: int
    later: tuple[int, ...]


def world_sizes_of_run() -> WorldSizes | None:
    """Return the numbers of ranks that this run may have; None without ``--min-nodes``."""
    place = current_context()
    if place is None or not place.environment.min_nodes:
        return None
    environment = place.environment
    return WorldSizes(
        environment.first_world_size,
        environment.world_size,
        world_sizes(environment.node_sizes, environment.min_nodes),
    )


def world_sizes(node_sizes: Sequence[int], min_nodes: int) -> tuple[int, ...]:
    """Return how many ranks the nodes that are left may have, the greatest number first.

    Args:
        node_sizes: How many ranks each node has.
        min_nodes: How many nodes are left at least.
    """
    # Most often all nodes are equal, and then there is one number for each number of nodes. Of
    # different sizes there are too many combinations to keep all, but many have the same sums.
    left = {(0, 0)}  # how many nodes, with how many ranks
    for size, most in Counter(node_sizes).items():
        left = {
            (nodes + count, ranks + count * size)
            for nodes, ranks in left
            for count in range(most + 1)
        }
    return tuple(sorted({ranks for nodes, ranks in left if nodes >= min_nodes}, reverse=True))


def with_batch_kept(config: Config, sizes: WorldSizes | None) -> Config:
    """Return the settings by which a step of fewer ranks has as many samples as in the first start.

    With ``scale_lr`` the user has said how the learning rate follows a step's samples. Then a step
    has at most so many where they cannot be kept.

    Args:
        config: The user's.
        sizes: Of the run; None if the ranks stay.

    Raises:
        ConfigError: A step cannot keep its samples on some of these numbers of ranks.
    """
    if sizes is None:
        return config
    micro_batches = sizes.first * config.gradient_accumulation_steps
    changing = _changing(config, sizes)
    if changing and config.scale_lr == "no":
        multiple = math.lcm(*(size // math.gcd(size, sizes.first) for size in sizes.later))
        raise ConfigError(
            f"--min-nodes, and a step of {micro_batches * config.batch_size} samples on"
            f" {sizes.first} ranks, which {one_of(map(str, changing))} ranks cannot make of"
            f" batch_size {config.batch_size}",
            expected="as many samples in a step after the loss of a node",
            hint=(
                f"set gradient_accumulation_steps to {multiple} or a multiple of it, or say by"
                " scale_lr how the learning rate follows a smaller step"
            ),
            scope=Scope.JOB,
        )
    return replace(config, gradient_accumulation_steps=max(1, micro_batches // sizes.now))


def what_cannot_follow(
    config: Config, sizes: WorldSizes | None, *, sharded: bool, steps_scheduler: bool
) -> Iterator[str]:
    """Yield a line for each part of a training that cannot go on with fewer ranks.

    Args:
        config: The user's.
        sizes: Of the run; None if the ranks stay.
        sharded: The training data splits itself by rank and worker.
        steps_scheduler: A scheduler of the user's goes by the steps of an epoch.
    """
    if sizes is None or len(sizes.later) < 2:
        return
    if sharded:
        yield (
            "--min-nodes has no effect within an epoch: a sharded stream that was read in part"
            " needs as many ranks, so a run that loses a node there ends"
        )
    if steps_scheduler and _changing(config, sizes):
        yield (
            "--min-nodes has no effect with this scheduler: it is made for the steps of an epoch,"
            " which differ with fewer ranks, so a run that loses a node ends;"
            " scheduler_interval=epoch lets it go on"
        )


def _changing(config: Config, sizes: WorldSizes) -> list[int]:
    """Return the numbers of ranks on which a step cannot keep its samples."""
    micro_batches = sizes.first * config.gradient_accumulation_steps
    return [size for size in sizes.later if micro_batches % size]
