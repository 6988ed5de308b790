"""The files of a monitored run, as they are: a last line without its end is left out, and so is
what is not known.
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

from srunddp.util.hostlist import group_by_key
from srunddp.util.json_lines import parse
from srunddp.util.sample_files import MARKS, THROTTLED, SampleFile, Use

_MOST = 1500  # points of one series that are kept: about as many as a picture has columns
_BLOCK = 1024  # rows that are read at once
# A figure outside of these is no time.
_EARLIEST = 1e9  # in 2001
_LATEST = 1e10  # in 2286
_LARGEST = 1e18  # and so is any figure above
NAN = math.nan
# Suffixes of the columns that stand for a thinned gauge. With the blank they are the name of no
# column in a file.
_OF_A_GROUP: Mapping[str, Callable[[list[float]], float]] = {"": fmean, " least": min, " most": max}
_LEAST = 1e-9  # what is divided by less has no end


@dataclass(frozen=True)
class Mark:
    """One line of a file of marks: ``time`` is in seconds since the start of the run, ``value`` nan
    for none.
    """

    time: float
    rank: int
    name: str
    value: float


def samples(path: Path, kind: SampleFile) -> dict[str, TimeSeries]:
    """Read a file of samples.

    Args:
        path: of the file.
        kind: its columns; those of an older or a newer srunddp may be fewer or more.

    Returns:
        What it holds, by its key, with Unix time; nothing where it is no such file.
    """
    rows = _rows(path)
    header = next(rows, [])
    # The writer was ended before its first line, or the file is another program's.
    if "time" not in header or (kind.key and kind.key not in header):
        return {}
    numeric = ("time", *kind.having(Use.COUNTER, Use.GAUGE))
    names = [name for name in numeric if name in header]
    # A getter of one place alone would give no tuple: the first one again is left over.
    wanted = itemgetter(*map(header.index, names), 0)
    place = header.index(kind.key or "time")
    found: dict[str, dict[str, array[float]]] = {}
    last: dict[str, list[str]] = {}
    while block := list(islice(rows, _BLOCK)):  # a value alone costs more than its part of a block
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
    """1 where heat or the power brake kept a GPU's clock down, else 0."""
    return float(any(word in reasons.lower() for word in ("thermal", "brake")))


def _rising(times: Iterable[float]) -> Iterator[int]:
    """The places of the times that come after all before them; a clock that is set back says
    nothing.
    """
    latest = _EARLIEST
    for at, time in enumerate(times):
        if latest < time < _LATEST:
            latest = time
            yield at


def numbers(texts: Sequence[str]) -> list[float]:
    """Read texts as numbers; nan for a text that is none, and for a number that is too large."""
    try:
        # Nearly always all of them are numbers, and one try for the whole column is faster than one
        # for each.
        values = list(map(float, texts))
    except ValueError:
        values = list(map(_number, texts))
    # Infinity becomes nan, too; nan itself fails the comparison and stays.
    return [value if abs(value) < _LARGEST else NAN for value in values]


def _number(text: str) -> float:
    try:
        return float(text or "nan")  # an exception for each empty cell takes long
    except ValueError:
        return NAN


def marks(path: Path, rank: int) -> list[Mark]:
    """Read the marks of one rank, with Unix time; none where it is no such file."""
    rows = _rows(path)
    # A newer version may have added columns behind these.
    if next(rows, [])[:3] != list(MARKS.names):
        return []
    found = [(row[1], numbers([row[0], row[2]])) for row in rows if len(row) >= 3]
    return [
        Mark(time, rank, name, value) for name, (time, value) in found if _EARLIEST < time < _LATEST
    ]


def json_object(path: Path) -> dict[str, Any]:
    """Read a file such as ``run.json``; empty where it is not there, or not whole."""
    with suppress(OSError):
        return parse(path.read_text(encoding="utf-8", errors="replace"))
    return {}


def _rows(path: Path) -> Iterator[list[str]]:
    # Only "\n" ends a line: by default a "\r" in a damaged file would end one too, and a line that
    # is cut there would pass for a whole one.
    with suppress(OSError), open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        # Nothing is quoted: the writers let no comma in.
        yield from (line[:-1].split(",") for line in file if line.endswith("\n"))


@dataclass(frozen=True)
class TimeSeries:
    """The samples of one thing, in the order of time.

    Attributes:
        time: seconds since the start of the run.
        columns: by name, as long as ``time``; nan where a value is not known.
        texts: the last word of each column.
        count: how many there were before they were thinned.
    """

    time: Sequence[float] = ()
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    count: int = 0

    def known(self, name: str) -> list[tuple[float, float]]:
        """Return the times and values of a column, without those that are not known."""
        pairs = zip(self.time, self.columns.get(name, ()), strict=False)
        return [(time, value) for time, value in pairs if not math.isnan(value)]

    def spread(self, name: str) -> list[tuple[float, float]]:
        """Return the known values of a gauge, with its extremes.

        Of a series that was thinned these are the least and the most of each group, and its mean.
        """
        return [point for which in _OF_A_GROUP for point in self.known(name + which)]

    def mean(self, name: str, begin: float, end: float) -> float | None:
        """Average a gauge over a span of time.

        Args:
            name: of the column.
            begin: in seconds since the start of the run, as everywhere here.
            end: likewise; both ends are included.
        """
        values = [value for time, value in self.known(name) if begin <= time <= end]
        return fmean(values) if values else None

    def most(self, name: str) -> float | None:
        """Find the highest value of a gauge, thinned or not; None where none is known."""
        return max((value for _, value in self.spread(name)), default=None)

    def steps(
        self, name: str, begin: float = -math.inf, end: float = math.inf
    ) -> list[tuple[float, float, float]]:
        """Tell how much a counter grew in each interval between two samples.

        Args:
            name: of the column; a value that falls has begun anew.
            begin: of the span of time.
            end: of the span of time.

        Returns:
            Begin, end and growth of each interval.
        """
        return [
            # A counter that fell has begun at 0 in between: all that it shows is new.
            (before, time, value - count if value >= count else value)
            for (before, count), (time, value) in pairwise(self.known(name))
            if begin <= before < time <= end
        ]

    def ratios(
        self, part: str, whole: str, begin: float = -math.inf, end: float = math.inf
    ) -> list[tuple[float, float]]:
        """Divide the growth of one counter by that of another.

        Args:
            part: the column that is divided.
            whole: the column that divides.
            begin: of the span of time.
            end: of the span of time.

        Returns:
            Middle and ratio of each interval in which ``whole`` grew.
        """
        parts = {(start, stop): grown for start, stop, grown in self.steps(part)}
        return [
            ((start + stop) / 2, parts[start, stop] / grown)
            for start, stop, grown in self.steps(whole, begin, end)
            if grown > _LEAST and (start, stop) in parts
        ]

    def growth(self, name: str, begin: float = -math.inf, end: float = math.inf) -> float | None:
        """Tell how much a counter grew in a span of time.

        Args:
            name: of the column.
            begin: of the span of time.
            end: of the span of time.

        Returns:
            None where it is not known twice there.
        """
        inside = self.steps(name, begin, end)
        return sum(grown for _, _, grown in inside) if inside else None

    def total(self, name: str) -> float | None:
        """Return how far a counter has come since it began, also before the first sample.

        Returns:
            None where it is not known.
        """
        known = self.known(name)
        if known:
            return known[0][1] + sum(grown for _, _, grown in self.steps(name))
        return None

    def rate(self, name: str, begin: float = -math.inf, end: float = math.inf) -> float | None:
        """Tell how much a counter grew per second in a span of time.

        Args:
            name: of the column.
            begin: of the span of time.
            end: of the span of time.

        Returns:
            None where it is not known twice there.
        """
        inside = self.steps(name, begin, end)
        if not inside:
            return None
        growth = sum(grown for _, _, grown in inside)
        return growth / sum(stop - start for start, stop, _ in inside)

    def shifted(self, by: float) -> TimeSeries:
        """Return the series with so many seconds added to its times."""
        return replace(self, time=array("d", (each + by for each in self.time)))


def _thinned(samples: TimeSeries, kind: SampleFile) -> TimeSeries:
    """Of each group of points the last of a counter; of a gauge the mean, and beside it the least
    and the most.
    """
    size = -(-samples.count // _MOST)
    if size <= 1:
        return samples
    gauges = kind.having(Use.GAUGE)
    columns: dict[str, array[float]] = {}
    # The last value of a counter, with the last time of the group: the growth from group to group,
    # and with it every sum, stays exact.
    for name, values in {"time": samples.time, **samples.columns}.items():
        groups = [values[at : at + size] for at in range(0, len(values), size)]
        if name in gauges:
            # Nan is not itself.
            known = [[value for value in group if value == value] or [NAN] for group in groups]
            columns |= {
                name + which: array("d", map(choose, known))
                for which, choose in _OF_A_GROUP.items()
            }
        else:
            columns[name] = array("d", (group[-1] for group in groups))
    return replace(samples, time=columns.pop("time"), columns=columns)
