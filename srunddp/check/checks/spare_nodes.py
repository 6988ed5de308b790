"""With spare nodes: whether Slurm lets a job go on that has lost one, as far as rank 0 can read
what it was told.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from srunddp.check.finding import FAIL, WARN, Check, CheckContext, Finding, Ranks, split_message
from srunddp.errors import ConfigError
from srunddp.spare_nodes.layout import set_spare_nodes
from srunddp.util.slurm_command import output

# Options, and how they may be written.
_SRUN = {
    "--no-kill": "-k|--no-kill",
    "--kill-on-bad-exit=0": r"-K0|--kill-\S+=0",
    "--wait=0": "(-W|--wait)[ =]?0",
}
_NEEDED = [("srun", option) for option in _SRUN] + [("sbatch", "--no-kill")]


@dataclass(frozen=True, kw_only=True)
class SpareNodeFacts:
    """Of rank 0: why ``srunddp run`` would refuse them; options that srun and the batch script
    lack, where seen.
    """

    refused: str = ""
    lacking: list[str] = field(default_factory=list)


def collect(context: CheckContext) -> SpareNodeFacts:
    """Rank 0's; srun is seen where it runs on the same node, as in a batch script."""
    environment = context.environment
    step = context.environment.step
    try:
        set_spare_nodes(environment, context.spare_nodes)
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
    return SpareNodeFacts(lacking=[f"{name} {option}" for name, option in missing if given[name]])


def evaluate(seen: Ranks[SpareNodeFacts]) -> Iterator[Finding]:
    """What would keep a spare node from taking over."""
    for one in seen:
        if one.facts.refused:
            yield one.finding(FAIL, *split_message(one.facts.refused))
        if found := ", ".join(one.facts.lacking):
            hint = (
                "add it; for sbatch as #SBATCH, unless its own command line, which is not seen,"
                " had it"
            )
            yield one.finding(WARN, f"without {found}", "a job that outlives a lost node", hint)


def summary(_: Ranks[SpareNodeFacts]) -> str:
    """What is needed, also where it cannot be seen."""
    return (
        f"needed: srun {' '.join(_SRUN)}, and sbatch or salloc --no-kill; seen in batch jobs alone"
    )


CHECK = Check("spare-nodes", SpareNodeFacts, collect, evaluate, summary)
