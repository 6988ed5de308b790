"""The phases of each rank's start, from its marks."""

from __future__ import annotations

import math

from srunddp.observe.report.run import Run
from srunddp.observe.report.summary import Launch, Phase

# What begins and what ends a phase: of several marks the first that is there.
_PHASES = {
    "python": (("process",), ("meeting",)),
    "meeting": (("meeting",), ("met",)),
    "import": (("import",), ("imported",)),
    "init": (("init",), ("initialised",)),
    "script": (("initialised", "imported", "met"), ("fit", "step")),
    "prepare": (("fit",), ("epoch",)),
    "first step": (("epoch", "fit"), ("step",)),
}
NAMES = ("srun", *_PHASES)


def launches(run: Run) -> tuple[Launch, ...]:
    """Of each rank that has a mark.

    ``srun`` is from the first process of the run to the rank's own; ``script`` what the user's script does by itself,
    from the process group to the training; ``prepare`` what the training does before its first epoch.
    """
    times: dict[int, dict[str, float]] = {}
    for mark in run.marks:
        times.setdefault(mark.rank, {}).setdefault(mark.name, mark.time)
    return tuple(_launch(rank, times[rank]) for rank in sorted(times))


def _launch(rank: int, times: dict[str, float]) -> Launch:
    process = times.get("process", min(times.values()))
    phases = [Phase("srun", 0.0, process)] if process > 0 else []
    for name, (begins, ends) in _PHASES.items():
        begin, end = (next((times[mark] for mark in marks if mark in times), math.nan) for marks in (begins, ends))
        if begin <= end:
            phases.append(Phase(name, begin, end))
    return Launch(rank, process, tuple(phases), times.get("step"))
