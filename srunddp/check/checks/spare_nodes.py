"""Checks for a run with ``--spare-nodes`` or ``--min-nodes`` whether it can continue after a node
is lost: whether Slurm lets the job continue, as far as rank 0 can read the options of srun and
sbatch, and whether enough tasks remain.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from srunddp.check.finding import FAIL, WARN, Check, CheckContext, Finding, Ranks, split_message
from srunddp.errors import ConfigError
from srunddp.spare_nodes.layout import set_spare_nodes
from srunddp.util.slurm_command import output

# Each of srun's options, with a pattern for the ways to write it.
_SRUN = {
    "--no-kill": "-k|--no-kill",
    "--kill-on-bad-exit=0": r"-K0|--kill-\S+=0",
    "--wait=0": "(-W|--wait)[ =]?0",
}
_NEEDED = [("srun", option) for option in _SRUN] + [("sbatch", "--no-kill")]


@dataclass(frozen=True, kw_only=True)
class SpareNodeFacts:
    """What one rank found that prevents or endangers a run with ``--spare-nodes`` or
    ``--min-nodes`` after the loss of a node.

    Attributes:
        refused: Why ``srunddp run`` would refuse ``--spare-nodes`` or ``--min-nodes``; empty if it
            would not.
        lacking: The needed options that srun or the batch script lacks. It is empty on all ranks
            but rank 0, and has no option of an srun or a batch script that rank 0 cannot read.
        decisive: The nodes that have half of the tasks or more. It is empty on all ranks but
            rank 0.
    """

    refused: str = ""
    lacking: list[str] = field(default_factory=list)
    decisive: list[str] = field(default_factory=list)


def collect(context: CheckContext) -> SpareNodeFacts:
    """Collect whether a run would accept the options, and on rank 0 the options of srun and sbatch,
    and the nodes without which no majority of the tasks is left.

    srun's options can be read only if it runs on rank 0's node, as it does from a batch script.
    """
    environment = context.environment
    step = context.environment.step
    try:
        set_spare_nodes(environment, context.spare_nodes, context.min_nodes)
    except ConfigError as error:
        return SpareNodeFacts(refused=str(error))
    if environment.rank or not step:
        return SpareNodeFacts()
    host = re.search(
        r"SrunHost:Pid=(.*):(\d+)", output("scontrol", "show", "step", f"{step.job}.{step.step}")
    )
    if host and host[1] == environment.node:
        srun = output("ps", "-ww", "-o", "args=", "-p", host[2])
    else:
        srun = ""
    lines = re.findall(
        "(?m)^#(?:!|SBATCH ).*", output("scontrol", "write", "batch_script", step.job, "-")
    )
    given = {"srun": srun if re.match(r"(\S*/)?srun ", srun) else "", "sbatch": " ".join(lines)}
    missing = (
        (name, each)
        for name, each in _NEEDED
        if not re.search(rf" ({_SRUN[each]})(?!\S)", given[name])
    )
    tasks = sum(step.tasks_per_node)
    return SpareNodeFacts(
        lacking=[f"{name} {option}" for name, option in missing if given[name]],
        decisive=[
            node
            for node, count in zip(step.nodes, step.tasks_per_node, strict=True)
            if 2 * count >= tasks
        ],
    )


def evaluate(seen: Ranks[SpareNodeFacts]) -> Iterator[Finding]:
    """Judge the options: one that a run refuses is a failure. A missing one is a warning, and so is
    a node whose loss the run cannot survive.
    """
    for one in seen:
        if one.facts.refused:
            yield one.finding(FAIL, *split_message(one.facts.refused))
        if found := ", ".join(one.facts.lacking):
            hint = (
                "add it; for sbatch as #SBATCH, unless sbatch's command line, which is not seen,"
                " had it"
            )
            yield one.finding(WARN, f"without {found}", "a job that outlives a lost node", hint)
        if one.facts.decisive:
            yield Finding(
                WARN,
                "half of the tasks or more are on one node: the run ends if it is lost",
                "more than half of them on the other nodes",
                "ask for more nodes with -N, with equal --ntasks-per-node",
                nodes=tuple(one.facts.decisive),
            )


def summary(_: Ranks[SpareNodeFacts]) -> str:
    """Write which options are needed, because the check cannot see all that were given."""
    needed = f"srun {' '.join(_SRUN)}, and sbatch or salloc --no-kill"
    return f"needed: {needed}; checked in batch jobs only"


CHECK = Check("spare-nodes", SpareNodeFacts, collect, evaluate, summary)
