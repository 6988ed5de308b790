"""Who a rank is: its launcher, its numbers and its node, and the variables that name them and did not decide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from srunddp.bootstrap.environment import mpi, slurm
from srunddp.bootstrap.environment.detect import EXPLICIT, Environment
from srunddp.explain.context import LATER, UNKNOWN, ExplainContext, Row

_EXPLICIT = "explicit variables"
_JOBS = "the job's, not the step's"


@dataclass(frozen=True)
class _Name:
    """A variable that names a value; why: it never decides, empty where it may."""

    variable: str
    owner: str
    why: str = ""


def _of_launchers(field: str) -> Iterator[_Name]:
    for launcher in mpi.LAUNCHERS:
        if variable := getattr(launcher, field):
            yield _Name(variable, launcher.name)


# In the order in which they decide.
_NAMES = {
    "rank": (*_of_launchers("rank"), _Name("PMIX_RANK", "PMIx"), _Name(slurm.RANK, "Slurm"), _Name("RANK", _EXPLICIT)),
    "local_rank": (
        *_of_launchers("local_rank"),
        _Name("PMI_LOCAL_RANK", "PMI"),
        _Name(slurm.LOCAL_RANK, "Slurm"),
        _Name("LOCAL_RANK", _EXPLICIT),
    ),
    "world_size": (
        *_of_launchers("world_size"),
        _Name(slurm.WORLD_SIZE, "Slurm"),
        _Name("SLURM_NTASKS", "Slurm", _JOBS),
        _Name("SLURM_NPROCS", "Slurm", _JOBS),
        _Name("WORLD_SIZE", _EXPLICIT),
    ),
    "local_world_size": (
        *_of_launchers("local_world_size"),
        _Name("PMI_LOCAL_SIZE", "PMI"),
        _Name(slurm.RANKS_HERE, "Slurm"),
        _Name(slurm.TASKS_PER_NODE, "Slurm", "of all nodes, and does not say which this is"),
        _Name("SLURM_TASKS_PER_NODE", "Slurm", _JOBS),
        _Name("SLURM_NTASKS_PER_NODE", "Slurm", "what was asked of the job; a step may differ"),
        _Name("LOCAL_WORLD_SIZE", _EXPLICIT),
    ),
}


def rows(case: ExplainContext) -> list[Row]:
    """Launcher, rank, local rank, world sizes and node."""
    return [_launcher(case), *(_number(case, field) for field in _NAMES), _node(case)]


def _launcher(case: ExplainContext) -> Row:
    if case.environment is None:
        return Row("launcher", UNKNOWN, "refused, see the error", tuple(_other_launchers(case, "")))
    found = case.environment.launcher
    return Row("launcher", found, _why_launcher(case, case.environment), tuple(_other_launchers(case, found)))


def _why_launcher(case: ExplainContext, environment: Environment) -> str:
    if environment.step:
        return f"{case.shown(slurm.STEP_ID)}, a step"
    if environment.master:
        return "--channel env" if case.asked.channel == "env" else f"{', '.join(EXPLICIT)} are set"
    if environment.launcher == "none":
        return "no launcher was found"
    names = [environment.sources[field].partition("=")[0] for field in ("rank", "local_rank", "world_size")]
    marker = case.there("I_MPI_HYDRA_UUID") if environment.launcher == "Intel MPI" else []
    return ", ".join([*names, *marker]) + " are set"


def _other_launchers(case: ExplainContext, found: str) -> Iterator[str]:
    first = f"{found} comes first" if found else "see the error"
    for launcher in mpi.LAUNCHERS:
        missing = _missing(case, launcher)
        if launcher.rank in case.variables and missing:
            yield f"{launcher.name}: {case.shown(launcher.rank)}, but {' and '.join(missing)} not set"
        elif not missing and not _decided_by(case, launcher.rank):
            yield f"{launcher.name}: {case.shown(launcher.rank)}: {_by_channel_env(case) or first}"
    if found != "Slurm" and slurm.in_allocation(case.variables):
        yield _slurm(case, first)
    if found != _EXPLICIT and (there := case.there(*EXPLICIT[:3])):
        yield f"{_EXPLICIT}: {', '.join(there)}: {first}" + (", unless by --channel env" if found else "")


def _slurm(case: ExplainContext, first: str) -> str:
    if not slurm.in_step(case.variables):
        shown = ", ".join(case.there("SLURM_JOB_ID", slurm.STEP_ID))
        return f"Slurm: {shown}: an allocation or its shell, not a step"
    if case.environment and case.environment.launcher == "none":
        return f"Slurm: {case.shown(slurm.STEP_ID)}: typed into a shell of srun --pty"
    return f"Slurm: {case.shown(slurm.STEP_ID)}: {_by_channel_env(case) or first}"


def _by_channel_env(case: ExplainContext) -> str:
    return "--channel env lets explicit variables rule" if case.asked.channel == "env" else ""


def _missing(case: ExplainContext, launcher: mpi.LauncherVariables) -> list[str]:
    names = (launcher.rank, launcher.local_rank, launcher.world_size)
    return [name for name in names if name not in case.variables]


def _decided_by(case: ExplainContext, variable: str) -> bool:
    sources = case.environment.sources.values() if case.environment else ()
    return any(source.partition("=")[0] == variable for source in sources)


def _number(case: ExplainContext, field: str) -> Row:
    value = getattr(case.environment, field, None)
    passed_over = []
    names = {name.variable: name for name in _NAMES[field] if name.variable in case.variables}
    for name in names.values():
        if not _decided_by(case, name.variable):
            passed_over.append(f"{case.shown(name.variable)}: {_why_not(case, name, value)}")
    if case.environment is None:
        return Row(field, UNKNOWN, "see the error", tuple(passed_over))
    if value is None:
        return Row(field, UNKNOWN, LATER, tuple(passed_over))
    return Row(field, str(value), case.environment.sources[field], tuple(passed_over))


def _why_not(case: ExplainContext, name: _Name, value: int | None) -> str:
    if name.why:
        return name.why
    if case.environment is None:
        return f"of {name.owner}"
    if name.owner == "Slurm" and case.environment.launcher == "none":
        return "of a job's shell, not of a step"
    if value is not None and _counted(case, name.variable) == str(value):
        return "agrees"
    return _why_other(case, name, case.environment.launcher)


def _counted(case: ExplainContext, variable: str) -> str:
    text = case.variables[variable]
    return str(text.count(",") + 1) if variable == slurm.RANKS_HERE else text


def _why_other(case: ExplainContext, name: _Name, launcher: str) -> str:
    if by_channel := _by_channel_env(case):
        return by_channel
    if name.owner == _EXPLICIT:
        # The explicit rank must agree; nothing asks what the user says of the ranks on this node.
        return "ignored" if name.variable == "LOCAL_WORLD_SIZE" else f"contradicts {launcher}'s"
    if name.owner == "Slurm":
        return f"of the process within which {launcher} started this rank"
    if name.owner in ("PMIx", "PMI"):
        return "not all that a rank needs"
    launchers = [one for one in mpi.LAUNCHERS if one.name == name.owner]
    missing = [absent for one in launchers for absent in _missing(case, one)]
    return f"{' and '.join(missing)} not set" if missing else f"{name.owner} comes after {launcher}"


def _node(case: ExplainContext) -> Row:
    node = case.environment.node if case.environment else case.variables.get(slurm.NODE_NAME, "")
    named = slurm.NODE_NAME in case.variables
    others = {name: case.variables[name] for name in ("PMI_HOSTNAME", "PMIX_HOSTNAME") if name in case.variables}
    passed_over = [f"{name}={value}: {_same(value, node)}" for name, value in others.items()]
    if case.here and named:
        passed_over.append(f"hostname {case.here.hostname}: {_same(case.here.hostname, node, 'Slurm')}")
    if named:
        return Row("node", node, slurm.NODE_NAME, tuple(passed_over))
    if case.here:
        return Row("node", case.here.hostname, "hostname", tuple(passed_over))
    return Row("node", UNKNOWN, f"no {slurm.NODE_NAME}; then it is that node's hostname", tuple(passed_over))


def _same(value: str, node: str, winner: str = "") -> str:
    if value == node:
        return "agrees"
    return f"{winner}'s name comes first" if winner else "not read"
