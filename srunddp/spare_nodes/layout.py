"""Decides which tasks of a job step are ranks, and which wait on spare nodes."""

from dataclasses import replace
from itertools import accumulate

from srunddp.bootstrap.environment.slurm import task_counts
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.rendezvous.rank_setup import SpareNodeTerms
from srunddp.errors import ConfigError, Scope

_SPARE_NODES = "--spare-nodes"
_MIN_NODES = "--min-nodes"


def set_spare_nodes(environment: Environment, count: int, min_nodes: int = 0) -> Environment:
    """Return an environment whose world leaves out the tasks of the last ``count`` nodes, and in
    which ranks may move to other nodes at a restart.

    Args:
        environment: The environment from the launcher's variables, in which every task of the job
            step is a rank.
        count: How many nodes are spare; 0 only with ``min_nodes``.
        min_nodes: The smallest number of nodes with which the run goes on when no spare node is
            left; 0 if it needs as many nodes as at its start.

    Raises:
        ConfigError: The processes are not the tasks of a job step, the tasks are not numbered in
            the order of the nodes, fewer than 2 ranks would be left, fewer nodes than ``min_nodes``
            have ranks, or a spare node has fewer tasks than another node.
    """
    option = _SPARE_NODES if count else _MIN_NODES
    step = environment.step
    if not step:
        raise ConfigError(
            f"{option} under {environment.launcher}",
            expected="a step of Slurm",
            hint="start with srun --no-kill --kill-on-bad-exit=0 --wait=0",
            scope=Scope.JOB,
        )
    sizes = step.tasks_per_node
    if [*step.layout().values()] != [
        node for node, size in zip(step.nodes, sizes, strict=False) for _ in range(size)
    ]:
        raise ConfigError(
            f"{option} with the distribution {step.distribution}",
            expected="tasks in the order of the nodes",
            hint="add srun --distribution=block",
            scope=Scope.JOB,
        )
    places = max(0, len(sizes) - count)
    with_ranks = sizes[:places]
    if sum(with_ranks) < 2:
        raise ConfigError(
            f"{option}={count or min_nodes} of {len(sizes)} nodes",
            expected="2 ranks or more on the others" if count else "2 ranks or more",
            hint="ask for more nodes with -N",
            scope=Scope.JOB,
        )
    spare = sizes[places:]
    if spare and min(spare) < max(sizes):
        raise ConfigError(
            f"{min(spare)} tasks on a spare node, and {max(sizes)} on another",
            expected="no fewer on a spare node",
            hint="give srun --ntasks-per-node",
            scope=Scope.JOB,
        )
    if min_nodes:
        _check_min_nodes(min_nodes, with_ranks)
    return replace(
        environment,
        world_size=sum(with_ranks),
        first_world_size=sum(with_ranks),
        spares=sum(spare),
        node_sizes=with_ranks,
        min_nodes=min_nodes,
        task=environment.rank,
    )


def _check_min_nodes(min_nodes: int, sizes: tuple[int, ...]) -> None:
    """Check that a run can go on with any ``min_nodes`` of the nodes that have ranks.

    Args:
        min_nodes: The number of ``--min-nodes``.
        sizes: How many ranks each node has.

    Raises:
        ConfigError: There are fewer nodes, or so many nodes may have fewer than 2 ranks.
    """
    if min_nodes > len(sizes):
        raise ConfigError(
            f"{_MIN_NODES}={min_nodes} of {len(sizes)} nodes with ranks",
            expected=f"{len(sizes)} at most",
            hint="ask for more nodes with -N",
            scope=Scope.JOB,
        )
    fewest = sum(sorted(sizes)[:min_nodes])
    if fewest < 2:
        raise ConfigError(
            f"{_MIN_NODES}={min_nodes}, and a node with 1 rank",
            expected="2 ranks or more on so many nodes",
            hint=f"give {_MIN_NODES}=2, or srun --ntasks-per-node",
            scope=Scope.JOB,
        )


def in_next_start(environment: Environment, terms: SpareNodeTerms) -> Environment:
    """Return the environment of a task after a restart, which may have given the task a different
    number.

    Args:
        environment: The task's environment in the first start, from :func:`set_spare_nodes`.
        terms: The terms that the previous start has handed on.
    """
    sizes = environment.node_sizes
    if terms.ranks_per_node:
        sizes = tuple(task_counts(terms.ranks_per_node))
    tasks = environment.world_size + environment.spares
    return replace(
        environment,
        rank=terms.rank,
        world_size=sum(sizes),
        spares=tasks - sum(sizes),
        node_sizes=sizes,
        layout=terms.layout,
    )


def ranks_of_nodes(sizes: tuple[int, ...]) -> list[range]:
    """Return the ranks of each node, all of which move together if the node is replaced.

    Args:
        sizes: How many ranks each node has, in the order of the nodes.
    """
    return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
