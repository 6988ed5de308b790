"""Finds out how small the world of a run with ``--min-nodes`` may become."""

from srunddp.bootstrap.environment.world_sizes import accumulation_for, world_sizes
from srunddp.check.finding import CheckContext
from srunddp.errors import ConfigError
from srunddp.spare_nodes.layout import set_spare_nodes
from srunddp.util.quick_dataclass import dataclass

NAME = "fewer-nodes"
# If a step needs more micro-batches than this, the number is not shown: nobody would set it.
_MOST_ACCUMULATION = 1000


@dataclass(frozen=True)
class FewerNodes:
    """The worlds of a run that may go on with fewer nodes.

    Attributes:
        node_sizes: How many ranks each node has in the first start. Spare nodes are left out.
        min_nodes: The number given with ``--min-nodes``.
    """

    node_sizes: tuple[int, ...]
    min_nodes: int

    @property
    def first_ranks(self) -> int:
        """The number of ranks on the first ``min_nodes`` nodes, over which the check makes an
        all-reduce. If nodes have different numbers of ranks, other nodes may make a smaller world.
        """
        return sum(self.node_sizes[: self.min_nodes])

    def summary(self) -> str:
        """Write in one line how small the world may become, and when a step of ``Trainer`` keeps
        its samples.
        """
        sizes = world_sizes(self.node_sizes, self.min_nodes)
        multiple = accumulation_for(sum(self.node_sizes), sizes)
        if multiple == 1:
            steps = "keeps its samples"
        elif multiple <= _MOST_ACCUMULATION:
            steps = f"keeps its samples if gradient_accumulation_steps is a multiple of {multiple}"
        else:
            steps = "cannot keep its samples with all numbers of ranks between, see scale_lr"
        return (
            f"down to {sizes[-1]} of {sizes[0]} ranks, on {self.min_nodes} of"
            f" {len(self.node_sizes)} nodes: a step of Trainer {steps}"
        )


def fewer_nodes(context: CheckContext) -> FewerNodes | None:
    """Return the worlds of the run that is checked; None if it always needs all its nodes, or if
    ``srunddp run`` would refuse its options.

    Args:
        context: What the checks know about rank 0.
    """
    if not context.min_nodes:
        return None
    try:
        environment = set_spare_nodes(context.environment, context.spare_nodes, context.min_nodes)
    except ConfigError:
        return None  # the check of spare nodes reports it
    if not environment.may_shrink:
        return None
    return FewerNodes(environment.node_sizes, environment.min_nodes)
