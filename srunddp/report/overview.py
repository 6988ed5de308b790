"""Shows a run at a glance: up to five figures with bars, and why the run failed."""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from srunddp.report import format
from srunddp.report.advice import Advice
from srunddp.report.summary import GpuFigures, NodeFigures, Summary, share
from srunddp.util.hostlist import fold_ranks, group_by_key

_CODES = {  # exit codes of a script's process, or of srunddp itself
    1: "an exception",
    69: "Slurm or a node was not available, or did not answer",
    78: "the configuration is wrong",
    124: "a stall: no rank made a step",
    134: "SIGABRT, often a C++ library that gave up",
    137: "SIGKILL, often out of memory",
    139: "SIGSEGV, a crash in native code",
    143: "SIGTERM, as by scancel or at the time limit",
}
_REQUEUE = 75  # the run stopped with a checkpoint and asks to be started again
# Part of the cause in failure.json for such a run, which may also end with 143.
_STOPPED = ": stopped after step "


@dataclass(frozen=True)
class Tile:
    """One of the figures that show a run at a glance.

    Attributes:
        name: What the figure is.
        value: The figure with its unit; ``?`` if unknown.
        share: The length of its bar, from 0 to 1; None for no bar.
        detail: What the figure refers to.
    """

    name: str
    value: str
    share: float | None
    detail: str


def tiles(summary: Summary) -> tuple[Tile, ...]:
    """Sum up the run in five figures: GPUs, GPU memory, CPUs, waiting for data, and samples per
    second. Without a GPU there are three.

    Averages are taken from the first step on; memory is the highest value of the run.
    """
    gpus: tuple[Tile, ...] = ()
    if summary.gpus:
        gpus = (_gpus(summary.gpus), _tile("GPU memory", *_fullest(summary.gpus)))
    return (
        *gpus,
        _cpus(summary.per_node),
        _tile(
            "waiting for data",
            summary.data_share,
            f"of a step of {format.duration(summary.step_s)}",
        ),
        _throughput(summary),
    )


def _tile(name: str, part: float | None, detail: str) -> Tile:
    if part is None:
        return Tile(name, format.UNKNOWN, None, "not measured")
    return Tile(name, format.percent(part), min(1.0, max(0.0, part)), detail)


def _throughput(summary: Summary) -> Tile:
    """Return the tile of the throughput. It has no bar, because no highest rate is known."""
    if summary.throughput.per_s is None:
        return Tile("samples/s", format.UNKNOWN, None, "not measured")
    detail = f"{format.count(len(summary.ranks), 'rank')} together"
    if summary.throughput.own_share is not None:
        detail += f"; computing {format.percent(summary.throughput.own_share)} of the step time"
    return Tile("samples/s", format.number(summary.throughput.per_s), None, detail)


def _gpus(gpus: Sequence[GpuFigures]) -> Tile:
    used = [gpu.utilization_percent for gpu in gpus if gpu.utilization_percent is not None]
    detail = format.count(len(used), "GPU")
    least = f"{min(used, default=0.0):.0f}"
    most = f"{max(used, default=0.0):.0f}"
    if least != most:
        detail += f", {least} to {most} %"
    return _tile("GPU", fmean(used) / 100 if used else None, detail)


def _cpus(nodes: Sequence[NodeFigures]) -> Tile:
    known = [
        (node.used_cpus, node.cpus) for node in nodes if node.used_cpus is not None and node.cpus
    ]
    used = sum(each[0] for each in known)
    cpus = sum(each[1] for each in known)
    part, memory = _fullest(nodes)
    also = "" if part is None else f"; memory {memory}, {format.percent(part)}"
    return _tile("CPUs", share(used, cpus), f"{format.number(used)} of {cpus:,.0f}{also}")


def _fullest(each: Sequence[GpuFigures | NodeFigures]) -> tuple[float | None, str]:
    """Return the highest share of its memory that any GPU or node uses, and the sizes in words."""
    known = [
        (part, of)
        for of in each
        if (part := share(of.memory_bytes, of.memory_limit_bytes)) is not None
    ]
    if not known:
        return None, ""
    part, worst = max(known, key=lambda pair: pair[0])
    return (
        part,
        f"at most {format.size(worst.memory_bytes)} of {format.size(worst.memory_limit_bytes)}",
    )


def failure(summary: Summary) -> Advice | None:
    """Describe which rank failed and why.

    Returns:
        None if the run ended well, has no failure so far, or stopped with a checkpoint.
    """
    end = summary.ending
    # While other ranks run, 0 and the code of a requeue do not show yet how the run will end. Any
    # other code is a failure, and is reported at once.
    codes = set(summary.ending.codes.values())
    stopped = codes and not end.missing and (codes <= {0, _REQUEUE} or _STOPPED in end.cause)
    if end.finished or stopped or (end.running and codes <= {0, _REQUEUE}):
        return None
    # srunddp triage looks for a job's number in this folder.
    known = os.path.normpath(os.environ.get("SRUNDDP_LOG_DIR") or "logs")
    is_there = summary.job and os.path.dirname(os.path.normpath(summary.folder)) == known
    job = shlex.quote(summary.job if is_there else summary.folder)
    return Advice(
        "run failed",
        end.cause or "; ".join(ends(summary)),
        "",
        f"srunddp triage {job}",
        severity="failed",
    )


def ends(summary: Summary) -> Iterator[str]:
    """Yield sentences on how the ranks ended, one for each exit code other than 0.

    The rarest code comes first, because most ranks end as a consequence of others. Ranks without a
    recorded end come last.
    """
    end = summary.ending
    by_code = group_by_key((code, rank) for rank, code in end.codes.items() if code)
    for code, ranks in sorted(by_code.items(), key=lambda each: len(each[1])):
        words = f" ({_CODES[code]})" if code in _CODES else ""
        yield f"exit code {code}{words} on {_who(ranks, summary)}"
    if not end.running and (end.missing or not end.codes):
        yield (
            f"no end recorded of {_who(end.missing, summary)}: killed; last reading at"
            f" {format.clock(end.last_s)}"
        )


def _who(ranks: Sequence[int], summary: Summary) -> str:
    if len(ranks) != 1 and len(ranks) == len(summary.ranks):
        return "all ranks"
    return fold_ranks(ranks, summary.layout)
