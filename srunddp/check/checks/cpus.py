"""Check that each rank has as many CPUs as were asked for, and as many as it has threads."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from srunddp.bootstrap.environment.cpus import THREADS, Cpus, advice
from srunddp.check.finding import WARN, Check, CheckContext, Finding, Ranks, split_message
from srunddp.util.cgroup import cpu_quota


@dataclass(frozen=True, kw_only=True)
class CpuFacts:
    """The CPUs that one rank may use, and the threads that it will run.

    Attributes:
        mask: The numbers of the CPUs on which the rank may run.
        quota: How many CPUs the rank's control groups allow, perhaps a fraction; 0 for no limit.
        threads: How many threads an environment variable sets for torch; 0 if none does.
        variable: The environment variable that sets ``threads``; empty if none does.
        advice: A line for each sign that the launcher gave the rank fewer CPUs than it could.
    """

    mask: list[int]
    quota: float
    threads: int
    variable: str
    advice: list[str]

    @property
    def cpus(self) -> int:
        """How many CPUs the rank can keep busy; at least 1."""
        return max(1, min(len(self.mask), int(self.quota or len(self.mask))))


def collect(context: CheckContext) -> CpuFacts:
    """Collect which CPUs this rank has, and how many threads it will run."""
    # OpenMP takes a list with a number for each nested level; the first number counts.
    asked = ((name, context.variables.get(name, "").partition(",")[0].strip()) for name in THREADS)
    variable, threads = next(
        ((name, int(first)) for name, first in asked if first.isdecimal()), ("", 0)
    )
    return CpuFacts(
        mask=sorted(os.sched_getaffinity(0)),
        quota=cpu_quota() or 0.0,
        threads=threads,
        variable=variable,
        advice=advice(context.variables, Cpus.here()),
    )


def evaluate(seen: Ranks[CpuFacts]) -> Iterator[Finding]:
    """Warn of ranks with too few CPUs. They slow a training down, but do not stop it."""
    for one in seen:
        facts = one.facts
        for line in facts.advice:
            yield one.finding(WARN, *split_message(line), rank=True)
        if facts.threads > facts.cpus:
            found = f"{facts.variable}={facts.threads}"
            hint = f"unset {facts.variable}, or set it to {facts.cpus}"
            yield one.finding(
                WARN,
                f"{found} on {_cpus(facts.cpus)}",
                f"no more than {facts.cpus}",
                hint,
                rank=True,
            )
    for ranks in seen.grouped().values():
        yield from _together(ranks)
    hint = "give each task as many (--cpus-per-task, --exclusive): all wait for the slowest"
    yield from seen.differing(lambda one: _cpus(len(one.facts.mask)), WARN, "a rank has", hint)


def _cpus(count: int) -> str:
    return f"{count} CPU" if count == 1 else f"{count} CPUs"


def _together(ranks: Ranks[CpuFacts]) -> Iterator[Finding]:
    """Warn if the ranks of one node only together have more threads than CPUs."""
    # Count 0 threads for a rank without such a variable, because srunddp gives that rank no more
    # threads than its share of the CPUs.
    threads = sum(one.facts.threads for one in ranks)
    cpus = len(_all_cpus(ranks))
    if threads > cpus and all(one.facts.threads <= one.facts.cpus for one in ranks):
        variable = next(one.facts.variable for one in ranks if one.facts.threads)
        hint = (
            f"set {variable} to {max(1, cpus // len(ranks))}, or ask for more CPUs"
            " (--cpus-per-task)"
        )
        found = f"{len(ranks)} ranks with {threads} threads share {_cpus(cpus)}"
        yield ranks.finding(WARN, found, f"no more than {cpus}", hint)


def _all_cpus(ranks: Ranks[CpuFacts]) -> set[int]:
    return {cpu for one in ranks for cpu in one.facts.mask}


def summary(seen: Ranks[CpuFacts]) -> str:
    """Tell how many CPUs each rank has for itself, and how many loader workers fit beside it."""
    nodes = seen.grouped().values()
    # Ranks that mpirun has not bound share one mask, so each has only its share of these CPUs.
    shares = [
        min(len(_all_cpus(ranks)) // len(ranks), *(one.facts.cpus for one in ranks))
        for ranks in nodes
    ]
    least = max(1, min(shares))
    room = f"{least - 1} loader worker{'' if least == 2 else 's'}"
    return f"{_cpus(least)} for each rank at least: room for {room}"


CHECK = Check("cpus", CpuFacts, collect, evaluate, summary)
