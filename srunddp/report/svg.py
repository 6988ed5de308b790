"""Charts as SVG for an HTML page: panels over time, heat maps and bars. They need no script and
nothing else.

All have columns of time, in each of which stands what is least, usual and most. Only the drawing is
stretched to the width of the page. Text has a fixed size in pixels, and its place is given in
percent, so that it can be read in a wide and in a narrow window. Colours are CSS classes: see
``page.css``.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from statistics import median

from srunddp.errors import one_line
from srunddp.report import format
from srunddp.report.csv_files import NAN
from srunddp.util.hostlist import group_by_key

_LEVELS = 16  # colours of a heat map
_WIDTH = 1000  # units of a drawing before it is stretched
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
_LABEL_LETTERS = 11  # of one label, at most

_COLUMNS = 240
_MOST_TICKS = 8
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_STEPS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000),
)

Points = Iterable[tuple[float, float]]  # seconds since the start, and values
Lines = Iterable[tuple[str, Points]]  # by their names
Columns = list[list[float]]  # the values in each column
Span = tuple[float, float]  # begin and end, in seconds
Range = tuple[float, float, float]  # least, median and most; nan where they are not known
_Words = Mapping[str, Sequence[str]]
_Cell = tuple[str, int, float, float]  # class, number of the row, begin and end in seconds


@dataclass(frozen=True)
class TimeAxis:
    """The time that the charts of a page have in common. Its columns are each a whole number of
    samples long.

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


def ranges(series: Iterable[Columns]) -> list[Range]:
    """Of each column the least and the most of all series, and the median of their medians."""
    known = ([values for values in column if values] for column in zip(*series, strict=True))
    return [
        (min(map(min, each)), median(map(median, each)), max(map(max, each)))
        if each
        else (NAN, NAN, NAN)
        for each in known
    ]


@dataclass(frozen=True)
class Chart:
    """A panel over time, with an axis of values; or, for each of several names, a row of coloured
    cells or of bars.

    Attributes:
        title: what is shown; unit: of the values; by: what they are multiplied with; note: follows
            the title.
        most: the axis of values ends there or above; from_zero: False lets it begin near the lowest
            value.
        limit: is drawn across the panel; 0 for none.
        joined: lines have no gap where nothing is known.
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

    def panel(self, lines: Lines, most: int = 1, what: str = "") -> str:
        """A line of medians and a band for each of a few series; of more than ``most`` for all of
        ``what`` together.

        Empty where no value is known.
        """
        grouped = [(name, self.axis.grouped(points, self.by)) for name, points in lines]
        known = {name: columns for name, columns in grouped if any(columns)}
        if len(known) > most:
            return self._panel({f"median of {len(known)} {what} (range)": ranges(known.values())})
        if known:
            return self._panel({name: ranges([columns]) for name, columns in known.items()})
        return ""

    def _panel(self, lines: Mapping[str, Sequence[Range]]) -> str:
        known = [
            value
            for found in lines.values()
            for each in found
            for value in each
            if not math.isnan(value)
        ]
        ticks = _value_ticks(
            min([*known, *[0.0] * self.from_zero]), max([*known, self.most, self.limit])
        )

        def y(value: float) -> float:
            return _HEIGHT * (ticks[-1] - value) / (ticks[-1] - ticks[0])

        parts = [f'<line x2="100%" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>' for tick in ticks]
        parts += [_label(f"{tick:,.10g}", y(tick)) for tick in ticks]
        legend = [
            (f"c{at}", f"{name}: {_shown(found)}") for at, (name, found) in enumerate(lines.items())
        ]
        if self.limit:
            parts.append(
                f'<line class="limit" x2="100%" y1="{y(self.limit):.1f}" y2="{y(self.limit):.1f}"/>'
            )
            legend.append(("limit", f"limit: {format.number(self.limit)}"))
        shapes = [
            path
            for at, found in enumerate(lines.values())
            for path in self._paths(f"c{at}", found, y)
        ]
        parts.append(_stretched((_WIDTH, _HEIGHT), _HEIGHT, shapes, self._hover(lines)))
        return self._figure(_HEIGHT, _legend(legend), parts)

    def _paths(
        self, colour: str, line: Sequence[Range], y: Callable[[float], float]
    ) -> Iterator[str]:
        middles = [(begin + end) / 2 / self.axis.end * _WIDTH for begin, end in self.axis.columns]
        points = [(x, *map(y, each)) for x, each in zip(middles, line, strict=True)]
        if self.joined:
            points = [point for point in points if not math.isnan(point[2])]
        for is_gap, group in groupby(points, key=lambda point: math.isnan(point[2])):
            if is_gap:
                known = []
            else:
                known = list(group)
            if any(least != most for _, least, _, most in known):
                above, below = ([(point[0], point[at]) for point in known] for at in (3, 1))
                yield _path(f"band {colour}", f"{_line([*above, *reversed(below)])}z")
            if known:
                kind = "line" if len(known) > 1 else "line dot"
                yield _path(
                    f"{kind} {colour}", f"{_line([(point[0], point[2]) for point in known])}h.1"
                )

    def _hover(self, lines: Mapping[str, Sequence[Range]]) -> Iterator[str]:
        """For each column its time, and what is known in it."""
        for at, (begin, end) in enumerate(self.axis.columns):
            known = [
                (name, found[at]) for name, found in lines.items() if not math.isnan(found[at][1])
            ]
            words = [f"{name}: {_shown([found])} {self.unit}" for name, found in known]
            left, right = (value / self.axis.end * _WIDTH for value in (begin, end))
            if words:
                yield _box(left, right, 0, _HEIGHT, [format.clock(begin), *words])

    def heat_map(
        self,
        lines: Lines,
        marked: Collection[str] = (),
        limits: Span | None = None,
        *,
        highest: bool = False,
    ) -> str:
        """For each name a row of coloured cells, the medians of the columns; some are marked. Empty
        if none is known.

        ``limits`` are the values of the first colour and of the last, which stands out: 100 and 0
        where idle GPUs are to be seen. Without them they are 0 and twice the median. ``highest``: a
        cell is the most of its column.
        """
        which = 2 if highest else 1
        rows = {
            name: [each[which] for each in ranges([self.axis.grouped(points, self.by)])]
            for name, points in lines
        }
        known = sorted(value for row in rows.values() for value in row if not math.isnan(value))
        if not known:
            return ""
        # One stall must not make all others look alike.
        low, high = limits or (0.0, 2 * median(known) or known[-1])

        def colour(value: float) -> str:
            level = _LEVELS * (value - low) / (high - low or 1.0)
            if math.isnan(level):
                return "missing"
            return f"h{max(0, min(_LEVELS - 1, int(level)))}"

        cells: list[_Cell] = []
        for number, row in enumerate(rows.values()):
            for kind, group in groupby(
                zip(map(colour, row), self.axis.columns, strict=True), key=lambda pair: pair[0]
            ):
                spans = [span for _, span in group]
                cells.append((kind, number, spans[0][0], spans[-1][1]))
        words = {
            name: [f"{name}: {_shown((at,) * 3 for at in row)} {self.unit}"]
            for name, row in rows.items()
        }
        scale = "".join(_path(f"h{level}", f"M{level} 0h1v1h-1z") for level in range(_LEVELS))
        most = (
            f"{format.number(high)}"
            f" {escaped(self.unit)}{' or more' if known[-1] > high > low else ''}"
        )
        box = f'viewBox="0 0 {_LEVELS} 1" preserveAspectRatio="none"'
        legend = f'<span>{format.number(low)} <svg width="160" {box}>{scale}</svg> {most}</span>'
        return self._rows(words, cells, legend, marked, _HEAT_HEIGHT)

    def bars(self, rows: Mapping[str, Sequence[tuple[str, Span]]], names: Sequence[str]) -> str:
        """For each row its spans, with one colour for each of their names; empty where there is
        none.
        """
        least = self.axis.end / _FINEST
        cells = [
            (f"c{names.index(name)}", at, begin, max(end, begin + least))
            for at, spans in enumerate(rows.values())
            for name, (begin, end) in spans
        ]
        words = {row: [row, *_lasted(spans)] for row, spans in rows.items()}
        known = {kind for kind, *_ in cells}
        legend = _legend((f"c{at}", name) for at, name in enumerate(names) if f"c{at}" in known)
        if known:
            return self._rows(words, cells, legend, (), _BARS_HEIGHT)
        return ""

    def _rows(
        self, words: _Words, cells: list[_Cell], legend: str, marked: Collection[str], height: int
    ) -> str:
        """Cells in rows; ``words`` has for each row what is shown when the mouse is over it."""
        names = list(words)
        pixels = min(_ROW * len(words), height)
        by_class = group_by_key(
            (kind, _box_path(begin, end, number, 1)) for kind, number, begin, end in cells
        )
        places = [number for number, name in enumerate(names) if name in marked]
        shapes = [_path(f"cell {kind}", "".join(found)) for kind, found in by_class.items()]
        shapes += [_path("marked", _box_path(0, self.axis.end, at, 1)) for at in places]
        hover = (_box(0, self.axis.end, at, 1, said) for at, said in enumerate(words.values()))
        row = pixels / len(names)
        every = 2 ** max(0, math.ceil(math.log2(_LABEL_PIXELS / row)))
        shown = [
            at
            for at in range(0, len(names), every)
            if all(abs(at - place) >= every for place in places)
        ]
        parts = [_label(names[at], (at + 0.5) * row) for at in shown]
        parts += [_label(names[at], (at + 0.5) * row, "y marked") for at in places]
        parts.append(_stretched((self.axis.end, len(names)), pixels, shapes, hover))
        return self._figure(pixels, legend, parts)

    def _figure(self, pixels: int, legend: str, parts: Sequence[str]) -> str:
        """A chart: its title and legend, the axis of time with the epochs, and what else is in
        it.
        """
        marks = self.axis.epochs[:: math.ceil(len(self.axis.epochs) / _MOST_MARKS) or 1]
        every = math.ceil(len(marks) / _MOST_NUMBERS) or 1
        found = [*parts, _label("epoch", -11)] if marks else [*parts]
        for number, (time, word) in enumerate(marks):
            at = f"{time / self.axis.end:.2%}"
            found.append(f'<line class="mark" x1="{at}" x2="{at}" y1="-4" y2="{pixels}"/>')
            if not (number % every):
                found.append(f'<text x="{at}" y="-11">{escaped(word)}</text>')
        for time, word in self.axis.ticks():
            at = f"{time / self.axis.end:.2%}"
            found.append(f'<line x1="{at}" x2="{at}" y1="{pixels}" y2="{pixels + 4}"/>')
            found.append(f'<text x="{at}" y="{pixels + 12}">{word}</text>')
        if self.unit:
            unit = f" ({self.unit})"
        else:
            unit = ""
        body = "\n".join(found)
        name = escaped(f"{self.title}{unit}{self.note}")
        caption = f"<figcaption><b>{name}</b> {legend}</figcaption>"
        drawing = f'<svg role="img" aria-label="{name}" height="{pixels}">\n{body}\n</svg>'
        return f'<figure class="chart">{caption}\n{drawing}</figure>\n'


def _stretched(
    units: tuple[float, float], pixels: int, shapes: Iterable[str], hover: Iterable[str]
) -> str:
    """What has the width of the page, whatever its own units are."""
    box = f'viewBox="0 0 {units[0]:.6g} {units[1]:.6g}" preserveAspectRatio="none"'
    body = "\n".join([*shapes, '<g class="hover">', *hover, "</g>"])
    return f'<svg width="100%" height="{pixels}" {box}>\n{body}\n</svg>'


def _value_ticks(low: float, high: float) -> list[float]:
    """Round numbers from the lowest value, or below it, to the highest, or above it: two at
    least.
    """
    apart = high - low
    least = (apart if apart > abs(high) * _ALIKE else abs(high) or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(least))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= least * 0.999)
    first = math.floor(low / step)
    return [at * step for at in range(first, max(first + 1, math.ceil(high / step - 1e-9)) + 1)]


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    key = '<svg width="16" viewBox="0 0 16 10">{}</svg>'
    return "".join(
        f"<span>{key.format(_path(c, 'M0 3h16v4h-16z'))}{escaped(words)}</span>"
        for c, words in entries
    )


def _lasted(spans: Iterable[tuple[str, Span]]) -> Iterator[str]:
    for name, each in group_by_key((name, end - begin) for name, (begin, end) in spans).items():
        yield (
            f"{name}: {format.duration(sum(each))}{f', {len(each)} times' if len(each) > 1 else ''}"
        )


def _label(word: str, y: float, kind: str = "y") -> str:
    """Beside a chart, as long as there is room for; its end may be what tells it from others."""
    if len(word) <= _LABEL_LETTERS:
        short = word
    else:
        short = f"{word[:3]}…{word[4 - _LABEL_LETTERS :]}"
    return f'<text class="{kind}" x="-6" y="{y:.1f}">{escaped(short)}</text>'


def _path(kind: str, shape: str) -> str:
    return f'<path class="{kind}" d="{shape}"/>'


def _box(left: float, right: float, top: float, height: float, words: Iterable[str]) -> str:
    """What is not seen, and shows words to the mouse."""
    title = "\n".join(map(escaped, words))
    return f'<path d="{_box_path(left, right, top, height)}"><title>{title}</title></path>'


def _box_path(left: float, right: float, top: float, height: float) -> str:
    return f"M{left:.6g} {top:g}H{right:.6g}v{height:g}H{left:.6g}z"


def _line(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _shown(ranges: Iterable[Range]) -> str:
    """The median, and from where to where the values go."""
    known = [each for each in ranges if not math.isnan(each[1])]
    if not known:
        return format.UNKNOWN
    least = min(each[0] for each in known)
    most = max(each[2] for each in known)
    middle = format.number(median(each[1] for each in known))
    if least == most:
        return middle
    return f"{middle} ({format.number(least)}–{format.number(most)})"


def escaped(words: str) -> str:
    """As a part of a page."""
    return escape(one_line(words))
