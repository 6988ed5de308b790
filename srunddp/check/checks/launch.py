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
# The program that prints the version of the MPI library of mpi4py, without calling MPI_Init.
_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI;"
    " print(MPI.Get_library_version())"
)
_LIBRARY_WITHIN = 20.0  # seconds to load MPI's library, perhaps from a slow file system


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """How one rank was started, and what its script imports.

    Attributes:
        launcher: What started the rank, as in
            :class:`srunddp.bootstrap.environment.types.Environment`.
        channel: The name of the channel over which the rank finds rank 0.
        world_size: The number of ranks according to the launcher; 1 without a launcher.
        allocated: The number of tasks of the Slurm job if this process was started in it without
            srun or mpirun; else 0.
        script: Why the script cannot be parsed; empty if it can, or if there is none.
        uses_mpi: Whether the script imports mpi4py.
        mpi: Why MPI cannot be used here; empty if it can. This is tried only by local rank 0, and
            only if the script imports mpi4py; otherwise it is empty too.
        oom_kill_step: Whether Slurm kills srunddp along with a script that runs out of memory.
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
    """Return how many tasks srun would start in the Slurm job of this process; 0 outside a job."""
    # sbatch sets SLURM_NTASKS only if a number of tasks was asked for. Without a number, srun
    # starts one task on each node.
    counts = (variables.get(name, "") for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"))
    tasks = max([int(count) for count in counts if count.isdecimal()], default=1)
    return tasks if slurm.in_allocation(variables) else 0


def parsed(script: str | None) -> tuple[ast.Module | None, str]:
    """Parse the script.

    Returns:
        The syntax tree, or None if the script has none; and why the script cannot be parsed, empty
        if it can. For a script that cannot be read, the tree is None and the reason is empty,
        because the check of paths reports such a script.
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
    """Return the names of the packages that a script imports, in functions too. Relative imports,
    and imports in ``try`` blocks or under ``if TYPE_CHECKING``, do not count.
    """
    names: set[str] = set()
    # Skip `try` blocks: if a script imports a package there, it can most likely do without it.
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
    """Return why MPI would not know the ranks of this run if the script imported mpi4py; empty if
    it would. mpi4py is imported in a separate process, because MPI may end the process.
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
    """Report what is wrong with the launch.

    Failures are a single process in a Slurm job of several tasks, a script that cannot be parsed,
    and a script that needs MPI where MPI does not know the ranks. Warnings are MPI in ranks that
    find each other over PMI, and Slurm's OOMKillStep.
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
    """Write how many ranks have connected, with their launcher and channel."""
    facts = seen[0].facts
    if facts.launcher == NO_LAUNCHER:
        return "a single process, as no launcher was found"
    return f"{len(seen)} of {facts.world_size} ranks by {facts.launcher}, channel {facts.channel}"


CHECK = Check(NAME, LaunchFacts, collect, evaluate, summary, within=_LIBRARY_WITHIN + 15.0)
