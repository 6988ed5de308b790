"""The course of a run, from its marks: each rank's start, epochs, evaluations, checkpoints and the end."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from srunddp.report.run import Run
from srunddp.report.summary import Checkpoints, Ending, Launch, Phase, Span
from srunddp.util.hostlist import grouped

_SILENT = 5  # intervals without a line after which a run that has no end is not running
_DEFAULT_INTERVAL = 5.0
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


def ending(run: Run, now: float) -> Ending:
    """How the run ended, as far as that was recorded.

    Args:
        now: Unix time.
    """
    ends = run.marked("end")
    codes = {rank: 0 if math.isnan(mark.value) else int(mark.value) for rank, mark in sorted(ends.items())}
    interval = run.number("seconds") or _DEFAULT_INTERVAL
    fresh = -60.0 < now - run.start - run.last < _SILENT * interval + 1.0
    missing = tuple(rank for rank in run.ranks if rank not in codes)
    return Ending(codes, missing, bool(missing) and fresh, run.last, _cause(run))


def _cause(run: Run) -> str:
    """What the run said of its failure; the file lies where the logs are."""
    try:
        found = json.loads((run.folder.parent / "failure.json").read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return ""
    cause = found.get("cause") if isinstance(found, dict) else None
    return f"rank {found.get('rank')} on {found.get('node')}: {cause}" if isinstance(cause, str) and cause else ""


def spans(run: Run, begin: str, end: str) -> tuple[Span, ...]:
    """Of the rank that has most of them: all ranks have the same, but the last lines may be missing."""
    by_rank: dict[int, list[Span]] = {}
    for mark in run.marks:
        begun = by_rank.setdefault(mark.rank, []) if mark.name in (begin, end) else []
        number = None if math.isnan(mark.value) else int(mark.value)
        if mark.name == begin:
            begun.append(Span(number, mark.time, None))
        elif mark.name == end and begun and begun[-1].end is None:
            begun[-1] = replace(begun[-1], end=mark.time)
    most = max(by_rank, key=lambda rank: (len(by_rank[rank]), -rank), default=None)
    return () if most is None else tuple(by_rank[most])


def checkpoints(run: Run) -> Checkpoints:
    """Of the rank that stood still for longest; what was written in the background, likewise."""
    stood, written = _values(run, "checkpoint"), _values(run, "checkpoint_written")
    longest, background = max(stood.values(), key=sum, default=[]), max(written.values(), key=sum, default=[])
    return Checkpoints(len(longest), sum(longest), sum(background), len(background))


def _values(run: Run, name: str) -> dict[int, list[float]]:
    return grouped((mark.rank, mark.value) for mark in run.marks if mark.name == name and mark.value >= 0)


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
