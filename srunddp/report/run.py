"""One start of a run, read: every series on one time axis, in seconds since its start."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from srunddp.report import csv_files
from srunddp.report.csv_files import Mark, TimeSeries, shifted
from srunddp.report.summary import Checkpoints, Phase, RunEnd, Span, StartupPhases
from srunddp.util.hostlist import group_by_key

_PER_NODE = re.compile(r"(.+)\.(node|tasks|links|gpus)\.csv")
_PER_RANK = re.compile(r"(.+)\.rank(\d{1,9})\.(steps|marks)\.csv")
_LARGEST = 1e15  # a number above is none
_CLOCK_TOLERANCE = 0.5  # seconds by which clocks may differ: all ranks end the rendezvous within less
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


@dataclass(frozen=True)
class Link:
    """A network interface of a node, or an InfiniBand or RoCE port; ``chosen`` for the training."""

    node: str
    name: str
    kind: str
    chosen: bool
    samples: TimeSeries


@dataclass(frozen=True)
class Gpu:
    """A GPU of the job."""

    node: str
    uuid: str
    index: str
    name: str
    samples: TimeSeries


@dataclass(frozen=True)
class RunData:
    """What the files of one start hold.

    Attributes:
        header: run.json, as it is.
        start: Unix time, by the clock of rank 0's node; ``time`` in all else is seconds since then.
        ranks: the node of each; nodes: their names, of rank 0's first.
        shifts: by how many seconds a node's clock was ahead of that of rank 0's node, where that was taken out.
    """

    folder: Path
    header: Mapping[str, Any]
    start: float
    ranks: Mapping[int, str]
    nodes: tuple[str, ...]
    shifts: Mapping[str, float]
    marks: tuple[Mark, ...]
    steps: Mapping[int, TimeSeries]
    tasks: Mapping[int, TimeSeries]
    usage: Mapping[str, TimeSeries]
    links: tuple[Link, ...]
    gpus: tuple[Gpu, ...]

    def marked(self, name: str) -> dict[int, Mark]:
        """The first mark of that name, by rank."""
        found: dict[int, Mark] = {}
        for mark in self.marks:
            if mark.name == name:
                found.setdefault(mark.rank, mark)
        return found

    def text(self, key: str) -> str:
        """Of run.json; empty where it is none."""
        value = self.header.get(key)
        return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""

    def number(self, key: str) -> float | None:
        """Of run.json; None where it is none, or below 0."""
        value = self.header.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if 0 <= value < _LARGEST else None

    @property
    def last(self) -> float:
        """The newest time in any file, in seconds since the start."""
        return max(_times(self), default=0.0)


def _times(run: RunData) -> Iterable[float]:
    yield from (each.time[-1] for each in _series(run))
    yield from (mark.time for mark in run.marks)


def _series(run: RunData) -> Iterator[TimeSeries]:
    found = (*run.steps.values(), *run.tasks.values(), *run.usage.values())
    yield from (each for each in found if each.time)
    yield from (link.samples for link in run.links)
    yield from (gpu.samples for gpu in run.gpus)


def read(folder: Path) -> RunData:
    """The files of ``monitor.N``; whatever is missing, cut or not understood is left out."""
    header = csv_files.json_object(folder / "run.json")
    ranks, names = _layout(header)
    run = RunData(folder, header, 0.0, ranks, (), {}, (), {}, {}, {}, (), ())
    for name in csv_files.names(folder):
        if _is_of_another_start(name, ranks, names):
            continue
        if match := _PER_RANK.fullmatch(name):
            run = _with_rank(run, folder / name, names.get(match[1], match[1]), int(match[2]), match[3])
        elif match := _PER_NODE.fullmatch(name):
            run = _with_node(run, folder / name, names.get(match[1], match[1]), match[2])
    nodes = dict.fromkeys([*(run.ranks[rank] for rank in sorted(run.ranks)), *names.values(), *_sampled_nodes(run)])
    run = replace(run, nodes=tuple(nodes), ranks=dict(sorted(run.ranks.items())))
    shifts = _shifts(run)
    start = _start(run, shifts)
    return replace(_moved(run, lambda node: -start - shifts.get(node, 0.0)), start=start, shifts=shifts)


def _layout(header: Mapping[str, Any]) -> tuple[dict[int, str], dict[str, str]]:
    """The node of each rank, and the name of each node by what its files are called."""
    found = header.get("ranks")
    given = found if isinstance(found, dict) else {}
    ranks = {int(rank): str(node) for rank, node in given.items() if re.fullmatch(r"[0-9]{1,9}", str(rank))}
    nodes = header.get("nodes")
    listed = [str(node) for node in nodes] if isinstance(nodes, list) else []
    return ranks, {_plain(node): node for node in dict.fromkeys([*listed, *ranks.values()])}


def _is_of_another_start(name: str, ranks: Mapping[int, str], names: Mapping[str, str]) -> bool:
    """Outside Slurm starts may share a folder, and one of more ranks leaves files that no later one empties."""
    if match := _PER_RANK.fullmatch(name):
        return bool(ranks) and int(match[2]) not in ranks
    match = _PER_NODE.fullmatch(name)
    return bool(ranks) and match is not None and match[1] not in names


def _plain(name: str) -> str:
    """As the files of a node are called."""
    return re.sub(r"[^\w.-]|^\.", "_", name, flags=re.ASCII) or "_"


def _with_rank(run: RunData, path: Path, node: str, rank: int, kind: str) -> RunData:
    ranks = {**run.ranks, rank: run.ranks.get(rank, node)}
    if kind == "marks":
        return replace(run, ranks=ranks, marks=(*run.marks, *csv_files.marks(path, rank)))
    found = csv_files.samples(path, csv_files.STEPS)
    return replace(run, ranks=ranks, steps={**run.steps, rank: found[""]} if found else run.steps)


def _with_node(run: RunData, path: Path, node: str, kind: str) -> RunData:
    if kind == "node":
        usage = csv_files.samples(path, csv_files.NODE)
        return replace(run, usage={**run.usage, node: usage[""]} if usage else run.usage)
    if kind == "tasks":
        found = {int(key): each for key, each in csv_files.samples(path, csv_files.TASKS).items() if _is_rank(key)}
        ranks = {**run.ranks, **{rank: run.ranks.get(rank, node) for rank in found}}
        return replace(run, ranks=ranks, tasks={**run.tasks, **found})
    if kind == "links":
        return replace(run, links=(*run.links, *_links(path, node)))
    return replace(run, gpus=(*run.gpus, *_gpus(path, node)))


def _is_rank(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,9}", text))


def _links(path: Path, node: str) -> Iterable[Link]:
    for name, found in csv_files.samples(path, csv_files.LINKS).items():
        yield Link(node, name, found.texts.get("kind", ""), found.texts.get("chosen") == "1", found)


def _gpus(path: Path, node: str) -> list[Gpu]:
    found = [
        Gpu(node, uuid, each.texts.get("index", ""), each.texts.get("name", ""), each)
        for uuid, each in csv_files.samples(path, csv_files.GPUS).items()
    ]
    return sorted(found, key=lambda gpu: (len(gpu.index), gpu.index))


def _sampled_nodes(run: RunData) -> Iterable[str]:
    yield from run.usage
    yield from (link.node for link in run.links)
    yield from (gpu.node for gpu in run.gpus)


def _shifts(run: RunData) -> dict[str, float]:
    """How far each node's clock is ahead of that of the first: all ranks have met at one moment."""
    met = group_by_key((run.ranks.get(rank, ""), mark.time) for rank, mark in run.marked("met").items())
    if not run.nodes or run.nodes[0] not in met:
        return {}
    own = median(met[run.nodes[0]])
    ahead = {node: median(times) - own for node, times in met.items()}
    return {node: by for node, by in ahead.items() if abs(by) > _CLOCK_TOLERANCE}


def _start(run: RunData, shifts: Mapping[str, float]) -> float:
    """When the first process began; else when the first line was written."""
    begun = [mark.time - shifts.get(run.ranks.get(mark.rank, ""), 0.0) for mark in run.marked("process").values()]
    if begun:
        return min(begun)
    moved = _moved(run, lambda node: -shifts.get(node, 0.0))
    times = [*(each.time[0] for each in _series(moved)), *(mark.time for mark in moved.marks)]
    if started := run.number("started"):
        times.append(started)
    return min(times, default=0.0)


def _moved(run: RunData, by: Callable[[str], float]) -> RunData:
    """With the times of each node moved."""

    def of_rank(rank: int) -> float:
        return by(run.ranks.get(rank, ""))

    return replace(
        run,
        marks=tuple(sorted((replace(mark, time=mark.time + of_rank(mark.rank)) for mark in run.marks), key=_when)),
        steps={rank: shifted(each, of_rank(rank)) for rank, each in sorted(run.steps.items())},
        tasks={rank: shifted(each, of_rank(rank)) for rank, each in sorted(run.tasks.items())},
        usage={node: shifted(each, by(node)) for node, each in run.usage.items()},
        links=tuple(replace(each, samples=shifted(each.samples, by(each.node))) for each in run.links),
        gpus=tuple(replace(each, samples=shifted(each.samples, by(each.node))) for each in run.gpus),
    )


def _when(mark: Mark) -> tuple[float, int]:
    return mark.time, mark.rank


def ending(run: RunData, now: float) -> RunEnd:
    """How the run ended, as far as that was recorded.

    Args:
        now: Unix time.
    """
    ends = run.marked("end")
    codes = {rank: 0 if math.isnan(mark.value) else int(mark.value) for rank, mark in sorted(ends.items())}
    interval = run.number("seconds") or _DEFAULT_INTERVAL
    fresh = -60.0 < now - run.start - run.last < _SILENT * interval + 1.0
    missing = tuple(rank for rank in run.ranks if rank not in codes)
    return RunEnd(codes, missing, bool(missing) and fresh, run.last, _cause(run))


def _cause(run: RunData) -> str:
    """What the run said of its failure; the file lies where the logs are."""
    found = csv_files.json_object(run.folder.parent / "failure.json")
    cause = found.get("cause")
    return f"rank {found.get('rank')} on {found.get('node')}: {cause}" if isinstance(cause, str) and cause else ""


def spans(run: RunData, begin: str, end: str) -> tuple[Span, ...]:
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


def checkpoints(run: RunData) -> Checkpoints:
    """Of the rank that stood still for longest; what was written in the background, likewise."""
    stood, written = _values(run, "checkpoint"), _values(run, "checkpoint_written")
    longest, background = max(stood.values(), key=sum, default=[]), max(written.values(), key=sum, default=[])
    return Checkpoints(len(longest), sum(longest), sum(background), len(background))


def _values(run: RunData, name: str) -> dict[int, list[float]]:
    return group_by_key((mark.rank, mark.value) for mark in run.marks if mark.name == name and mark.value >= 0)


def launches(run: RunData) -> tuple[StartupPhases, ...]:
    """Of each rank that has a mark.

    ``srun`` is from the first process of the run to the rank's own; ``script`` what the user's script does by itself,
    from the process group to the training; ``prepare`` what the training does before its first epoch.
    """
    times: dict[int, dict[str, float]] = {}
    for mark in run.marks:
        times.setdefault(mark.rank, {}).setdefault(mark.name, mark.time)
    return tuple(_launch(rank, times[rank]) for rank in sorted(times))


def _launch(rank: int, times: dict[str, float]) -> StartupPhases:
    process = times.get("process", min(times.values()))
    phases = [Phase("srun", 0.0, process)] if process > 0 else []
    for name, (begins, ends) in _PHASES.items():
        begin, end = (next((times[mark] for mark in marks if mark in times), math.nan) for marks in (begins, ends))
        if begin <= end:
            phases.append(Phase(name, begin, end))
    return StartupPhases(rank, process, tuple(phases), times.get("step"))
