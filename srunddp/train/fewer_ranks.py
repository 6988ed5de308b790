"""Training with ``--min-nodes``: after the loss of a node there are fewer ranks, and a step should
have as many samples as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from srunddp.bootstrap.environment.world_sizes import accumulation_for, world_sizes
from srunddp.bootstrap.process_group.store import current_context
from srunddp.errors import ConfigError, Scope, one_of
from srunddp.train.config import Config


@dataclass(frozen=True)
class WorldSizes:
    """The numbers of ranks that a run may have.

    Attributes:
        first: The number of ranks in the first start.
        now: The number of ranks in this start.
        later: The numbers of ranks that this start or a later one may have, the greatest first.
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


def with_batch_kept(config: Config, sizes: WorldSizes | None) -> Config:
    """Return settings with which a step has as many samples on fewer ranks as in the first start.

    If some numbers of ranks cannot keep that number of samples, this is an error, unless the user
    has set ``scale_lr``: a step then has fewer samples, and the learning rate follows.

    Args:
        config: The user's settings.
        sizes: The numbers of ranks that the run may have; None if the number does not change.

    Raises:
        ConfigError: A step cannot keep its number of samples with some of these numbers of ranks,
            and ``scale_lr`` is not set.
    """
    if sizes is None:
        return config
    micro_batches = sizes.first * config.gradient_accumulation_steps
    changing = _changing(config, sizes)
    if changing and config.scale_lr == "no":
        multiple = accumulation_for(sizes.first, sizes.later)
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
    """Yield a line for the user about each part of a training that cannot go on with fewer ranks.

    Args:
        config: The user's settings.
        sizes: The numbers of ranks that the run may have; None if the number does not change.
        sharded: Whether the training data splits itself by rank and worker.
        steps_scheduler: Whether a user's scheduler depends on the steps of an epoch.
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
    """Return the numbers of ranks with which a step cannot keep its number of samples."""
    micro_batches = sizes.first * config.gradient_accumulation_steps
    return [size for size in sizes.later if micro_batches % size]
