"""Who started the ranks: whether they are one world, and whether the script can use it."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from srunddp.bootstrap.environment import mpi, slurm
from srunddp.bootstrap.environment.detect import NO_LAUNCHER
from srunddp.bootstrap.environment.rank_zero_discovery import discovery_named
from srunddp.check.finding import FAIL, WARN, Check, CheckContext, Finding, Ranks
from srunddp.check.packages import imports, parsed

NAME = "launch"
_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_LIBRARY_WITHIN = 20.0


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """Of one rank.

    Attributes:
        launcher, channel: see :class:`srunddp.bootstrap.environment.detect.Environment`; world_size: its.
        allocated: tasks of the Slurm job around a process that srun did not start; 0 without one.
        script: what is wrong with the script's text; mpi: why it cannot use MPI here; empty if nothing is.
        uses_mpi: whether it imports mpi4py.
    """

    launcher: str
    channel: str
    world_size: int
    allocated: int
    script: str
    uses_mpi: bool
    mpi: str


def collect(context: CheckContext) -> LaunchFacts:
    """This rank's."""
    environment = context.environment
    tree, script = parsed(context.script)
    uses_mpi = tree is not None and "mpi4py" in imports(tree)
    return LaunchFacts(
        launcher=environment.launcher,
        channel=environment.discovery.name,
        world_size=environment.world_size,
        allocated=_allocated(context.variables) if environment.is_single else 0,
        script=script,
        uses_mpi=uses_mpi,
        mpi=why_no_mpi(context.variables) if uses_mpi and environment.local_rank == 0 else "",
    )


def _allocated(variables: Mapping[str, str]) -> int:
    """How many tasks the Slurm job has that this process is in, 0 where it is in none."""
    if not slurm.in_allocation(variables):
        return 0
    counts = (variables.get(name, "") for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"))
    return max([int(count) for count in counts if count.isdecimal()], default=1)


def why_no_mpi(variables: Mapping[str, str]) -> str:
    """Why ``from mpi4py import MPI`` has no world here. Asked of a process of its own: MPI may end it."""
    words = [sys.executable, "-c", _LIBRARY]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LIBRARY_WITHIN, check=False)
    except subprocess.TimeoutExpired:
        return f"mpi4py is not imported within {_LIBRARY_WITHIN:.0f} s"
    if done.returncode:
        return "mpi4py cannot be imported: " + (done.stderr.strip().splitlines() or ["it ends the process"])[-1]
    try:
        mpi.require_world(done.stdout.strip(), variables)
    except mpi.MpiNotLaunchedError as reason:
        return str(reason)
    return ""


def evaluate(seen: Ranks[LaunchFacts]) -> Iterator[Finding]:
    """One process where many were asked for, a script that does not parse, MPI without a world."""
    for one in seen:
        facts = one.facts
        if facts.allocated > 1:
            found = f"one process, in an allocation of Slurm for {facts.allocated} tasks: it was started without srun"
            yield one.finding(FAIL, found, "a process for each task", "srun srunddp check …")
        if facts.script:
            yield one.finding(FAIL, facts.script, "a Python script", "correct it")
        if facts.mpi:
            hint = "start with `srun --mpi=pmix` (or pmi2 for MPICH; see `srun --mpi=list`), or with that MPI's mpirun"
            yield one.finding(FAIL, f"the script imports mpi4py, and {facts.mpi}", "a launcher that MPI knows", hint)
        elif discovery_named(facts.channel).rules_out_mpi and facts.uses_mpi:
            found = "the script imports mpi4py, and the ranks meet over PMI, after which MPI cannot start"
            yield one.finding(WARN, found, "MPI, or PMI", "srunddp --channel mpi")


def summary(seen: Ranks[LaunchFacts]) -> str:
    """Launcher and channel."""
    facts = seen[0].facts
    if facts.launcher == NO_LAUNCHER:
        return "a single process, as no launcher was found"
    return f"{len(seen)} of {facts.world_size} ranks by {facts.launcher}, channel {facts.channel}"


CHECK = Check(NAME, LaunchFacts, collect, evaluate, summary, within=_LIBRARY_WITHIN + 15.0)
