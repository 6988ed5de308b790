"""Which tasks of a step are ranks, and which wait on spare nodes."""

from dataclasses import replace
from itertools import accumulate

from srunddp.bootstrap.environment.types import Environment
from srunddp.errors import ConfigError, Scope

_OPTION = "--spare-nodes"


def set_spare_nodes(environment: Environment, count: int) -> Environment:
    """Return the environment in which the last nodes of the step are spare, and their tasks no
    ranks.

    Args:
        environment: As the launcher has made it.
        count: How many nodes are spare, 1 at least.

    Raises:
        ConfigError: no step of Slurm, tasks that are not in the order of the nodes, or too few or
            too small nodes.
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
    """Return the ranks that are on one node together, and go to another together."""
    return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
