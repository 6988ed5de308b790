"""Draws charts over time: panels with a value axis, heat maps, and bars."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import NamedTuple

from srunddp.report import format
from srunddp.report.axis import Points, Range, Span, TimeAxis, ranges
from srunddp.report.figure import (
    LEVELS,
    Canvas,
    EpochMark,
    Figure,
    Hover,
    Key,
    Label,
    Scale,
    Shape,
    Tick,
    box,
    line,
    short_label,
)
from srunddp.util.hostlist import group_by_key

_WIDTH = 1000  # the width of a panel in its own units, before it is stretched to the page
_HEIGHT = 110  # pixels, of a panel
_HEAT_HEIGHT = 320  # pixels; the most for a heat map
_BARS_HEIGHT = 160  # pixels; the most for a chart of bars
_ROW = 16  # pixels; the most for one row of a heat map or of bars
_FINEST = 400  # a bar is at least 1/400 of the width: a narrower one would not be visible
_MOST_MARKS = 60  # the most epochs that are marked in a chart
_MOST_NUMBERS = 8  # the most of these marks that show the number of their epoch
_ALIKE = 1e-6  # relative difference below which two ticks would have the same label
_LABEL_PIXELS = 13  # smallest distance between the labels of two rows

Lines = Iterable[tuple[str, Points]]  # the name of each series, and its points
_Series = Mapping[str, Sequence[Range]]  # for each name, the range of the values in each column


class _Cell(NamedTuple):
    """A coloured part of a row.

    Attributes:
        colour: The CSS class of the colour in page.css.
        row: The number of the row, counted from 0 at the top.
        begin: The beginning, in seconds since the start of the run.
        end: The end, in seconds since the start of the run.
    """

    colour: str
    row: int
    begin: float
    end: float


class _Row(NamedTuple):
    """The name of a row, and the lines that are shown when the mouse is over it."""

    name: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Chart:
    """A chart over time: a panel with a value axis, or a row of coloured cells or bars for each
    name.

    Attributes:
        title: What the chart shows.
        axis: The time axis.
        unit: The unit of the values.
        by: The factor that converts the values of a series to ``unit``.
        most: A value that the value axis includes, even if all values are lower.
        from_zero: Whether the value axis includes 0; else it begins near the lowest value.
        limit: A value at which a line is drawn across the panel; 0 for none.
        joined: Whether a line connects its values across the columns that have none, instead of
            having a gap there.
        figure: The figure of the summary that the legend shows. If it is empty, the legend shows
            the median and the range of the drawn values, which may differ from the summary's mean.
        note: A text that follows the title.
    """

    title: str
    axis: TimeAxis
    unit: str = ""
    by: float = 1.0
    most: float = 0.0
    from_zero: bool = True
    limit: float = 0.0
    joined: bool = False
    figure: str = ""
    note: str = ""

    def panel(self, lines: Lines, most: int = 1, what: str = "") -> Figure | None:
        """Draw a line of medians and a band from lowest to highest for each series.

        Args:
            lines: The series, by name.
            most: If there are more series than this, one line and one band stand for all.
            what: What the series are called together in the legend, for example ``ranks``.

        Returns:
            The chart; None if no value is known.
        """
        grouped = {name: self.axis.grouped(points, self.by) for name, points in lines}
        known = {name: columns for name, columns in grouped.items() if any(columns)}
        if not known:
            return None
        if len(known) > most:
            together = f"median of {len(known)} {what} (range)"
            return self._panel({together: ranges(known.values())})
        return self._panel({name: ranges([columns]) for name, columns in known.items()})

    def _panel(self, series: _Series) -> Figure:
        values = self._value_axis(series)
        legend = [
            Key(f"c{at}", f"{name}: {self.figure or _shown(found)}")
            for at, (name, found) in enumerate(series.items())
        ]
        limit = None
        if self.limit:
            limit = values.y(self.limit)
            legend.append(Key("limit", f"limit: {format.number(self.limit)}"))
        shapes = [
            shape
            for at, found in enumerate(series.values())
            for shape in self._shapes(f"c{at}", found, values)
        ]
        heights = [values.y(tick) for tick in values.ticks]
        return self._figure(
            _HEIGHT,
            legend,
            Canvas(_WIDTH, _HEIGHT, shapes, list(self._hovers(series))),
            labels=[
                Label(short_label(f"{tick:,.10g}"), y)
                for tick, y in zip(values.ticks, heights, strict=True)
            ],
            grid=heights,
            limit=limit,
        )

    def _value_axis(self, series: _Series) -> "_ValueAxis":
        known = [
            value for found in series.values() for each in found if each.is_known for value in each
        ]
        least = min(known)
        if self.from_zero:
            least = min(least, 0.0)
        return _ValueAxis(_value_ticks(least, max(*known, self.most, self.limit)))

    def _x(self, time: float) -> float:
        return time / self.axis.end * _WIDTH

    def _shapes(self, colour: str, found: Sequence[Range], values: "_ValueAxis") -> Iterator[Shape]:
        """Yield the band and the line of one series. A new band and line begin after each gap."""
        middles = [self._x((begin + end) / 2) for begin, end in self.axis.columns]
        places = list(zip(middles, found, strict=True))
        # Lines are joined if their series have fewer points than there are columns: with a gap at
        # each column without a value, every point would stand alone.
        if self.joined:
            places = [(x, each) for x, each in places if each.is_known]
        for is_known, group in groupby(places, key=lambda place: place[1].is_known):
            if not is_known:
                continue
            part = [(x, values.range(each)) for x, each in group]
            if any(each.least != each.most for _, each in part):
                above = [(x, each.most) for x, each in part]
                below = [(x, each.least) for x, each in part]
                yield Shape(f"band {colour}", f"{line([*above, *reversed(below)])}z")
            kind = "line" if len(part) > 1 else "line dot"
            # A path with a single point has no length and would be invisible, so add a tenth of a
            # unit.
            path = f"{line([(x, each.middle) for x, each in part])}h.1"
            yield Shape(f"{kind} {colour}", path)

    def _hovers(self, series: _Series) -> Iterator[Hover]:
        """Yield an area for each column that has a value: with the mouse over it, the page shows
        the column's time, and the values of the series.
        """
        for at, (begin, end) in enumerate(self.axis.columns):
            words = [
                f"{name}: {_shown([found[at]])} {self.unit}"
                for name, found in series.items()
                if found[at].is_known
            ]
            if words:
                path = box(self._x(begin), self._x(end), 0, _HEIGHT)
                yield Hover(path, [format.clock(begin), *words])

    def heat_map(
        self,
        lines: Lines,
        marked: Collection[str] = (),
        limits: Span | None = None,
        *,
        highest: bool = False,
    ) -> Figure | None:
        """Draw a row of coloured cells for each name.

        Args:
            lines: The series, by name; each gets a row.
            marked: The names of the rows to mark, because their values stand out.
            limits: The values of the first and the last colour. The last colour is the most
                visible, so ``(100, 0)`` makes idle GPUs stand out. None to choose a range by the
                values: from 0 to twice the median.
            highest: Whether a cell shows the highest value of its column instead of the median.

        Returns:
            The chart; None if no value is known.
        """
        rows: dict[str, list[float]] = {}
        for name, points in lines:
            columns = ranges([self.axis.grouped(points, self.by)])
            rows[name] = [each.most if highest else each.middle for each in columns]
        known = [value for row in rows.values() for value in row if not math.isnan(value)]
        if not known:
            return None
        colours = _Colours.of(known, limits)
        cells = [
            cell
            for number, row in enumerate(rows.values())
            for cell in self._joined_cells(number, row, colours)
        ]
        named = [
            _Row(name, [f"{name}: {_shown(Range(at, at, at) for at in row)} {self.unit}"])
            for name, row in rows.items()
        ]
        return self._rows(named, cells, self._scale(colours, max(known)), marked, _HEAT_HEIGHT)

    def _joined_cells(
        self, number: int, row: Sequence[float], colours: "_Colours"
    ) -> Iterator[_Cell]:
        """Yield the cells of a row, with neighbours of the same colour joined.

        Single cells would make the page of a long run too large.
        """
        coloured = zip(map(colours.colour, row), self.axis.columns, strict=True)
        for colour, group in groupby(coloured, key=lambda pair: pair[0]):
            spans = [span for _, span in group]
            yield _Cell(colour, number, spans[0][0], spans[-1][1])

    def _scale(self, colours: "_Colours", most: float) -> Scale:
        high = f"{format.number(colours.high)} {self.unit}"
        if most > colours.high > colours.low:
            high += " or more"
        return Scale(format.number(colours.low), high)

    def bars(
        self, rows: Mapping[str, Sequence[tuple[str, Span]]], names: Sequence[str]
    ) -> Figure | None:
        """Draw the spans of each row as bars.

        Args:
            rows: For the name of each row, the names and times of its spans.
            names: All names that spans may have; each gets a colour.

        Returns:
            The chart; None if there is no span.
        """
        shortest = self.axis.end / _FINEST
        cells = [
            _Cell(f"c{names.index(name)}", at, begin, max(end, begin + shortest))
            for at, spans in enumerate(rows.values())
            for name, (begin, end) in spans
        ]
        if not cells:
            return None
        used = {cell.colour for cell in cells}
        legend = [Key(f"c{at}", name) for at, name in enumerate(names) if f"c{at}" in used]
        named = [_Row(name, [name, *_lasted(spans)]) for name, spans in rows.items()]
        return self._rows(named, cells, legend, (), _BARS_HEIGHT)

    def _rows(
        self,
        rows: Sequence[_Row],
        cells: Sequence[_Cell],
        legend: Sequence[Key] | Scale,
        marked: Collection[str],
        height: int,
    ) -> Figure:
        """Draw rows of cells, with some rows marked; ``height`` is the most in pixels."""
        pixels = min(_ROW * len(rows), height)
        places = [number for number, row in enumerate(rows) if row.name in marked]
        # One path for each colour, because a browser is slow with thousands of paths.
        by_colour = group_by_key(
            (cell.colour, box(cell.begin, cell.end, cell.row, 1)) for cell in cells
        )
        shapes = [Shape(f"cell {colour}", "".join(found)) for colour, found in by_colour.items()]
        shapes += [Shape("marked", box(0, self.axis.end, at, 1)) for at in places]
        hovers = [Hover(box(0, self.axis.end, at, 1), row.lines) for at, row in enumerate(rows)]
        return self._figure(
            pixels,
            legend,
            Canvas(self.axis.end, len(rows), shapes, hovers),
            labels=list(_row_labels([row.name for row in rows], places, pixels)),
        )

    def _figure(
        self,
        pixels: int,
        legend: Sequence[Key] | Scale,
        canvas: Canvas,
        labels: Sequence[Label],
        grid: Sequence[float] = (),
        limit: float | None = None,
    ) -> Figure:
        """Return a figure with what all charts have in common: title, epochs and time axis."""
        unit = f" ({self.unit})" if self.unit else ""
        return Figure(
            name=f"{self.title}{unit}{self.note}",
            pixels=pixels,
            legend=legend,
            grid=grid,
            labels=labels,
            limit=limit,
            canvas=canvas,
            epochs=self._epochs(),
            ticks=[
                Tick(self.axis.place(time), words, is_minor=at % 2 == 1)
                for at, (time, words) in enumerate(self.axis.ticks())
            ],
        )

    def _epochs(self) -> list[EpochMark]:
        """Return at most 60 epoch marks, of which at most eight show their number."""
        every = math.ceil(len(self.axis.epochs) / _MOST_MARKS) or 1
        shown = self.axis.epochs[::every]
        numbered = math.ceil(len(shown) / _MOST_NUMBERS) or 1
        return [
            EpochMark(self.axis.place(time), None if at % numbered else words)
            for at, (time, words) in enumerate(shown)
        ]


@dataclass(frozen=True)
class _ValueAxis:
    """The value axis of a panel, given by its ticks in ascending order."""

    ticks: Sequence[float]

    def y(self, value: float) -> float:
        """Return the position of a value, in pixels from the top."""
        return _HEIGHT * (self.ticks[-1] - value) / (self.ticks[-1] - self.ticks[0])

    def range(self, values: Range) -> Range:
        """Return the positions of a column's values, in pixels from the top."""
        return Range(self.y(values.least), self.y(values.middle), self.y(values.most))


@dataclass(frozen=True)
class _Colours:
    """The colours of a heat map.

    Attributes:
        low: The value of the first colour.
        high: The value of the last colour, which may be lower than ``low``.
    """

    low: float
    high: float

    @classmethod
    def of(cls, known: Sequence[float], limits: Span | None) -> "_Colours":
        """Return colours for the range ``limits``; without limits, from 0 to twice the median."""
        if limits:
            return cls(*limits)
        # The range does not end at the highest value: a single stall would make all other values
        # look alike. If the median is 0 because most values are, use the highest value after all.
        return cls(0.0, 2 * median(known) or max(known))

    def colour(self, value: float) -> str:
        """Return the CSS class of a value: ``h0`` to ``h15``, or ``missing`` for nan."""
        if math.isnan(value):
            return "missing"
        level = int(LEVELS * (value - self.low) / (self.high - self.low or 1.0))
        # Values at the limits and beyond them have the first or the last colour.
        return f"h{max(0, min(LEVELS - 1, level))}"


def _value_ticks(low: float, high: float) -> list[float]:
    """Return round ticks that cover the range from ``low`` to ``high``; at least two."""
    apart = high - low
    if apart <= abs(high) * _ALIKE:
        apart = abs(high) or 1.0
    finest = apart / 5
    # The tolerances below are for rounding errors: 3 * 0.1 / 0.1 is slightly above 3 and would give
    # a tick too many.
    power = 10.0 ** math.floor(math.log10(finest))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= finest * 0.999)
    first = math.floor(low / step)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [at * step for at in range(first, last + 1)]


def _row_labels(names: Sequence[str], marked: Collection[int], pixels: int) -> Iterator[Label]:
    """Yield the labels of all marked rows, and of as many others as fit without touching them."""
    row = pixels / len(names)
    every = 2 ** max(0, math.ceil(math.log2(_LABEL_PIXELS / row)))
    for at in range(0, len(names), every):
        # A label this close to that of a marked row would overlap it.
        if all(abs(at - place) >= every for place in marked):
            yield Label(short_label(names[at]), (at + 0.5) * row)
    for at in marked:
        yield Label(short_label(names[at]), (at + 0.5) * row, is_marked=True)


def _lasted(spans: Iterable[tuple[str, Span]]) -> Iterator[str]:
    """Yield a line for each name: how long its spans lasted in total, and their number if there are
    several.
    """
    lengths = group_by_key((name, end - begin) for name, (begin, end) in spans)
    for name, each in lengths.items():
        times = f", {len(each)} times" if len(each) > 1 else ""
        yield f"{name}: {format.duration(sum(each))}{times}"


def _shown(columns: Iterable[Range]) -> str:
    """Return the median as text, followed by the range unless all values are equal; ``?`` if no
    value is known.
    """
    known = [each for each in columns if each.is_known]
    if not known:
        return format.UNKNOWN
    least = min(each.least for each in known)
    most = max(each.most for each in known)
    middle = format.number(median(each.middle for each in known))
    if least == most:
        return middle
    return f"{middle} ({format.number(least)}–{format.number(most)})"
