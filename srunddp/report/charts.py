"""Charts over time: panels with an axis of values, heat maps, and bars."""

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

_WIDTH = 1000  # units of a panel before it is stretched
# Pixels: of a panel, of all rows and of one at most.
_HEIGHT = 110
_HEAT_HEIGHT = 320
_BARS_HEIGHT = 160
_ROW = 16
_FINEST = 400  # parts of the width: a narrower bar would not be seen
_MOST_MARKS = 60
_MOST_NUMBERS = 8
_ALIKE = 1e-6  # of a value: ticks that are nearer to each other would have the same label
_LABEL_PIXELS = 13  # between two labels of rows, at least

Lines = Iterable[tuple[str, Points]]  # by their names
_Series = Mapping[str, Sequence[Range]]  # the values in each column, by name


class _Cell(NamedTuple):
    """A coloured part of a row: a class of page.css, the row's number, and seconds."""

    colour: str
    row: int
    begin: float
    end: float


class _Row(NamedTuple):
    """A row's name, and what is shown when the mouse is over it."""

    name: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Chart:
    """A panel over time, with an axis of values; or, for each of several names, a row of coloured
    cells or of bars.

    Attributes:
        title: what is shown.
        axis: of time.
        unit: of the values.
        by: what they are multiplied with.
        most: the axis of values ends there or above.
        from_zero: False lets that axis begin near the lowest value.
        limit: is drawn across the panel; 0 for none.
        joined: lines have no gap where nothing is known.
        note: follows the title.
    """

    title: str
    axis: TimeAxis
    unit: str = ""
    by: float = 1.0
    most: float = 0.0
    from_zero: bool = True
    limit: float = 0.0
    joined: bool = False
    note: str = ""

    def panel(self, lines: Lines, most: int = 1, what: str = "") -> Figure | None:
        """Draw a line of medians and a band for each of a few series.

        Args:
            lines: the series.
            most: of more than these one line and one band stand for all.
            what: all of them, in the legend.

        Returns:
            None where no value is known.
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
            Key(f"c{at}", f"{name}: {_shown(found)}")
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
        """The band and the line of one series, anew after each gap."""
        middles = [self._x((begin + end) / 2) for begin, end in self.axis.columns]
        places = list(zip(middles, found, strict=True))
        # The training logs less often than there are columns, and each of its points would stand
        # alone.
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
            # A line of one point has no length, and would not be seen.
            path = f"{line([(x, each.middle) for x, each in part])}h.1"
            yield Shape(f"{kind} {colour}", path)

    def _hovers(self, series: _Series) -> Iterator[Hover]:
        """For each column its time, and what is known in it."""
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
        """Draw for each name a row of coloured cells.

        Args:
            lines: the series.
            marked: names of rows that stand out.
            limits: the values of the first colour and of the last, which is the one that is seen:
                100 and 0 where idle GPUs are to be seen. Without them 0 and twice the median.
            highest: a cell is the most of its column, and not the median.

        Returns:
            None where no value is known.
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
        """The cells of a row, neighbours of one colour joined: of a long run a page with each cell
        alone would be too big.
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
        """Draw for each row its spans.

        Args:
            rows: the names and times of their spans.
            names: all that spans may have: each has a colour.

        Returns:
            None where there is no span.
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
        """Draw cells in rows, some of which are marked, no higher than so many pixels."""
        pixels = min(_ROW * len(rows), height)
        places = [number for number, row in enumerate(rows) if row.name in marked]
        # One path for each colour: thousands of them would take a browser long.
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
        """Add what all charts have: title, epochs and the axis of time."""
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
            ticks=[Tick(self.axis.place(time), words) for time, words in self.axis.ticks()],
        )

    def _epochs(self) -> list[EpochMark]:
        """The epochs, of many some, of which again some have their numbers."""
        every = math.ceil(len(self.axis.epochs) / _MOST_MARKS) or 1
        shown = self.axis.epochs[::every]
        numbered = math.ceil(len(shown) / _MOST_NUMBERS) or 1
        return [
            EpochMark(self.axis.place(time), None if at % numbered else words)
            for at, (time, words) in enumerate(shown)
        ]


@dataclass(frozen=True)
class _ValueAxis:
    """The axis of values of a panel, by its ticks, the lowest first."""

    ticks: Sequence[float]

    def y(self, value: float) -> float:
        """Where a value is, in pixels from above."""
        return _HEIGHT * (self.ticks[-1] - value) / (self.ticks[-1] - self.ticks[0])

    def range(self, values: Range) -> Range:
        """Where the values of a column are."""
        return Range(self.y(values.least), self.y(values.middle), self.y(values.most))


@dataclass(frozen=True)
class _Colours:
    """The colours of a heat map, from that of one value to that of another, which may be lower."""

    low: float
    high: float

    @classmethod
    def of(cls, known: Sequence[float], limits: Span | None) -> "_Colours":
        """Choose the range of colours for some values, unless limits are given."""
        if limits:
            return cls(*limits)
        # Not up to the highest value: one stall must not make all others look alike. Where more
        # than half of the values are 0, the median says nothing, and the highest has to do.
        return cls(0.0, 2 * median(known) or max(known))

    def colour(self, value: float) -> str:
        """The class of a value."""
        if math.isnan(value):
            return "missing"
        level = int(LEVELS * (value - self.low) / (self.high - self.low or 1.0))
        # A value at a limit or beyond it has the first or the last colour.
        return f"h{max(0, min(LEVELS - 1, level))}"


def _value_ticks(low: float, high: float) -> list[float]:
    """Round numbers from the lowest value, or below it, to the highest, or above it: two at
    least.
    """
    apart = high - low
    if apart <= abs(high) * _ALIKE:
        apart = abs(high) or 1.0
    finest = apart / 5
    # The tolerances below are for rounding errors: 3 * 0.1 / 0.1 is above 3, and would give one
    # tick too many.
    power = 10.0 ** math.floor(math.log10(finest))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= finest * 0.999)
    first = math.floor(low / step)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [at * step for at in range(first, last + 1)]


def _row_labels(names: Sequence[str], marked: Collection[int], pixels: int) -> Iterator[Label]:
    """Labels of rows, of many some, and of all that are marked, which have room around them."""
    row = pixels / len(names)
    every = 2 ** max(0, math.ceil(math.log2(_LABEL_PIXELS / row)))
    for at in range(0, len(names), every):
        # A label so near to that of a marked row would overlap it.
        if all(abs(at - place) >= every for place in marked):
            yield Label(short_label(names[at]), (at + 0.5) * row)
    for at in marked:
        yield Label(short_label(names[at]), (at + 0.5) * row, is_marked=True)


def _lasted(spans: Iterable[tuple[str, Span]]) -> Iterator[str]:
    """How long the spans of each name lasted together."""
    lengths = group_by_key((name, end - begin) for name, (begin, end) in spans)
    for name, each in lengths.items():
        times = f", {len(each)} times" if len(each) > 1 else ""
        yield f"{name}: {format.duration(sum(each))}{times}"


def _shown(columns: Iterable[Range]) -> str:
    """The median, and from where to where the values go."""
    known = [each for each in columns if each.is_known]
    if not known:
        return format.UNKNOWN
    least = min(each.least for each in known)
    most = max(each.most for each in known)
    middle = format.number(median(each.middle for each in known))
    if least == most:
        return middle
    return f"{middle} ({format.number(least)}–{format.number(most)})"
