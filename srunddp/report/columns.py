"""The time axis of the report page and its columns: what is least, usual and most in each of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

from srunddp.report.csv_files import NAN

_COLUMNS, _MOST_TICKS = 240, 8
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_STEPS = (
    *(unit * count for unit in (1, 60) for count in (1, 2, 5, 10, 15, 30)),
    *(3600 * count for count in (1, 2, 3, 6, 12)),
    *(86400 * count for count in (1, 2, 5, 10, 20, 50, 100)),
)

Points = Iterable[tuple[float, float]]  # seconds since the start, and values
Columns = list[list[float]]  # the values in each column
Span = tuple[float, float]  # begin and end, in seconds
Range = tuple[float, float, float]  # least, median and most; nan where they are not known


@dataclass(frozen=True)
class TimeAxis:
    """The time that the charts of a page have in common. Its columns are each a whole number of samples long.

    Attributes:
        end: seconds since the start; interval: seconds between samples.
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
        """The times that are labelled, with their labels."""
        step = next((each for each in _STEPS if self.end < (_MOST_TICKS + 0.5) * each), self.end)
        size, unit = next(pair for pair in _UNITS if step >= pair[0] or pair[0] == 1)
        for at in range(int(self.end / step) + 1):
            yield at * step, f"{at * step / size:g} {unit}"

    def grouped(self, points: Points, by: float = 1.0) -> Columns:
        """The values in each column, times a factor."""
        found: Columns = [[] for _ in self.columns]
        for time, value in points:
            if 0 <= time <= self.end:
                found[min(int(time / self.width), len(found) - 1)].append(value * by)
        return found

    def medians(self, points: Points, by: float = 1.0) -> list[float]:
        """The median of each column, times a factor; nan where nothing is known."""
        return [median(values) if values else NAN for values in self.grouped(points, by)]


def ranges(series: Iterable[Columns]) -> list[Range]:
    """Of each column the least and the most of all series, and the median of their medians."""
    found = []
    for column in zip(*series, strict=True):
        known = [values for values in column if values]
        values = list(chain(*known))
        found.append((min(values), median(map(median, known)), max(values)) if known else (NAN, NAN, NAN))
    return found
