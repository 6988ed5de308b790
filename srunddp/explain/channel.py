"""The channel over which the ranks learn of rank 0, and why each of the others is not the one."""

from __future__ import annotations

from srunddp.bootstrap.environment import slurm
from srunddp.bootstrap.environment.detect import CHANNELS, EXPLICIT, Environment
from srunddp.bootstrap.rendezvous import discovery
from srunddp.explain.context import UNKNOWN, ExplainContext, Row


def rows(case: ExplainContext) -> list[Row]:
    """One row."""
    environment = case.environment
    if environment is None:
        return [Row("channel", UNKNOWN, "see the error")]
    taken = discovery.on_channel(environment)
    if case.alone:
        return [Row("channel", taken, discovery.reason(environment, case.variables))]
    others = [name for name in CHANNELS if name != taken]
    passed_over = tuple(f"{name}: {_why_not(case, environment, name)}" for name in others)
    if taken == "none":
        return [Row("channel", UNKNOWN, "see the error", passed_over)]
    asked = "--channel, " if case.asked.channel == taken else ""
    return [Row("channel", taken, asked + discovery.reason(environment, case.variables), passed_over)]


def _why_not(case: ExplainContext, environment: Environment, name: str) -> str:
    if name in case.offered:
        asked = case.asked.channel
        return f"--channel {asked} was asked for" if asked else f"comes after {discovery.on_channel(environment)}"
    if environment.master:
        return "explicit variables rule" if case.asked.channel == "env" else "no launcher was found"
    return {"pmi": _no_pmi, "mpi": _no_mpi, "slurm": _no_slurm, "env": _no_env}[name](case, environment)


def _no_pmi(case: ExplainContext, environment: Environment) -> str:
    needed = ("PMI_FD", "PMI_RANK", "PMI_SIZE") if environment.step else ("PMI_FD",)
    if missing := [name for name in needed if name not in case.variables]:
        return f"{missing[0]} is not set"
    return f"{environment.launcher} has no PMI-1; {case.shown('PMI_FD')} is of a process around it"


def _no_mpi(case: ExplainContext, environment: Environment) -> str:
    if environment.step and "PMIX_RANK" not in case.variables:
        return "PMIX_RANK is not set, as without srun --mpi=pmix"
    return "mpi4py is not installed" + ("" if case.here else " here")


def _no_slurm(case: ExplainContext, environment: Environment) -> str:
    if slurm.in_step(case.variables):
        return f"this step's tasks are not the ranks that {environment.launcher} started"
    return "not in a step of Slurm"


def _no_env(case: ExplainContext, environment: Environment) -> str:
    missing = [name for name in EXPLICIT if name not in case.variables]
    return "only by --channel env" + (f"; {', '.join(missing)} not set" if missing else "")
