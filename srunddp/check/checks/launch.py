"""Check who started the ranks, whether they form one world, and whether the script can use it."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from srunddp.bootstrap.environment import mpi, slurm
from srunddp.bootstrap.environment.rank_zero_discovery import discovery_named
from srunddp.bootstrap.environment.types import NO_LAUNCHER
from srunddp.check.finding import FAIL, WARN, Check, CheckContext, Finding, Ranks, run_python
from srunddp.util.cgroup import kills_whole_step

NAME = "launch"
_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI;"
    " print(MPI.Get_library_version())"
)
_LIBRARY_WITHIN = 20.0  # seconds to load MPI's library, perhaps from a slow file system


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """How one rank was started, and what its script imports.

    Attributes:
        launcher: See :class:`srunddp.bootstrap.environment.types.Environment`.
        channel: The name of its :class:`srunddp.bootstrap.environment.types.Discovery`.
        world_size: See :class:`srunddp.bootstrap.environment.types.Environment`.
        allocated: If a single process runs in a Slurm job without srun, the job's number of tasks;
            else 0.
        script: Why the script cannot be parsed; empty if it can, or if there is none.
        mpi: Why MPI cannot be used here. Only local rank 0 tries, and only if the script imports
            mpi4py; else empty.
        uses_mpi: Whether the script imports mpi4py.
        oom_kill_step: Whether srunddp is killed along with a script that runs out of memory.
    """

    launcher: str
    channel: str
    world_size: int
    allocated: int
    script: str
    uses_mpi: bool
    mpi: str
    oom_kill_step: bool = False


def collect(context: CheckContext) -> LaunchFacts:
    """Collect how this rank was started, and what its script imports."""
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
        oom_kill_step=kills_whole_step(context.variables),
    )


def _allocated(variables: Mapping[str, str]) -> int:
    """Return how many tasks the Slurm job around this process has; 0 outside a job."""
    # sbatch sets SLURM_NTASKS only if a number of tasks was asked for. Without a number, srun
    # starts one task on each node.
    counts = (variables.get(name, "") for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"))
    tasks = max([int(count) for count in counts if count.isdecimal()], default=1)
    return tasks if slurm.in_allocation(variables) else 0


def parsed(script: str | None) -> tuple[ast.Module | None, str]:
    """Parse the script.

    Returns:
        The tree, None if there is none; and why the script cannot be parsed, empty if it can. A
        script that cannot be read gives no reason here, because the check of paths reports it.
    """
    if script is None:
        return None, ""
    try:
        with open(script, "rb") as file:
            # Read bytes, so that ast heeds the encoding that the script declares.
            return ast.parse(file.read()), ""
    except (SyntaxError, ValueError) as error:
        # Older Pythons, such as 3.11.2, raise a ValueError for null bytes.
        return (
            None,
            f"{script}:{getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', error)}",
        )
    except (OSError, RecursionError):
        # Python may still run a script that is too deeply nested for ast.
        return None, ""


def imports(tree: ast.Module) -> set[str]:
    """Return the packages that a script imports anywhere, except in ``try`` blocks and for type
    checkers. Relative imports do not count.
    """
    names: set[str] = set()
    # Skip `try` blocks: a script that imports a package in one can most likely do without it.
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
        elif not isinstance(node, ast.Try) and not (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ):
            todo += ast.iter_child_nodes(node)
    return {name.partition(".")[0] for name in names}


def why_no_mpi(variables: Mapping[str, str]) -> str:
    """Return why ``from mpi4py import MPI`` would have no world here; empty if it would have one.
    Another process imports MPI, because MPI may end the process.
    """
    printed, why = run_python(_LIBRARY, within=_LIBRARY_WITHIN)
    if why:
        return f"mpi4py cannot be imported: {why}"
    try:
        mpi.require_world(printed.strip(), variables)
    except mpi.MpiNotLaunchedError as reason:
        return str(reason)
    return ""


def evaluate(seen: Ranks[LaunchFacts]) -> Iterator[Finding]:
    """Judge the launch. Failures are a single process where many were asked for, a script that does
    not parse, and MPI without a world.
    """
    for one in seen:
        facts = one.facts
        if facts.allocated > 1:
            found = (
                f"one process, in an allocation of Slurm for {facts.allocated} tasks: it was"
                " started without srun"
            )
            yield one.finding(FAIL, found, "a process for each task", "srun srunddp check …")
        if facts.script:
            yield one.finding(FAIL, facts.script, "a Python script", "correct it")
        if facts.mpi:
            hint = (
                "start with `srun --mpi=pmix` (or pmi2 for MPICH; see `srun --mpi=list`), or with"
                " that MPI's mpirun"
            )
            yield one.finding(
                FAIL,
                f"the script imports mpi4py, and {facts.mpi}",
                "a launcher that MPI knows",
                hint,
            )
        elif discovery_named(facts.channel).rules_out_mpi and facts.uses_mpi:
            found = (
                "the script imports mpi4py, and the ranks meet over PMI, after which MPI cannot"
                " start"
            )
            yield one.finding(WARN, found, "MPI, or PMI", "srunddp --channel mpi")
        if facts.oom_kill_step:
            found = (
                "OOMKillStep is on: if a script runs out of memory, srunddp is killed along with"
                " it, and --restarts does not help"
            )
            yield one.finding(WARN, found, "the script alone", "srun --oom-kill-step=0")


def summary(seen: Ranks[LaunchFacts]) -> str:
    """Write how many ranks came, with their launcher and channel."""
    facts = seen[0].facts
    if facts.launcher == NO_LAUNCHER:
        return "a single process, as no launcher was found"
    return f"{len(seen)} of {facts.world_size} ranks by {facts.launcher}, channel {facts.channel}"


CHECK = Check(NAME, LaunchFacts, collect, evaluate, summary, within=_LIBRARY_WITHIN + 15.0)
