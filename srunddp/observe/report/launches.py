"""The phases of each rank's start, from its marks."""

from __future__ import annotations

from srunddp.observe.report.run import Run
from srunddp.observe.report.summary import Launch, Phase

# What begins and ends a phase.
_PHASES = {
    "python": ("process", "meeting"),
    "meeting": ("meeting", "met"),
    "import": ("import", "imported"),
    "init": ("init", "initialised"),
    "first step": ("fit", "step"),
}
NAMES = ("srun", *_PHASES)


def launches(run: Run) -> tuple[Launch, ...]:
    """Of each rank that has a mark; ``srun`` is from the first process of the run to the rank's own."""
    times: dict[int, dict[str, float]] = {}
    for mark in run.marks:
        times.setdefault(mark.rank, {}).setdefault(mark.name, mark.time)
    return tuple(_launch(rank, times[rank]) for rank in sorted(times))


def _launch(rank: int, times: dict[str, float]) -> Launch:
    process = times.get("process", min(times.values()))
    phases = [Phase("srun", 0.0, process)] if process > 0 else []
    for name, (begin, end) in _PHASES.items():
        if begin in times and end in times and times[end] >= times[begin]:
            phases.append(Phase(name, times[begin], times[end]))
    return Launch(rank, process, tuple(phases), times.get("step"))
