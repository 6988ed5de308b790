"""The axis of time that the charts of a page have in common, and the values in its columns."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from srunddp.report.csv_files import NAN

_COLUMNS = 240  # at most: each is some four pixels wide, and a mouse can still point at it
_MOST_TICKS = 8  # besides the one at 0
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
# Seconds between two ticks: round numbers of seconds, minutes, hours or days.
_STEPS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000),
)

Points = Iterable[tuple[float, float]]  # seconds since the start, and values
Columns = list[list[float]]  # the values in each column
Span = tuple[float, float]  # begin and end, in seconds


class Range(NamedTuple):
    """The values in one column; all are nan where none is known."""

    least: float
    middle: float
    most: float

    @property
    def is_known(self) -> bool:
        """Whether there is a value."""
        return not math.isnan(self.middle)


_UNKNOWN = Range(NAN, NAN, NAN)


@dataclass(frozen=True)
class TimeAxis:
    """The time that the charts of a page have in common. Its columns are each a whole number of
    samples long.

    Attributes:
        end: seconds since the start.
        interval: seconds between samples.
        epochs: when each begins, with its label: each chart shows them.
    """

    end: float
    interval: float = 1.0
    epochs: Sequence[tuple[float, str]] = ()

    @property
    def width(self) -> float:
        """Seconds of a column."""
        return self.interval * max(1, math.ceil(self.end / self.interval / _COLUMNS))

    @property
    def columns(self) -> list[Span]:
        """All of them; the last may be shorter."""
        count = max(1, math.ceil(self.end / self.width))
        return [(at * self.width, min(self.end, (at + 1) * self.width)) for at in range(count)]

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the times that are labelled, in seconds, with their labels."""
        step = next((each for each in _STEPS if self.end < (_MOST_TICKS + 0.5) * each), self.end)
        size, unit = next(pair for pair in _UNITS if step >= pair[0] or pair[0] == 1)
        for at in range(int(self.end / step) + 1):
            yield at * step, f"{at * step / size:g} {unit}"

    def place(self, time: float) -> str:
        """Write where a time stands, as a part of the width: ``12.50%``."""
        return f"{time / self.end:.2%}"

    def grouped(self, points: Points, by: float = 1.0) -> Columns:
        """Sort values into the columns; a column without any has an empty list.

        Args:
            points: Times and values; those outside of the axis are left out.
            by: What each value is multiplied with.
        """
        found: Columns = [[] for _ in self.columns]
        for time, value in points:
            if 0 <= time <= self.end:
                # The end itself would be in a column after the last.
                found[min(int(time / self.width), len(found) - 1)].append(value * by)
        return found


def ranges(series: Iterable[Columns]) -> list[Range]:
    """Find for each column the least and the most of all series.

    The middle is the median of their medians.
    """
    return [_range(column) for column in zip(*series, strict=True)]


def _range(column: Sequence[list[float]]) -> Range:
    known = [values for values in column if values]
    if not known:
        return _UNKNOWN
    # Of the medians, so that a series with more samples in this column weighs no more than the
    # others.
    return Range(
        min(min(values) for values in known),
        median(median(values) for values in known),
        max(max(values) for values in known),
    )
