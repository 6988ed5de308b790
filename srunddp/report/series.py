"""Columns over time: what one file of samples has for one rank, device or node, and the sums over it.

What is not known is nan in here, and None in what leaves this module.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

NAN = math.nan
_LEAST = 1e-9  # what is divided by less has no end


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

    def within(self, name: str, begin: float, end: float) -> list[float]:
        """The known values of a span of time, its ends included."""
        first, last = bisect_left(self.time, begin), bisect_right(self.time, end)
        return [value for value in self.columns.get(name, ())[first:last] if not math.isnan(value)]

    def mean(self, name: str, begin: float = -math.inf, end: float = math.inf) -> float | None:
        """Over a span of time."""
        values = self.within(name, begin, end)
        return fmean(values) if values else None

    def most(self, name: str) -> float | None:
        """The highest that is known."""
        return max((value for _, value in self.known(name)), default=None)

    def steps(self, name: str) -> list[tuple[float, float, float]]:
        """Of a counter: begin, end and growth of each interval; one that falls has begun anew."""
        known = self.known(name)
        return [
            (before, time, value - count if value >= count else value)
            for (before, count), (time, value) in pairwise(known)
            if time > before
        ]

    def ratios(
        self, part: str, whole: str, begin: float = -math.inf, end: float = math.inf
    ) -> list[tuple[float, float]]:
        """The growth of one counter over that of another, in the middle of each interval in which that grew."""
        parts = {(start, stop): grown for start, stop, grown in self.steps(part)}
        return [
            ((start + stop) / 2, parts[start, stop] / grown)
            for start, stop, grown in self.steps(whole)
            if grown > _LEAST and (start, stop) in parts and start >= begin and stop <= end
        ]

    def growth(self, name: str, begin: float = -math.inf, end: float = math.inf) -> float | None:
        """Of a counter over a span of time; None where it is not known twice there."""
        inside = [grown for start, stop, grown in self.steps(name) if start >= begin and stop <= end]
        return sum(inside) if inside else None

    def total(self, name: str) -> float | None:
        """Of a counter, since it began, before the first sample too."""
        known = self.known(name)
        return known[0][1] + sum(grown for _, _, grown in self.steps(name)) if known else None

    def rate(self, name: str, begin: float = -math.inf, end: float = math.inf) -> float | None:
        """Of a counter, per second over a span of time."""
        inside = [(stop - start, grown) for start, stop, grown in self.steps(name) if start >= begin and stop <= end]
        return sum(grown for _, grown in inside) / sum(seconds for seconds, _ in inside) if inside else None


def shifted(samples: TimeSeries, by: float) -> TimeSeries:
    """With the times moved."""
    time = array("d", (each + by for each in samples.time))
    return TimeSeries(time, samples.columns, samples.texts, samples.count)


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
            column = [value for value in (values[at : at + size] for at in range(0, len(values), size))]
            columns[name] = array("d", (_one(group, highest=name in peaks) for group in column))
    time = array("d", (samples.time[min(at + size, len(samples.time)) - 1] for at in range(0, len(samples.time), size)))
    return TimeSeries(time, columns, samples.texts, samples.count)


def _one(group: Sequence[float], *, highest: bool) -> float:
    known = [value for value in group if not math.isnan(value)]
    if not known:
        return NAN
    return max(known) if highest else fmean(known)
