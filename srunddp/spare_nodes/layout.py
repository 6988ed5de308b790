"""Which tasks of a step are ranks, and which wait on spare nodes."""

from dataclasses import replace
from itertools import accumulate

from srunddp.bootstrap.environment.types import Environment
from srunddp.errors import ConfigError, Scope

_OPTION = "--spare-nodes"


def set_spare_nodes(environment: Environment, count: int) -> Environment:
    """Return an environment whose world leaves out the tasks of the last ``count`` nodes.

    Args:
        environment: What the launcher's variables say: every task of the step is a rank.
        count: How many nodes are spare, at least 1.

    Raises:
        ConfigError: The processes are not a Slurm step, the tasks are not numbered in the order of
            the nodes, fewer than 2 ranks would be left, or a spare node has fewer tasks than
            another node.
    """
    step = environment.step
    if not step:
        raise ConfigError(
            f"{_OPTION} under {environment.launcher}",
            expected="a step of Slurm",
            hint="start with srun --no-kill --kill-on-bad-exit=0 --wait=0",
            scope=Scope.JOB,
        )
    sizes = step.tasks_per_node
    if [*step.layout().values()] != [
        node for node, size in zip(step.nodes, sizes, strict=False) for _ in range(size)
    ]:
        raise ConfigError(
            f"{_OPTION} with the distribution {step.distribution}",
            expected="tasks in the order of the nodes",
            hint="add srun --distribution=block",
            scope=Scope.JOB,
        )
    if count >= len(sizes) or sum(sizes[:-count]) < 2:
        raise ConfigError(
            f"{_OPTION}={count} of {len(sizes)} nodes",
            expected="2 ranks or more on the others",
            hint="ask for more nodes with -N",
            scope=Scope.JOB,
        )
    if min(sizes[-count:]) < max(sizes):
        found = f"{min(sizes[-count:])} tasks on a spare node, and {max(sizes)} on another"
        hint = "--ntasks-per-node"
        raise ConfigError(
            found, expected="no fewer on a spare node", hint=f"give srun {hint}", scope=Scope.JOB
        )
    ranks = sizes[:-count]
    return replace(environment, world_size=sum(ranks), spares=sum(sizes[-count:]), node_sizes=ranks)


def ranks_of_nodes(sizes: tuple[int, ...]) -> list[range]:
    """Return the ranks of each node; the ranks of one node move to a spare node together.

    Args:
        sizes: How many ranks each node has, in the order of the nodes.
    """
    return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
