"""The files of a monitored run, as they are: a last line without its end is left out, and so is what is not known."""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

_MOST = 1500  # points of one series that are kept: about as many as a picture has columns
_BLOCK = 1024
_EARLIEST, _LATEST = 1e9, 1e10  # of 2001 and 2286: other times are none
_LARGEST = 1e18  # and so is any figure above
_SLOWED = ("thermal", "brake")
NAN = math.nan
_LEAST = 1e-9  # what is divided by less has no end


@dataclass(frozen=True)
class Kind:
    """The columns of one kind of file that are read.

    Attributes:
        key: the column that tells apart what the rows are about; empty where a file is about one thing.
        counters, gauges, peaks: numbers; a peak is a gauge whose highest counts.
        texts: of these the last is kept.
    """

    key: str
    counters: tuple[str, ...] = ()
    gauges: tuple[str, ...] = ()
    peaks: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


NODE = Kind(
    "",
    ("cpu_s", "read_bytes", "written_bytes", "iowait_s"),
    ("cpus", "memory_limit_bytes"),
    ("memory_bytes",),
    ("interface",),
)
TASKS = Kind("rank", ("cpu_s", "delay_s"), ("processes",), ("rss_bytes",))
LINKS = Kind("link", ("received_bytes", "sent_bytes"), (), (), ("kind", "chosen"))
GPUS = Kind(
    "uuid",
    ("energy_j",),
    (
        "utilization_percent",
        "memory_bandwidth_percent",
        "power_w",
        "memory_limit_bytes",
        "sm_percent",
        "tensor_percent",
        "slowed",
    ),
    ("memory_bytes", "temperature_c"),
    ("index", "name"),
)
STEPS = Kind("", ("steps", "samples", "step_s", "data_s", "own_s"), (), ("longest_step_s",))


@dataclass(frozen=True)
class Mark:
    """One line of a file of marks.

    Attributes:
        time: seconds since the start of the run; value: nan for none.
    """

    time: float
    rank: int
    name: str
    value: float


def samples(path: Path, kind: Kind, most: int = _MOST) -> dict[str, TimeSeries]:
    """What a file of samples holds, by its key; ``time`` is Unix time.

    Args:
        most: points of each series that are kept.
    """
    rows = _rows(path)
    header = next(rows, [])
    places = {name: at for at, name in enumerate(header)}
    if "time" not in places or (kind.key and kind.key not in places):
        return {}
    blocks: dict[str, _Series] = {}
    for row in rows:
        if len(row) == len(header):
            key = row[places[kind.key]] if kind.key else ""
            if key not in blocks:
                blocks[key] = _Series(kind, places)
            blocks[key].add(row)
    counted = {key: series.samples() for key, series in blocks.items()}
    return {key: thinned(each, kind.counters, kind.peaks, most) for key, each in counted.items() if each.count}


class _Series:
    """The columns of one key, filled by blocks: a value alone costs more than its part of a block."""

    def __init__(self, kind: Kind, places: dict[str, int]) -> None:
        self._places, self._texts = places, kind.texts
        wanted = ("time", *kind.counters, *kind.gauges, *kind.peaks)
        self._numbers = [name for name in wanted if name in places]
        derived = ["slowed"] if "slowed" in wanted and "throttled" in places else []
        self._columns = {name: array("d") for name in (*self._numbers, *derived)}
        self._pending: list[list[str]] = []
        self._last: list[str] = []

    def add(self, row: list[str]) -> None:
        self._pending.append(row)
        if len(self._pending) >= _BLOCK:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        columns = list(zip(*self._pending, strict=True))
        for name in self._numbers:
            self._columns[name].extend(numbers(columns[self._places[name]]))
        if "slowed" in self._columns:
            self._columns["slowed"].extend(map(_is_slowed, columns[self._places["throttled"]]))
        self._last = self._pending[-1]
        self._pending = []

    def samples(self) -> TimeSeries:
        self._flush()
        time = self._columns.pop("time")
        texts = {name: self._last[self._places[name]] for name in self._texts if name in self._places and self._last}
        keep = list(_rising(time))
        if len(keep) < len(time):
            time = array("d", (time[at] for at in keep))
            self._columns = {name: array("d", (each[at] for at in keep)) for name, each in self._columns.items()}
        return TimeSeries(time, self._columns, texts, len(time))


def _is_slowed(reasons: str) -> float:
    return float(any(word in reasons.lower() for word in _SLOWED))


def _rising(times: Iterable[float]) -> Iterator[int]:
    """The places of the times that come after all before them; a clock that is set back says nothing."""
    latest = _EARLIEST
    for at, time in enumerate(times):
        if latest < time < _LATEST:
            latest = time
            yield at


def numbers(texts: Sequence[str]) -> list[float]:
    """As numbers; nan for what is none."""
    try:
        values = list(map(float, texts))
    except ValueError:
        values = list(map(number, texts))
    return [value if abs(value) < _LARGEST else NAN for value in values]


def number(text: str) -> float:
    """One number; nan for what is none."""
    try:
        value = float(text)
    except ValueError:
        return NAN
    return value if abs(value) < _LARGEST else NAN


def marks(path: Path, rank: int) -> list[Mark]:
    """The marks of one rank; ``time`` is Unix time."""
    rows = _rows(path)
    if next(rows, [])[:3] != ["time", "mark", "value"]:
        return []
    found = [Mark(number(row[0]), rank, row[1], number(row[2])) for row in rows if len(row) >= 3]
    return [mark for mark in found if _EARLIEST < mark.time < _LATEST]


def json_object(path: Path) -> dict[str, Any]:
    """As ``run.json``; empty where it is not there, or not whole."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            # Nothing is quoted: the writers let no comma in.
            yield from (line[:-1].split(",") for line in file if line.endswith("\n"))
    except OSError:
        return


def names(folder: Path) -> list[str]:
    """The files of a folder, sorted."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return []


@dataclass(frozen=True)
class TimeSeries:
    """The samples of one thing, in the order of time.

    Attributes:
        time: seconds since the start of the run.
        columns: by name, as long as ``time``; nan where a value is not known.
        texts: the last word of each column that is no number.
        count: how many there were before they were thinned.
    """

    time: Sequence[float] = ()
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    count: int = 0

    def known(self, name: str) -> list[tuple[float, float]]:
        """The times and values of a column, without those that are not known."""
        pairs = zip(self.time, self.columns.get(name, ()), strict=False)
        return [(time, value) for time, value in pairs if not math.isnan(value)]

    def mean(self, name: str, begin: float, end: float) -> float | None:
        """Over a span of time, its ends included."""
        first, last = bisect_left(self.time, begin), bisect_right(self.time, end)
        values = [value for value in self.columns.get(name, ())[first:last] if not math.isnan(value)]
        return fmean(values) if values else None

    def most(self, name: str) -> float | None:
        """The highest that is known."""
        return max((value for _, value in self.known(name)), default=None)

    def steps(self, name: str, begin: float = -math.inf, end: float = math.inf) -> list[tuple[float, float, float]]:
        """Of a counter: begin, end and growth of each interval in a span of time; one that falls has begun anew."""
        return [
            (before, time, value - count if value >= count else value)
            for (before, count), (time, value) in pairwise(self.known(name))
            if begin <= before < time <= end
        ]

    def ratios(
        self, part: str, whole: str, begin: float = -math.inf, end: float = math.inf
    ) -> list[tuple[float, float]]:
        """The growth of one counter over that of another, in the middle of each interval in which that grew."""
        parts = {(start, stop): grown for start, stop, grown in self.steps(part)}
        return [
            ((start + stop) / 2, parts[start, stop] / grown)
            for start, stop, grown in self.steps(whole, begin, end)
            if grown > _LEAST and (start, stop) in parts
        ]

    def growth(self, name: str, begin: float = -math.inf, end: float = math.inf) -> float | None:
        """Of a counter over a span of time; None where it is not known twice there."""
        inside = self.steps(name, begin, end)
        return sum(grown for _, _, grown in inside) if inside else None

    def total(self, name: str) -> float | None:
        """Of a counter, since it began, before the first sample too."""
        known = self.known(name)
        return known[0][1] + sum(grown for _, _, grown in self.steps(name)) if known else None

    def rate(self, name: str, begin: float = -math.inf, end: float = math.inf) -> float | None:
        """Of a counter, per second over a span of time."""
        inside = self.steps(name, begin, end)
        return sum(grown for _, _, grown in inside) / sum(stop - start for start, stop, _ in inside) if inside else None


def shifted(samples: TimeSeries, by: float) -> TimeSeries:
    """With the times moved."""
    return replace(samples, time=array("d", (each + by for each in samples.time)))


def thinned(samples: TimeSeries, counters: Iterable[str], peaks: Iterable[str], most: int) -> TimeSeries:
    """At most so many points: of a counter the last of each group, of a peak the highest, of what else the mean."""
    size = -(-len(samples.time) // most)
    if size <= 1:
        return samples
    columns = {}
    for name, values in samples.columns.items():
        if name in counters:
            columns[name] = array("d", (values[min(at + size, len(values)) - 1] for at in range(0, len(values), size)))
        else:
            groups = (values[at : at + size] for at in range(0, len(values), size))
            columns[name] = array("d", (_one(group, highest=name in peaks) for group in groups))
    time = array("d", (samples.time[min(at + size, len(samples.time)) - 1] for at in range(0, len(samples.time), size)))
    return replace(samples, time=time, columns=columns)


def _one(group: Sequence[float], *, highest: bool) -> float:
    known = [value for value in group if not math.isnan(value)]
    return (max if highest else fmean)(known) if known else NAN
