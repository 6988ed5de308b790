"""Defines the time axis that all charts of a page share, and sorts values into its columns."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from srunddp.report.csv_files import NAN

_COLUMNS = 240  # at most; each is about four pixels wide, so a mouse can still point at it
_MOST_TICKS = 8  # not counting the tick at 0
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
# Seconds between two ticks, in round numbers of seconds, minutes, hours or days.
_STEPS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000),
)

Points = Iterable[tuple[float, float]]  # pairs of seconds since the start and a value
Columns = list[list[float]]  # the values in each column
Span = tuple[float, float]  # beginning and end in seconds since the start


class Range(NamedTuple):
    """Lowest, middle and highest value in one column; all are nan if the column has none."""

    least: float
    middle: float
    most: float

    @property
    def is_known(self) -> bool:
        """Whether the column has a value."""
        return not math.isnan(self.middle)


_UNKNOWN = Range(NAN, NAN, NAN)


@dataclass(frozen=True)
class TimeAxis:
    """The time axis of all charts of a page. Each column spans a whole number of readings.

    Attributes:
        end: Seconds from the start to the end of the axis.
        interval: Seconds between readings.
        epochs: When each epoch begins, with its label; every chart shows them.
    """

    end: float
    interval: float = 1.0
    epochs: Sequence[tuple[float, str]] = ()

    @property
    def width(self) -> float:
        """The width of a column in seconds."""
        return self.interval * max(1, math.ceil(self.end / self.interval / _COLUMNS))

    @property
    def columns(self) -> list[Span]:
        """Beginning and end of every column; the last one may be shorter."""
        count = max(1, math.ceil(self.end / self.width))
        return [(at * self.width, min(self.end, (at + 1) * self.width)) for at in range(count)]

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the times with a label (in seconds since the start) and their labels."""
        step = next((each for each in _STEPS if self.end < (_MOST_TICKS + 0.5) * each), self.end)
        size, unit = next(pair for pair in _UNITS if step >= pair[0] or pair[0] == 1)
        for at in range(int(self.end / step) + 1):
            yield at * step, f"{at * step / size:g} {unit}"

    def place(self, time: float) -> str:
        """Return the position of a time, in percent of the axis: ``12.50%``."""
        return f"{time / self.end:.2%}"

    def grouped(self, points: Points, by: float = 1.0) -> Columns:
        """Distribute values over the columns; a column without any gets an empty list.

        Args:
            points: Times and values; points outside the axis are left out.
            by: A factor for each value.
        """
        found: Columns = [[] for _ in self.columns]
        for time, value in points:
            if 0 <= time <= self.end:
                # min(), because the end of the axis itself would fall into a column after the last.
                found[min(int(time / self.width), len(found) - 1)].append(value * by)
        return found


def ranges(series: Iterable[Columns]) -> list[Range]:
    """Find the lowest and the highest value of all series in each column.

    The middle is the median of the medians of the series.
    """
    return [_range(column) for column in zip(*series, strict=True)]


def _range(column: Sequence[list[float]]) -> Range:
    known = [values for values in column if values]
    if not known:
        return _UNKNOWN
    # Take the median of each series first, so that a series with more readings does not weigh more.
    return Range(
        min(min(values) for values in known),
        median(median(values) for values in known),
        max(max(values) for values in known),
    )
