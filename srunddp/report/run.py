"""Reads the files of one start of a run, and converts all times to seconds since that start."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from srunddp.report import csv_files
from srunddp.report.csv_files import Mark, TimeSeries
from srunddp.report.format import moment
from srunddp.report.locate import start_of, starts_of
from srunddp.report.summary import Checkpoints, GpuFaultFigures, NotFinite, RunEnd, Span
from srunddp.util import shared_file
from srunddp.util.atomic_file import plain
from srunddp.util.hostlist import fold_ranks, group_by_key
from srunddp.util.json_lines import parse
from srunddp.util.sample_files import OF_A_NODE, SETTINGS, STEPS

# For example node01.gpus.csv.
_PER_NODE = re.compile(r"(.+)\.(node|tasks|links|gpus|gpu_faults)\.csv")
# For example node01.rank3.steps.csv.
_PER_RANK = re.compile(r"(.+)\.rank(\d{1,9})\.(steps|marks)\.csv")
_RANK = re.compile(r"[0-9]{1,9}")
_LARGEST = 1e15  # larger numbers in run.json and metrics.jsonl are ignored
_UUID_LETTERS = 12  # characters of a UUID that are enough to tell one instance from another
# Seconds by which clocks may differ unnoticed: all ranks end the rendezvous within less time.
_CLOCK_TOLERANCE = 0.5
# After this many intervals without a new line, a run without a recorded end is not running.
_SILENT = 5
_LONGEST_SETTINGS = 1 << 16  # bytes
_SLOWEST = 15.0  # seconds that readings, or the record of a rank's exit, may take to be written
DEFAULT_INTERVAL = 5.0  # seconds; the value of --monitor if run.json is lost
# The marks that begin and end each phase; of several, the first that exists counts.
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
# Kinds of lines in metrics.jsonl, and the prefix for the names in them. If two kinds give one name,
# the later kind in this list counts.
_METRICS = {"epoch": "", "log": "", "evaluation": "val/", "step": ""}
_NO_RESULTS = ("lr", "epoch", "seconds")  # not drawn, unless there is nothing else
# The Trainer writes NaN as text; other scripts may use other words.
_NOT_FINITE = ("nan", "inf", "infinity")
_MANY = 2**23  # bytes of metrics.jsonl; if it is larger, some lines on steps are skipped


@dataclass(frozen=True)
class Device:
    """A network interface, an RDMA port or a GPU of a node.

    Attributes:
        node: The name of the node.
        key: The name of the interface or of the RDMA port, or the UUID of the GPU.
        samples: The readings of the device.
    """

    node: str
    key: str
    samples: TimeSeries

    def text(self, column: str) -> str:
        """Return a column's text in the last reading; empty if there is no such column."""
        return self.samples.texts.get(column, "")

    @property
    def index(self) -> str:
        """The index of a GPU, such as ``3``; for a MIG instance, also the beginning of its UUID, as
        in ``3 MIG-1a2b3c4d``.
        """
        if self.key.startswith("MIG"):
            own = f" {self.key[:_UUID_LETTERS]}"
        else:
            own = ""
        return f"{self.text('index')}{own}"


@dataclass
class RunData:
    """The content of the files of one start.

    Attributes:
        header: The content of run.json.
        ranks: The node of each rank.
        nodes: The names of the nodes, rank 0's first.
        start: Unix time by the clock of rank 0's node; all other times are seconds since then.
        shifts: Seconds by which a node's clock was ahead of that of rank 0's node. The times have
            been corrected by them.
        metrics: What the training logged: times and values by name.
        not_finite: The first loss that is not finite; None if there is none.
        settings: The settings of ``Trainer``, in their groups; empty without one.
    """

    folder: Path
    header: Mapping[str, Any]
    ranks: dict[int, str]
    start: float = 0.0
    nodes: tuple[str, ...] = ()
    shifts: Mapping[str, float] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    steps: dict[int, TimeSeries] = field(default_factory=dict)
    tasks: dict[int, TimeSeries] = field(default_factory=dict)
    usage: dict[str, TimeSeries] = field(default_factory=dict)
    links: list[Device] = field(default_factory=list)
    gpus: list[Device] = field(default_factory=list)
    gpu_faults: list[GpuFaultFigures] = field(default_factory=list)
    metrics: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    not_finite: NotFinite | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def marked(self, name: str) -> dict[int, Mark]:
        """Return for each rank its first mark with this name."""
        return {mark.rank: mark for mark in reversed(self.marks) if mark.name == name}

    def text(self, key: str) -> str:
        """Return a text or a whole number from run.json as text; empty if the key has neither."""
        value = self.header.get(key)
        if type(value) in (str, int):
            return str(value)
        return ""

    def number(self, key: str) -> float | None:
        """Return a number from run.json; None if it is missing, below 0, or 1e15 or more."""
        value = self.header.get(key, -1)
        if type(value) in (int, float) and 0 <= value < _LARGEST:
            return float(value)
        return None

    def table(self, key: str) -> dict[str, Any]:
        """Return an object from run.json; empty if the key has none."""
        value = self.header.get(key)
        if isinstance(value, dict):
            return value
        return {}

    @property
    def series(self) -> list[TimeSeries]:
        """The series of all ranks, nodes and devices."""
        devices = [each.samples for each in (*self.links, *self.gpus)]
        return [*self.steps.values(), *self.tasks.values(), *self.usage.values(), *devices]

    @property
    def last(self) -> float:
        """The latest time in any file, in seconds since the start."""
        return max(
            [*(each.time[-1] for each in self.series), *(mark.time for mark in self.marks)],
            default=0.0,
        )


class _Layout(NamedTuple):
    """The ranks and nodes in run.json.

    Attributes:
        ranks: The node of each rank; empty if run.json does not have it.
        nodes: The node names, each under the form that is used in file names.
    """

    ranks: dict[int, str]
    nodes: dict[str, str]

    def has_rank(self, rank: int) -> bool:
        """Tell whether a rank's file belongs to this start; True if run.json names no ranks."""
        # Outside Slurm several starts may share a folder. A start with more ranks leaves files that
        # a later one does not empty. Spare nodes, which have no rank, leave files too.
        return not self.ranks or rank in self.ranks

    def has_node(self, called: str) -> bool:
        """Tell whether a node's file belongs to this start; True if run.json names no ranks."""
        return not self.ranks or called in self.nodes

    def node(self, called: str) -> str:
        """Return the name of the node whose file names begin with ``called``."""
        return self.nodes.get(called, called)


def read(folder: Path) -> RunData:
    """Read the files in a folder ``monitor.N``; what is missing, cut off or unreadable is
    left out.
    """
    header = csv_files.json_object(folder / "run.json")
    layout = _layout(header)
    run = RunData(folder, header, dict(layout.ranks))
    # Read in a fixed order, so that the same files always give the same report.
    for path in sorted(folder.glob("*.csv")):
        if match := _PER_RANK.fullmatch(path.name):
            rank = int(match[2])
            if layout.has_rank(rank):
                run.ranks.setdefault(rank, layout.node(match[1]))
                _read_rank(run, path, rank, match[3])
        elif match := _PER_NODE.fullmatch(path.name):
            if layout.has_node(match[1]):
                _read_node(run, path, layout.node(match[1]), match[2], layout)
    run.ranks = dict(sorted(run.ranks.items()))
    devices = [*run.links, *run.gpus]
    faulty = [each.node for each in run.gpu_faults]
    sampled = [*run.usage, *(each.node for each in devices), *faulty]
    run.nodes = tuple(dict.fromkeys([*run.ranks.values(), *layout.nodes.values(), *sampled]))
    run.shifts = _shifts(run)
    run.start = _start(run)
    run = _moved(run, -run.start)
    run.metrics, run.not_finite = _metrics(run)
    run.settings = _settings(folder / SETTINGS)
    return run


def _layout(header: Mapping[str, Any]) -> _Layout:
    given = header.get("ranks")
    ranks: dict[int, str] = {}
    if isinstance(given, dict):
        ranks = {int(rank): str(node) for rank, node in given.items() if _RANK.fullmatch(str(rank))}
    nodes = header.get("nodes")
    listed = [str(node) for node in nodes] if isinstance(nodes, list) else []
    named = dict.fromkeys([*listed, *ranks.values()])
    return _Layout(ranks, {plain(node): node for node in named})


def _read_rank(run: RunData, path: Path, rank: int, kind: str) -> None:
    if kind == "marks":
        run.marks += csv_files.marks(path, rank)
    elif found := csv_files.samples(path, STEPS):
        run.steps[rank] = found[""]


def _read_node(run: RunData, path: Path, node: str, kind: str, layout: _Layout) -> None:
    if kind == "gpu_faults":
        run.gpu_faults += csv_files.gpu_faults(path, node)
        return
    found = csv_files.samples(path, OF_A_NODE[kind])
    devices = [Device(node, key, each) for key, each in found.items()]
    if kind == "node" and found:
        run.usage[node] = found[""]
    elif kind == "links":
        run.links += devices
    elif kind == "gpus":
        run.gpus += sorted(devices, key=lambda gpu: (len(gpu.text("index")), gpu.text("index")))
    elif kind == "tasks":
        for key, each in found.items():
            if _RANK.fullmatch(key) and layout.has_rank(int(key)):
                run.tasks[int(key)] = each
                run.ranks.setdefault(int(key), node)


def _settings(path: Path) -> dict[str, Any]:
    """Read the settings of a ``Trainer``; empty if there are none, or the file is damaged."""
    # Imported here because not every run has the file.
    import yaml

    from srunddp.util.yaml_loader import BoundedLoader

    with suppress(OSError, yaml.YAMLError, ValueError, OverflowError):
        with shared_file.open_plain(path) as file:
            found = yaml.load(file.read(_LONGEST_SETTINGS), Loader=BoundedLoader)
        if isinstance(found, dict):
            return {str(name): _plain_value(value) for name, value in found.items()}
    return {}


def _plain_value(value: object) -> object:
    """Convert a value from YAML to one that JSON can express, for example a date to text."""
    if isinstance(value, dict):
        return {str(name): _plain_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain_value(each) for each in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)


def _shifts(run: RunData) -> dict[str, float]:
    """Find how many seconds each node's clock is ahead of that of the first node.

    All ranks end the rendezvous at the same moment, so their marks should have the same time.
    """
    met = group_by_key((run.ranks[rank], mark.time) for rank, mark in run.marked("met").items())
    if not run.nodes or run.nodes[0] not in met:
        return {}
    own = median(met[run.nodes[0]])
    # Use the median, because a single rank may write its mark late.
    ahead = {node: median(times) - own for node, times in met.items()}
    return {node: by for node, by in ahead.items() if abs(by) > _CLOCK_TOLERANCE}


def _start(run: RunData) -> float:
    """Return when the first process began; if unknown, when the first line was written."""
    # Correct the clocks first, because times of several nodes are compared.
    moved = _moved(run, 0.0)
    if begun := moved.marked("process"):
        return min(mark.time for mark in begun.values())
    times = [*(each.time[0] for each in moved.series), *(mark.time for mark in moved.marks)]
    return min([*times, *filter(None, [run.number("started")])], default=0.0)


def _moved(run: RunData, by: float) -> RunData:
    """Return the run with ``by`` seconds added to all times, and with the clocks corrected."""
    at = {node: by - run.shifts.get(node, 0.0) for node in run.nodes}
    of_rank = {rank: at[node] for rank, node in run.ranks.items()}
    marks = [replace(mark, time=mark.time + of_rank[mark.rank]) for mark in run.marks]
    return replace(
        run,
        marks=sorted(marks, key=lambda mark: (mark.time, mark.rank)),
        steps={rank: each.shifted(of_rank[rank]) for rank, each in sorted(run.steps.items())},
        tasks={rank: each.shifted(of_rank[rank]) for rank, each in sorted(run.tasks.items())},
        usage={node: each.shifted(at[node]) for node, each in run.usage.items()},
        links=[replace(each, samples=each.samples.shifted(at[each.node])) for each in run.links],
        gpus=[replace(each, samples=each.samples.shifted(at[each.node])) for each in run.gpus],
        gpu_faults=sorted(
            (replace(each, at_s=each.at_s + at[each.node]) for each in run.gpu_faults),
            key=lambda fault: fault.at_s,
        ),
    )


def _metrics(run: RunData) -> tuple[dict[str, list[tuple[float, float]]], NotFinite | None]:
    """Read the figures of this start in ``metrics.jsonl``, and the first loss that is not finite.

    The file may also hold lines of earlier and later starts, which are left out by their times.
    """
    by_kind: dict[str, dict[str, list[tuple[float, float]]]] = {kind: {} for kind in _METRICS}
    not_finite = None
    end = run.last + (run.number("seconds") or DEFAULT_INTERVAL)
    for line in _metric_lines(run.folder / "metrics.jsonl"):
        kind = str(line.get("kind"))
        at = _unix_time(line.get("time")) - run.start
        if kind not in _METRICS or not 0 <= at <= end:
            continue
        prefix = _METRICS[kind]
        for name, value in line.items():
            # Remove the prefix first, because a name may already have it.
            named = prefix + name.removeprefix(prefix)
            if _is_figure(name, value):
                by_kind[kind].setdefault(named, []).append((at, value))
            elif not_finite is None and _is_loss_gone_bad(name, value):
                step = line.get("step")
                not_finite = NotFinite(
                    named, str(float(value)), at, step if type(step) is int else None
                )
    found = {name: points for names in by_kind.values() for name, points in names.items()}
    results = {
        name: points for name, points in found.items() if name.rpartition("/")[2] not in _NO_RESULTS
    }
    return results or found, not_finite


def _is_figure(name: str, value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and name != "step"
        and abs(value) < _LARGEST  # False for nan
    )


def _is_loss_gone_bad(name: str, value: object) -> bool:
    return "loss" in name and str(value).lower().strip("-") in _NOT_FINITE


def _metric_lines(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        every = 1 + path.stat().st_size // _MANY
        for number, line in enumerate(shared_file.lines_of(path)):
            # Recognise lines on steps by the bytes that the Trainer writes, because parsing a line
            # to decide whether to skip it would take the time that skipping saves.
            if number % every == 0 or b'"kind": "step"' not in line:
                yield parse(line)


def _unix_time(text: object) -> float:
    with suppress(ValueError, OverflowError, OSError):
        return datetime.fromisoformat(str(text)).timestamp()
    return math.nan


def ending(run: RunData, now: float) -> RunEnd:
    """Find out how a run ended, as far as its files show it.

    Args:
        run: The files of the run.
        now: The present Unix time, to tell whether the newest reading is recent.
    """
    ends = run.marked("end")
    codes = {
        rank: 0 if math.isnan(mark.value) else int(mark.value)
        for rank, mark in sorted(ends.items())
    }
    interval = run.number("seconds") or DEFAULT_INTERVAL
    # This machine's clock may be up to a minute behind those of the nodes.
    fresh = -60.0 < now - run.start - run.last < max(_SILENT * interval + 1.0, _SLOWEST)
    missing = tuple(rank for rank in run.ranks if rank not in codes)
    # failure.json is one folder above, beside the logs.
    said = csv_files.json_object(run.folder.parent / "failure.json")
    cause = said.get("cause")
    at = _unix_time(said.get("time")) - run.start
    if not (math.isnan(at) or -_SLOWEST < at < run.last + _SLOWEST):
        cause = ""  # the file is about another start
    if not isinstance(cause, str) or not cause:
        cause = ""
    elif said.get("rank", "") is not None:  # else no rank is at fault, but the network, for example
        cause = f"rank {said.get('rank')} on {said.get('node')}: {cause}"
    return RunEnd(codes, missing, bool(missing) and fresh, run.last, cause)


def moves(run: RunData) -> Iterator[str]:
    """Yield a sentence for each node that was lost before this start: where its ranks are now.

    Only starts that ``--restarts`` made since the last requeue are compared.
    """
    own = start_of(run.folder)
    folders = starts_of(run.folder.absolute().parent)
    before = [
        folders[each] for each in sorted(folders) if own and own[0] == each[0] and each <= own
    ]
    starts = [_of_header(each) for each in before]
    for old, new in pairwise(each for each in starts if each.ranks):
        for node in sorted({*old.ranks.values()} - {*new.ranks.values()}):
            own_ranks = [rank for rank, place in old.ranks.items() if place == node]
            since = moment(new.number("started") or 0.0)
            yield f"{node} left: {fold_ranks(own_ranks, new.ranks)} since {since}"


def _of_header(folder: Path) -> RunData:
    """Return a start with only its header and its ranks, read from run.json."""
    header = csv_files.json_object(folder / "run.json")
    return RunData(folder, header, _layout(header).ranks)


def spans(run: RunData, begin: str, end: str) -> tuple[Span, ...]:
    """Find the spans between two kinds of marks, such as epochs.

    Args:
        run: The run with the marks.
        begin: The name of the mark at the beginning of a span.
        end: The name of the mark at the end of a span.

    Returns:
        The spans of the rank that has the most. All ranks mark the same spans, but the last lines
        of a killed rank may be missing.
    """
    by_rank: dict[int, list[Span]] = {rank: [] for rank in run.ranks}
    for mark in run.marks:
        begun = by_rank[mark.rank]
        if mark.name == begin:
            begun.append(Span(None if math.isnan(mark.value) else int(mark.value), mark.time, None))
        elif mark.name == end and begun and begun[-1].end_s is None:
            begun[-1] = replace(begun[-1], end_s=mark.time)
    most: list[Span] = max(by_rank.values(), key=len, default=[])
    return tuple(most)


def checkpoints(run: RunData) -> Checkpoints:
    """Count the checkpoints and add up their times.

    The pauses are those of the rank that paused longest. The time of writing in the background is
    that of the rank that wrote longest.
    """
    stood = _values(run, "checkpoint")
    written = _values(run, "checkpoint_written")
    longest = max(stood.values(), key=sum, default=[])
    background = max(written.values(), key=sum, default=[])
    return Checkpoints(len(longest), sum(longest), sum(background))


def _values(run: RunData, name: str) -> dict[int, list[float]]:
    return group_by_key(
        (mark.rank, mark.value) for mark in run.marks if mark.name == name and mark.value >= 0
    )


def launches(run: RunData) -> dict[int, dict[str, tuple[float, float]]]:
    """Find beginning and end of the launch phases of each rank that has a mark, by rank and phase.

    ``srun`` lasts from the first process of the run to the rank's own process. ``script`` is what
    the user's script does between the process group and the training. ``prepare`` is what the
    training does before its first epoch.
    """
    marked = group_by_key((mark.rank, (mark.name, mark.time)) for mark in reversed(run.marks))
    found: dict[int, dict[str, tuple[float, float]]] = {}
    for rank in sorted(marked):
        # The marks are in reverse order, so dict() keeps the earliest mark of each name.
        times = dict(marked[rank])
        found[rank] = {}
        process = times.get("process", min(times.values()))
        if process > 0:
            found[rank]["srun"] = (0.0, process)
        for name, (begins, ends) in _PHASES.items():
            begin = _first_known(times, begins)
            end = _first_known(times, ends)
            if begin is not None and end is not None and begin <= end:
                found[rank][name] = (begin, end)
    return found


def _first_known(times: Mapping[str, float], marks: Sequence[str]) -> float | None:
    """Return the time of the first of these marks that exists; None if none does."""
    return next((times[mark] for mark in marks if mark in times), None)
