"""Series as pictures show them: few as lines, many as a band from the least to the most with the median."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from srunddp.report.series import NAN, Samples

_COLUMNS = 240


@dataclass(frozen=True)
class Line:
    """One series.

    Attributes:
        points: seconds since the start, and values.
    """

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Band:
    """Many series, at the same times; nan where none has a value."""

    times: list[float]
    least: list[float]
    middle: list[float]
    most: list[float]


@dataclass(frozen=True)
class Grid:
    """Spans of time of equal length.

    Attributes:
        begin, end: seconds since the start; columns: how many there are.
    """

    begin: float
    end: float
    columns: int

    @property
    def width(self) -> float:
        """Seconds of one."""
        return (self.end - self.begin) / self.columns

    @property
    def edges(self) -> list[float]:
        """Where they begin, and where the last ends."""
        return [self.begin + self.width * at for at in range(self.columns + 1)]

    def covered(self, begin: float, end: float) -> Iterable[tuple[int, float]]:
        """The columns that a span lies in, and its seconds in each."""
        first = max(0, int((begin - self.begin) / self.width))
        last = min(self.columns - 1, int((end - self.begin) / self.width))
        for at in range(first, last + 1):
            left = self.begin + at * self.width
            seconds = min(end, left + self.width) - max(begin, left)
            if seconds > 0:
                yield at, seconds


def grid(begin: float, end: float, interval: float) -> Grid:
    """As fine as a picture can show, and not finer than the samples are."""
    length = max(end - begin, interval, 1e-3)
    return Grid(begin, begin + length, max(1, min(_COLUMNS, int(length / max(interval, 1e-3)))))


def gauge(samples: Samples, name: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """The known values of a column."""
    return [(time, value * scale) for time, value in samples.known(name)]


def rates(samples: Samples, name: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """Of a counter, per second, in the middle of each interval."""
    return [((begin + end) / 2, grown / (end - begin) * scale) for begin, end, grown in samples.steps(name)]


def whole(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Without what follows its end, and but for a few also without the interval of it, which is not its rate."""
    last = max((at for at, (_, value) in enumerate(points) if value > 0), default=0)
    return points[: last if last > 2 else last + 1]


def summed(series: Iterable[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The sum of series that have the same times; what one of them lacks is left out."""
    every = [dict(each) for each in series]
    times = set.intersection(*(set(each) for each in every)) if every else set()
    return [(time, sum(each[time] for each in every)) for time in sorted(times)]


def mean_of(series: Iterable[Sequence[tuple[float, float]]], over: Grid) -> list[tuple[float, float]]:
    """The mean of several series whose times differ."""
    columns = [_gathered(each, over) for each in series]
    found = []
    for at in range(over.columns):
        known = [column[at] for column in columns if not math.isnan(column[at])]
        if known:
            found.append((over.begin + (at + 0.5) * over.width, sum(known) / len(known)))
    return found


def band(lines: Sequence[Line], over: Grid) -> Band:
    """Least, median and most of several series, on one grid."""
    columns = [_gathered(line.points, over) for line in lines]
    times = [over.begin + (at + 0.5) * over.width for at in range(over.columns)]
    known = [[column[at] for column in columns if not math.isnan(column[at])] for at in range(over.columns)]

    def each(of: Callable[[list[float]], float]) -> list[float]:
        return [of(values) if values else NAN for values in known]

    return Band(times, each(min), each(median), each(max))


def _gathered(points: Sequence[tuple[float, float]], over: Grid) -> list[float]:
    sums, counts = [0.0] * over.columns, [0] * over.columns
    for time, value in points:
        at = int((time - over.begin) / over.width)
        if 0 <= at < over.columns or time == over.end:
            at = min(at, over.columns - 1)
            sums[at] += value
            counts[at] += 1
    return [total / count if count else NAN for total, count in zip(sums, counts, strict=True)]


def heat(samples: Samples, part: str, whole: str, over: Grid) -> list[float]:
    """The growth of one counter over that of another in each column; nan where that did not grow.

    Of intervals in which both are known: before the first step one of them may not be.
    """
    tops, belows = [0.0] * over.columns, [0.0] * over.columns
    parts = {(begin, end): grown for begin, end, grown in samples.steps(part)}
    for begin, end, grown in samples.steps(whole):
        for at, seconds in over.covered(begin, end) if (begin, end) in parts else ():
            tops[at] += parts[begin, end] * seconds / (end - begin)
            belows[at] += grown * seconds / (end - begin)
    return [top / below if below > 1e-9 else NAN for top, below in zip(tops, belows, strict=True)]
