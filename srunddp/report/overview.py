"""The run at a glance: five figures with a bar each, and why it failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean

from srunddp.report import format
from srunddp.report.advice import Advice
from srunddp.report.summary import NodeFigures, Summary, share
from srunddp.util.hostlist import fold_ranks, group_by_key

_CODES = {  # of a script's process, or of srunddp itself
    1: "an exception",
    69: "a node or Slurm did not do its part",
    78: "the configuration is wrong",
    124: "the training stood still",
    134: "SIGABRT, often a C++ library that gave up",
    135: "SIGBUS, often a full /dev/shm",
    137: "SIGKILL, often out of memory",
    139: "SIGSEGV, a crash in native code",
    143: "SIGTERM, as by scancel or at the time limit",
}
_REQUEUE = 75  # a run that stopped with a checkpoint, and that is to be started again
_STOPPED = ": stopped after step "  # the cause of such a run in failure.json, with 143 as well
_NO_TRAINER = "known of srunddp.Trainer alone"


@dataclass(frozen=True)
class Tile:
    """One figure.

    Attributes:
        name: what it is; value: with its unit, ``?`` where it is not known.
        share: the length of its bar, from 0 to 1; None for no bar.
        detail: what the figure is of.
    """

    name: str
    value: str
    share: float | None
    detail: str


def tiles(summary: Summary) -> tuple[Tile, ...]:
    """GPUs, their memory, CPUs, waiting for data, samples per second: from the first step on."""
    return (_gpus(summary), _gpu_memory(summary), _cpus(summary.per_node), _waiting(summary), _throughput(summary))


def _gpus(summary: Summary) -> Tile:
    used = [gpu.utilization for gpu in summary.gpus if gpu.utilization is not None]
    if not used:
        return _tile("GPU", None, "not sampled")
    each = f", {min(used):.0f} to {max(used):.0f} %" if len(used) > 1 else ""
    return _tile("GPU", fmean(used) / 100, f"{format.count(len(used), 'GPU')}{each}")


def _gpu_memory(summary: Summary) -> Tile:
    sizes = [(gpu.memory_bytes, gpu.memory_limit_bytes) for gpu in summary.gpus]
    part, detail = _fullest(sizes)
    return _tile("GPU memory", part, detail or "not sampled")


def _fullest(sizes: Iterable[tuple[float | None, float | None]]) -> tuple[float | None, str]:
    """Which share of its limit is used where that is most, and in words."""
    known = [(part, used, limit) for used, limit in sizes if (part := share(used, limit)) is not None]
    if not known:
        return None, ""
    part, used, limit = max(known, key=lambda each: each[0])
    return part, f"at most {format.size(used)} of {format.size(limit)}"


def _cpus(nodes: Iterable[NodeFigures]) -> Tile:
    known = [(node.used, node.cpus) for node in nodes if node.used is not None and node.cpus]
    used, cpus = sum(each[0] for each in known), sum(each[1] for each in known)
    part, memory = _fullest((node.memory_bytes, node.memory_limit_bytes) for node in nodes)
    details = [f"{format.number(used)} of {cpus:.0f}"] if known else []
    details += [f"memory {memory}, {format.percent(part)}"] if memory else []
    return _tile("CPUs", share(used, cpus), "; ".join(details) or "not sampled")


def _waiting(summary: Summary) -> Tile:
    known = summary.data_share is not None
    detail = f"of a step of {format.duration(summary.step_s)}" if known else _NO_TRAINER
    return _tile("waiting for data", summary.data_share, detail)


def _throughput(summary: Summary) -> Tile:
    found = summary.throughput
    if found.per_s is None:
        return _tile("samples/s", None, _NO_TRAINER)
    own = "" if found.own_share is None else f"computing {format.percent(found.own_share)} of the step time"
    return Tile("samples/s", format.number(found.per_s), found.own_share, own)


def _tile(name: str, part: float | None, detail: str) -> Tile:
    return Tile(name, format.percent(part), None if part is None else min(1.0, max(0.0, part)), detail)


def failure(summary: Summary) -> Advice | None:
    """Who failed, and of what; None for a run that went well, still runs, or stopped with a checkpoint."""
    end = summary.ending
    if end.running or end.finished or _has_stopped(summary):
        return None
    found = end.cause or "; ".join(_ends(summary)) or "no end recorded: killed"
    job = summary.job or "with the folder of its logs"
    return Advice("run failed", found, "", f"srunddp triage {job}", severity="failed")


def _has_stopped(summary: Summary) -> bool:
    end, codes = summary.ending, set(summary.ending.codes.values())
    return not end.missing and bool(codes) and (codes <= {0, _REQUEUE} or _STOPPED in end.cause)


def _ends(summary: Summary) -> Iterator[str]:
    """What is recorded of the ranks' ends, the least frequent first: the others ended with them."""
    end = summary.ending
    by_code = group_by_key((code, rank) for rank, code in end.codes.items() if code)
    for code, ranks in sorted(by_code.items(), key=lambda each: len(each[1])):
        words = f" ({_CODES[code]})" if code in _CODES else ""
        yield f"exit code {code}{words} {_who(ranks, summary)}"
    if end.missing:
        last = f"last sample at {format.clock(end.last)}"
        yield f"no end recorded {_who(end.missing, summary)}: killed, as by a time limit or with the node; {last}"


def _who(ranks: Iterable[int], summary: Summary) -> str:
    listed = sorted(ranks)
    if len(listed) == len(summary.ranks) > 1:
        return "on all ranks"
    return f"on {fold_ranks(listed, summary.layout)}"
