"""The run at a glance: five figures with a bar each, and why it failed."""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from srunddp.report import format
from srunddp.report.advice import Advice
from srunddp.report.summary import GpuFigures, NodeFigures, Summary, share
from srunddp.util.hostlist import fold_ranks, group_by_key

_CODES = {  # of a script's process, or of srunddp itself
    1: "an exception",
    69: "a node or Slurm did not do its part",
    78: "the configuration is wrong",
    124: "the training stood still",
    134: "SIGABRT, often a C++ library that gave up",
    137: "SIGKILL, often out of memory",
    139: "SIGSEGV, a crash in native code",
    143: "SIGTERM, as by scancel or at the time limit",
}
_REQUEUE = 75  # a run that stopped with a checkpoint, and that is to be started again
_STOPPED = ": stopped after step "  # the cause of such a run in failure.json, with 143 as well


@dataclass(frozen=True)
class Tile:
    """One figure.

    Attributes:
        name: what it is.
        value: with its unit, ``?`` where it is not known.
        share: the length of its bar, from 0 to 1; None for no bar.
        detail: what the figure is of.
    """

    name: str
    value: str
    share: float | None
    detail: str


def tiles(summary: Summary) -> tuple[Tile, ...]:
    """Sum the run up in five figures, from the first step on.

    They are GPUs, their memory, CPUs, waiting for data, and samples per second.
    """
    rate = format.number(summary.throughput.per_s)
    own = summary.throughput.own_share
    return (
        _gpus(summary.gpus),
        _tile("GPU memory", *_fullest(summary.gpus)),
        _cpus(summary.per_node),
        _tile(
            "waiting for data",
            summary.data_share,
            f"of a step of {format.duration(summary.step_s)}",
        ),
        _tile("samples/s", own, f"computing {format.percent(own)} of the step time", rate),
    )


def _tile(name: str, part: float | None, detail: str, value: str = "") -> Tile:
    if part is None:
        return Tile(name, value or format.UNKNOWN, None, "not measured")
    return Tile(name, value or format.percent(part), min(1.0, max(0.0, part)), detail)


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
    """Which share of its memory the fullest uses, and in words."""
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
    """Tell who failed, and of what.

    Returns:
        None for a run that went well, runs without a failure, or stopped with a checkpoint.
    """
    end = summary.ending
    # While other ranks still run, codes of a good end or of a requeue say nothing yet; any other
    # code is shown at once.
    codes = set(summary.ending.codes.values())
    stopped = codes and not end.missing and (codes <= {0, _REQUEUE} or _STOPPED in end.cause)
    if end.finished or stopped or (end.running and codes <= {0, _REQUEUE}):
        return None
    # Where triage looks for a job's number.
    known = os.path.normpath(os.environ.get("SRUNDDP_LOG_DIR") or "logs")
    is_there = summary.job and os.path.dirname(os.path.normpath(summary.folder)) == known
    job = summary.job if is_there else shlex.quote(summary.folder)
    return Advice(
        "run failed",
        end.cause or "; ".join(ends(summary)),
        "",
        f"srunddp triage {job}",
        severity="failed",
    )


def ends(summary: Summary) -> Iterator[str]:
    """Yield what is recorded of the ranks' ends, by exit code.

    The least frequent code comes first: most ranks have ended because of others.
    """
    end = summary.ending
    by_code = group_by_key((code, rank) for rank, code in end.codes.items() if code)
    for code, ranks in sorted(by_code.items(), key=lambda each: len(each[1])):
        words = f" ({_CODES[code]})" if code in _CODES else ""
        yield f"exit code {code}{words} on {_who(ranks, summary)}"
    if not end.running and (end.missing or not end.codes):
        yield (
            f"no end recorded of {_who(end.missing, summary)}: killed; last sample at"
            f" {format.clock(end.last_s)}"
        )


def _who(ranks: Sequence[int], summary: Summary) -> str:
    if len(ranks) != 1 and len(ranks) == len(summary.ranks):
        return "all ranks"
    return fold_ranks(ranks, summary.layout)
