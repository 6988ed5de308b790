"""Notes on what was requested of Slurm, and not used."""

from __future__ import annotations

from srunddp.observe.report import units
from srunddp.observe.report.note import Note
from srunddp.observe.report.summary import Summary

TIME_USED = 0.40  # of the limit, as jobstats has it
TIME_SAVED = 1800.0  # seconds
MEMORY_USED = 0.50  # of the limit
MEMORY_UNUSED = 4 * 2.0**30  # bytes


def time_limit(summary: Summary) -> list[Note]:
    """More time than the whole run took."""
    limit, used = summary.time_limit_s, max(summary.seconds, summary.job_s or 0.0)
    # The rest of a run that went on from a checkpoint is no measure for the whole, nor one step of a job of several.
    part_of_it = bool(summary.restarts) or summary.resumed is not None
    part_of_it |= summary.job_s is None and summary.step not in ("", "0")
    if not limit or not summary.ending.finished or part_of_it or limit - used < TIME_SAVED or used >= TIME_USED * limit:
        return []
    minutes = max(10, -(-int(used * 1.5) // 600) * 10)
    return [
        Note(
            "time limit",
            f"{units.duration(used)} of {units.duration(limit)} used, {units.percent(used / limit)}",
            f"below {units.percent(TIME_USED)}",
            f"--time={minutes // 60}:{minutes % 60:02}:00: jobs with a shorter limit start earlier",
        )
    ]


def memory(summary: Summary) -> list[Note]:
    """More memory on a node than was used on any."""
    known = [each for each in summary.per_node if each.memory_bytes and each.memory_limit_bytes]
    # What was killed for its memory may have needed all of it, between two samples.
    if not known or not summary.steps or not summary.ending.finished:
        return []
    worst = max(known, key=lambda each: each.memory_bytes or 0.0)
    peak, limit = worst.memory_bytes or 0.0, worst.memory_limit_bytes or 0.0
    if peak >= MEMORY_USED * limit or limit - peak < MEMORY_UNUSED:
        return []
    enough = max(1, -(-int(peak * 1.25) // 2**30))
    return [
        Note(
            "memory unused",
            f"{units.size(peak)} of {units.size(limit)} used at most, on {units.nodes([worst.node])}, "
            f"{units.percent(peak / limit)}",
            f"below {units.percent(MEMORY_USED)}",
            f"--mem={enough}G",
        )
    ]
