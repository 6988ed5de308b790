"""Reads the files of a monitored run. A last line without a line end is left out, because its
writer was interrupted.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from srunddp.report.summary import GpuFaultFigures
from srunddp.util import shared_file
from srunddp.util.hostlist import group_by_key
from srunddp.util.json_lines import parse
from srunddp.util.sample_files import GPU_FAULTS, MARKS, THROTTLED, SampleFile, Use

_MOST = 1500  # points kept of each series; a chart has fewer columns than that
_BLOCK = 1024  # rows read at once
# A number outside this range is not a time in Unix seconds.
_EARLIEST = 1e9  # in 2001
_LATEST = 1e10  # in 2286
_LARGEST = 1e18  # a larger number is not a valid figure
NAN = math.nan
# A thinned gauge has three columns, with these suffixes. Because of the blank, no column of a file
# can have such a name.
_OF_A_GROUP: Mapping[str, Callable[[list[float]], float]] = {"": fmean, " least": min, " most": max}
_LEAST = 1e-9  # a smaller divisor would give a ratio without meaning


@dataclass(frozen=True)
class Mark:
    """One line of a marks file.

    Attributes:
        time: Seconds since the start of the run; Unix time until the run has been read.
        rank: The rank that wrote the mark.
        name: What the rank began or finished at that time.
        value: The number that the mark has; nan if it has none.
    """

    time: float
    rank: int
    name: str
    value: float


def samples(path: Path, kind: SampleFile) -> dict[str, TimeSeries]:
    """Read a file of readings.

    Args:
        path: The file.
        kind: The columns that are expected; another version of srunddp may have written fewer or
            more.

    Returns:
        The series in the file by key (a rank, link or GPU; "" if the file is about one thing), with
        Unix time. Empty if the file is missing or has other columns.
    """
    rows = _rows(path)
    header = next(rows, [])
    # The header is missing if the writer ended before it wrote the first line, or if another
    # program wrote the file.
    if "time" not in header or (kind.key and kind.key not in header):
        return {}
    numeric = ("time", *kind.having(Use.COUNTER, Use.GAUGE))
    names = [name for name in numeric if name in header]
    # Add column 0 once more, because itemgetter would return no tuple for a single column. The loop
    # below ignores the additional value.
    wanted = itemgetter(*map(header.index, names), 0)
    place = header.index(kind.key or "time")
    found: dict[str, dict[str, array[float]]] = {}
    last: dict[str, list[str]] = {}
    # Read the rows in blocks, because converting each value by itself would take longer.
    while block := list(islice(rows, _BLOCK)):
        whole = (row for row in block if len(row) == len(header))
        by_key = group_by_key((row[place] if kind.key else "", row) for row in whole)
        for key, theirs in by_key.items():
            columns = found.setdefault(key, {name: array("d") for name in names})
            for name, texts in zip(names, zip(*map(wanted, theirs), strict=True), strict=False):
                columns[name].extend(_values(name, texts))
            last[key] = theirs[-1]
    series = {
        key: _series(columns, dict(zip(header, last[key], strict=True)))
        for key, columns in found.items()
    }
    return {key: _thinned(each, kind) for key, each in series.items() if each.count}


def _values(name: str, texts: Sequence[str]) -> Iterable[float]:
    if name == THROTTLED:
        return map(_is_slowed, texts)
    return numbers(texts)


def _series(columns: dict[str, array[float]], texts: dict[str, str]) -> TimeSeries:
    keep = list(_rising(columns["time"]))
    if len(keep) < len(columns["time"]):
        columns = {name: array("d", (each[at] for at in keep)) for name, each in columns.items()}
    return TimeSeries(columns.pop("time"), columns, texts, len(keep))


@lru_cache(64)
def _is_slowed(reasons: str) -> float:
    """Return 1 if heat or the power brake kept the GPU's clock down, else 0."""
    return float(any(word in reasons.lower() for word in ("thermal", "brake")))


def _rising(times: Iterable[float]) -> Iterator[int]:
    """Yield the positions of the times that are later than all times before them. This skips the
    readings that were taken after a clock was set back, until it has caught up.
    """
    latest = _EARLIEST
    for at, time in enumerate(times):
        if latest < time < _LATEST:
            latest = time
            yield at


def numbers(texts: Sequence[str]) -> list[float]:
    """Convert texts to numbers; nan for other texts, and for numbers of 1e18 or more."""
    try:
        # Try the whole column at once, because nearly always all texts are numbers, and a try for
        # each text would be slower.
        values = list(map(float, texts))
    except ValueError:
        values = list(map(_number, texts))
    # Infinity becomes nan here; nan fails the comparison and stays nan.
    return [value if abs(value) < _LARGEST else NAN for value in values]


def _number(text: str) -> float:
    try:
        return float(text or "nan")  # avoids an exception for an empty cell, which would be slow
    except ValueError:
        return NAN


def marks(path: Path, rank: int) -> list[Mark]:
    """Read the marks of one rank, with Unix time; empty if the file is no marks file."""
    rows = _rows(path)
    # Compare only the known columns: a newer version may have added others after them.
    if next(rows, [])[:3] != list(MARKS.names):
        return []
    found = [(row[1], numbers([row[0], row[2]])) for row in rows if len(row) >= 3]
    return [
        Mark(time, rank, name, value) for name, (time, value) in found if _EARLIEST < time < _LATEST
    ]


def gpu_faults(path: Path, node: str) -> list[GpuFaultFigures]:
    """Read the faults of one node's GPUs, with Unix time; empty if the file has other columns."""
    rows = _rows(path)
    if next(rows, [])[: len(GPU_FAULTS.names)] != list(GPU_FAULTS.names):
        return []
    found = []
    for row in rows:
        if len(row) < len(GPU_FAULTS.names):
            continue
        time, uuid, index, kind, xid, fault = row[: len(GPU_FAULTS.names)]
        (at,) = numbers([time])
        if _EARLIEST < at < _LATEST:
            number = int(xid) if xid.isdecimal() else None
            found.append(GpuFaultFigures(node, index, uuid, fault, kind, number, at))
    return found


def json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file such as ``run.json``; empty if the file is missing or damaged."""
    with suppress(OSError):
        return parse(shared_file.read_plain_text(path))
    return {}


def _rows(path: Path) -> Iterator[list[str]]:
    with suppress(OSError):
        for line in shared_file.lines_of(path):
            # Only "\n" ends a line, and a line without it was cut. Fields are not quoted: the
            # writers keep commas out of them.
            if line.endswith(b"\n"):
                yield line[:-1].decode(errors="replace").split(",")


@dataclass(frozen=True)
class TimeSeries:
    """The readings of one rank, node, link or GPU, in the order of time.

    Attributes:
        time: Seconds since the start of the run.
        columns: The columns by name, each as long as ``time``; nan stands for an unknown value.
        texts: The text of the last reading in each column, by column.
        count: How many readings there were before thinning.
    """

    time: Sequence[float] = ()
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    count: int = 0

    def known(self, name: str) -> list[tuple[float, float]]:
        """Return (time, value) pairs of a column, without unknown values."""
        pairs = zip(self.time, self.columns.get(name, ()), strict=False)
        return [(time, value) for time, value in pairs if not math.isnan(value)]

    def spread(self, name: str) -> list[tuple[float, float]]:
        """Return (time, value) pairs of a gauge, including its extremes.

        If the series was thinned, these are the mean, the lowest and the highest value of each
        group.
        """
        return [point for which in _OF_A_GROUP for point in self.known(name + which)]

    def mean(self, name: str, begin: float, end: float) -> float | None:
        """Return the mean of a gauge over a span of time; None if it has no value there.

        Args:
            name: The column.
            begin: The beginning of the span, in seconds since the start of the run.
            end: The end of the span, which is included, as is the beginning.
        """
        values = [value for time, value in self.known(name) if begin <= time <= end]
        return fmean(values) if values else None

    def most(self, name: str) -> float | None:
        """Return the highest value of a gauge, thinned or not; None if no value is known."""
        return max((value for _, value in self.spread(name)), default=None)

    def steps(
        self, name: str, begin: float = -math.inf, end: float = math.inf
    ) -> list[tuple[float, float, float]]:
        """Compute how much a counter grew between neighbouring readings.

        Args:
            name: The column.
            begin: The beginning of the span of time, in seconds since the start of the run.
            end: The end of the span.

        Returns:
            Beginning, end and growth of each interval that lies within the span.
        """
        return [
            # A counter that fell has started again from 0, so its whole value is growth.
            (before, time, value - count if value >= count else value)
            for (before, count), (time, value) in pairwise(self.known(name))
            if begin <= before < time <= end
        ]

    def ratios(
        self, part: str, whole: str, begin: float = -math.inf, end: float = math.inf
    ) -> list[tuple[float, float]]:
        """Divide the growth of one counter by the growth of another.

        Args:
            part: The column of the dividend.
            whole: The column of the divisor.
            begin: The beginning of the span of time, in seconds since the start of the run.
            end: The end of the span.

        Returns:
            The middle of each interval in which ``whole`` grew, and the ratio there.
        """
        parts = {(start, stop): grown for start, stop, grown in self.steps(part)}
        return [
            ((start + stop) / 2, parts[start, stop] / grown)
            for start, stop, grown in self.steps(whole, begin, end)
            if grown > _LEAST and (start, stop) in parts
        ]

    def growth(self, name: str, begin: float = -math.inf, end: float = math.inf) -> float | None:
        """Compute how much a counter grew within a span of time.

        Args:
            name: The column.
            begin: The beginning of the span, in seconds since the start of the run.
            end: The end of the span.

        Returns:
            None unless the span contains two known values.
        """
        inside = self.steps(name, begin, end)
        return sum(grown for _, _, grown in inside) if inside else None

    def total(self, name: str) -> float | None:
        """Return the total count of a counter: its first value, plus the growth since then.

        Returns:
            None if no value is known.
        """
        known = self.known(name)
        if known:
            return known[0][1] + sum(grown for _, _, grown in self.steps(name))
        return None

    def rate(self, name: str, begin: float = -math.inf, end: float = math.inf) -> float | None:
        """Compute how much a counter grew per second within a span of time.

        Args:
            name: The column.
            begin: The beginning of the span, in seconds since the start of the run.
            end: The end of the span.

        Returns:
            None unless the span contains two known values.
        """
        inside = self.steps(name, begin, end)
        if not inside:
            return None
        growth = sum(grown for _, _, grown in inside)
        return growth / sum(stop - start for start, stop, _ in inside)

    def shifted(self, by: float) -> TimeSeries:
        """Return the series with ``by`` seconds added to all its times."""
        return replace(self, time=array("d", (each + by for each in self.time)))


def _thinned(samples: TimeSeries, kind: SampleFile) -> TimeSeries:
    """Reduce a long series to groups of readings.

    A group keeps the last value of a counter, and the mean, the lowest and the highest value of a
    gauge.
    """
    size = -(-samples.count // _MOST)
    if size <= 1:
        return samples
    gauges = kind.having(Use.GAUGE)
    columns: dict[str, array[float]] = {}
    # With the last value and the last time of each group, a counter's growth from group to group
    # stays exact, and so do all sums of it.
    for name, values in {"time": samples.time, **samples.columns}.items():
        groups = [values[at : at + size] for at in range(0, len(values), size)]
        if name in gauges:
            # Only nan differs from itself.
            known = [[value for value in group if value == value] or [NAN] for group in groups]
            columns |= {
                name + which: array("d", map(choose, known))
                for which, choose in _OF_A_GROUP.items()
            }
        else:
            columns[name] = array("d", (group[-1] for group in groups))
    return replace(samples, time=columns.pop("time"), columns=columns)
