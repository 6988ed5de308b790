"""The CPUs of each rank: fewer than were asked for, or fewer than its threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from srunddp.bootstrap.environment.cpus import THREADS, Cpus, advice
from srunddp.check.comparison import by_node, finding_about, minority, split_message
from srunddp.check.finding import Check, CheckContext, Finding, Observation, Severity
from srunddp.util.cgroup import cpu_quota

NAME = "cpus"


@dataclass(frozen=True)
class CpuFacts:
    """Of one rank.

    Attributes:
        mask: the CPUs that it may run on.
        quota: how many its cgroups leave it, 0 for any number.
        threads: that the environment asks of torch, 0 where it does not; variable: which says so.
        advice: lines on what its launcher held back.
    """

    mask: list[int]
    quota: float
    threads: int
    variable: str
    advice: list[str]

    @property
    def cpus(self) -> int:
        """How many it may keep busy, at least 1."""
        return max(1, min(len(self.mask), int(self.quota or len(self.mask))))


def collect(subject: CheckContext) -> CpuFacts:
    """This rank's."""
    variable, threads = _threads(subject.variables)
    return CpuFacts(
        mask=sorted(os.sched_getaffinity(0)),
        quota=cpu_quota() or 0.0,
        threads=threads,
        variable=variable,
        advice=advice(subject.variables, Cpus.here()),
    )


def _threads(variables: Mapping[str, str]) -> tuple[str, int]:
    for name in THREADS:
        first = variables.get(name, "").partition(",")[0].strip()  # OpenMP takes a number for each nested level
        if first.isdecimal():
            return name, int(first)
    return "", 0


def judge(seen: Sequence[Observation[CpuFacts]]) -> Iterator[Finding]:
    """All of it makes a training slow, and nothing stops it."""
    for one in seen:
        for line in one.facts.advice:
            yield finding_about([one], Severity.WARN, NAME, split_message(line))
        if one.facts.threads > one.facts.cpus:
            yield finding_about([one], Severity.WARN, NAME, _too_many(one.facts))
    for ranks in by_node(seen).values():
        yield from _crowded(ranks)
    usual, others = minority(seen, lambda one: len(one.facts.mask))
    for cpus, who in others.items():
        hint = "give each task as many (--cpus-per-task, --exclusive), as all wait for the slowest"
        yield finding_about(who, Severity.WARN, NAME, (f"{_cpus(cpus)} for a rank", f"{usual}, as on most ranks", hint))


def _too_many(facts: CpuFacts) -> tuple[str, str, str]:
    found = f"{facts.variable}={facts.threads} on {_cpus(facts.cpus)}"
    return found, f"no more than {facts.cpus}", f"unset {facts.variable}, or set it to {facts.cpus}"


def _cpus(count: int) -> str:
    return f"{count} CPU" if count == 1 else f"{count} CPUs"


def _crowded(ranks: list[Observation[CpuFacts]]) -> Iterator[Finding]:
    """Ranks of one node that have too many threads only together."""
    if any(one.facts.threads > one.facts.cpus for one in ranks):
        return
    for cpus, who in _sharing(ranks):
        threads = sum(one.facts.threads for one in who)
        if threads > len(cpus):
            found = f"{len(who)} ranks with {threads} threads share {_cpus(len(cpus))}"
            variable = next(one.facts.variable for one in who if one.facts.threads)
            hint = f"set {variable} to {len(cpus) // len(who)}"
            if len(cpus) < len(who):
                hint = f"ask for more CPUs (--cpus-per-task={threads // len(who)})"
            yield finding_about(who, Severity.WARN, NAME, (found, f"no more than {len(cpus)}", hint))


def _sharing(ranks: list[Observation[CpuFacts]]) -> list[tuple[set[int], list[Observation[CpuFacts]]]]:
    """The ranks whose masks overlap, and the CPUs that they share."""
    groups: list[tuple[set[int], list[Observation[CpuFacts]]]] = []
    for one in ranks:
        cpus, who, apart = set(one.facts.mask), [one], []
        for group in groups:
            if group[0] & cpus:
                cpus, who = cpus | group[0], group[1] + who
            else:
                apart.append(group)
        groups = [*apart, (cpus, who)]
    return groups


def summary(seen: Sequence[Observation[CpuFacts]]) -> str:
    """How many each rank has for itself, and so for loader workers beside it."""
    groups = [group for ranks in by_node(seen).values() for group in _sharing(ranks)]
    least = min(max(1, min(len(cpus) // len(who), *(one.facts.cpus for one in who))) for cpus, who in groups)
    room = f"{least - 1} loader worker{'' if least == 2 else 's'}"
    return f"{_cpus(least)} for each rank at least: room for {room}"


CHECK = Check(NAME, CpuFacts, collect, judge, summary)
