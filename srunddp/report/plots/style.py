"""How all pictures look: colours that the colour-blind tell apart, one time axis, legends beside the data."""

import io
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from srunddp.errors import one_line
from srunddp.report.csv_files import NAN, TimeSeries
from srunddp.report.summary import Span
from srunddp.util.hostlist import group_by_key

# Okabe and Ito's, without the yellow, which is weak on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")
MOST_LINES = 8
_WIDTH, _DPI = 11.0, 110
_MOST_MARKS, _MOST_NUMBERS = 60, 30
_STYLE: Any = {
    "text.parse_math": False,  # a name may hold a dollar
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "axes.axisbelow": True,
    "legend.frameon": False,
}
_COLUMNS = 240
Points = Sequence[tuple[float, float]]  # seconds since the start, and values
Line = tuple[str, Points]  # one series: its label


@dataclass(frozen=True)
class TimeAxis:
    """Seconds as the axis shows them, and columns of equal length in which series are put together.

    Attributes:
        end: seconds since the start, of the whole axis; interval: between samples; epochs: marked in each picture.
    """

    end: float
    interval: float
    epochs: tuple[Span, ...]

    @property
    def unit(self) -> tuple[float, str]:
        """Seconds of the unit, and its name."""
        return (1.0, "s") if self.end < 180 else (60.0, "min") if self.end < 3 * 3600 else (3600.0, "h")

    def at(self, seconds: float) -> float:
        """As the axis has it."""
        return seconds / self.unit[0]

    @property
    def length(self) -> float:
        """Seconds of all columns."""
        return max(self.end, self.interval, 1e-3)

    @property
    def columns(self) -> int:
        """As many as a picture can show, and not more than there are samples."""
        return max(1, min(_COLUMNS, int(self.length / max(self.interval, 1e-3))))

    @property
    def width(self) -> float:
        """Seconds of a column."""
        return self.length / self.columns


@contextmanager
def style() -> Iterator[None]:
    """Within it pictures are drawn; whatever letters names have."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font has not
        yield


def figure(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Panels below each other; heights in inches."""
    made = Figure(figsize=(_WIDTH, sum(heights) + 0.6), dpi=_DPI, layout="constrained")
    axes = made.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    return made, [row[0] for row in axes]


def png(made: Figure) -> bytes:
    """As a file."""
    buffer = io.BytesIO()
    made.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def name(text: str) -> str:
    """A name from a file, as a picture has room for it: its end may be what tells it from others."""
    shown = one_line(text)
    return shown if len(shown) <= 28 else f"{shown[:13]}…{shown[-14:]}"


def time_axis(axes: Sequence[Axes], axis: TimeAxis) -> None:
    """The same for all panels, with a label below the last, and a line where each epoch begins."""
    axes[-1].set_xlim(0, axis.at(axis.end))
    axes[-1].set_xlabel(f"time since the start of the run ({axis.unit[1]})")
    axes[-1].xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 3, 5, 6, 10]))
    every = math.ceil(len(axis.epochs) / _MOST_MARKS) if axis.epochs else 1
    for panel in axes:
        for span in axis.epochs[::every]:
            panel.axvline(axis.at(span.begin), color="#9A9A9A", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0.5)
    _number_epochs(axes[0], axis)


def _number_epochs(panel: Axes, axis: TimeAxis) -> None:
    """Above the first panel, where there is room for them."""
    apart, latest = axis.end / _MOST_NUMBERS, -math.inf
    for at, span in enumerate(axis.epochs):
        if span.number is not None and span.begin - latest >= apart and axis.end - span.begin >= apart:
            word = f"epoch {span.number}" if at == 0 else str(span.number)
            latest = span.begin + (apart if at == 0 else 0.0)
            panel.annotate(
                word,
                (axis.at(span.begin), 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(2, 2),
                textcoords="offset points",
                annotation_clip=True,
                fontsize=8,
                color="#555555",
            )


def draw(panel: Axes, lines: Sequence[Line], axis: TimeAxis, what: str) -> None:
    """Few series as lines, many as a band; what they are, in the plural, is said beside the panel."""
    if len(lines) > MOST_LINES:
        draw_band(panel, lines, axis, COLOURS[0], f"{len(lines)} {what}")
    else:
        for line, each in zip(lines, COLOURS, strict=False):
            draw_line(panel, line, axis, each)
    legend(panel)


def draw_line(panel: Axes, line: Line, axis: TimeAxis, colour: str) -> None:
    """One series, with its name in the legend."""
    label, points = line
    times, values = [axis.at(time) for time, _ in points], [value for _, value in points]
    # A label that begins with _ is none to matplotlib.
    label = f" {name(label)}" if label.startswith("_") else name(label)
    marker = "o" if len(times) < 3 else None
    panel.plot(times, values, color=colour, linewidth=1.2, label=label, marker=marker, markersize=4)


def draw_band(panel: Axes, lines: Sequence[Line], axis: TimeAxis, colour: str, what: str) -> None:
    """From the least to the most of several series, with the median; one series has neither."""
    middles, known = _by_column([points for _, points in lines], axis)
    times, alone = [axis.at(time) for time in middles], len(lines) == 1

    def each(of: Callable[[list[float]], float]) -> list[float]:
        return [of(values) if values else NAN for values in known]

    if not alone:
        label = f"range of {what}"
        panel.fill_between(times, each(min), each(max), color=colour, alpha=0.25, linewidth=0, label=label)
    panel.plot(times, each(median), color=colour, linewidth=1.4, label=what if alone else f"median of {what}")


def legend(panel: Axes, *more: Axes) -> None:
    """Beside the panel, never over the data; once for panels that share it."""
    found = [each.get_legend_handles_labels() for each in (panel, *more)]
    handles, labels = [each for pair in found for each in pair[0]], [each for pair in found for each in pair[1]]
    above = [each.get_legend() for each in panel.figure.axes if each is not panel]
    if labels and not any(each and [text.get_text() for text in each.get_texts()] == labels for each in above):
        offset = 1.09 if more else 1.01
        panel.legend(handles, labels, loc="center left", bbox_to_anchor=(offset, 0.5), fontsize=8.5, handlelength=1.4)


def from_zero(panel: Axes, label: str, most: float | None = None) -> None:
    """The axis of values: from zero on."""
    panel.set_ylabel(label)
    panel.set_ylim(0, most or 1.08 * panel.dataLim.ymax or 1.0)


def gauge(samples: TimeSeries, name: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """The known values of a column."""
    return [(time, value * scale) for time, value in samples.known(name)]


def rates(samples: TimeSeries, name: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """Of a counter, per second, in the middle of each interval."""
    return [((begin + end) / 2, grown / (end - begin) * scale) for begin, end, grown in samples.steps(name)]


def whole(points: Points) -> Points:
    """Without what follows its end, and but for a few also without the interval of it, which is not its rate."""
    last = max((at for at, (_, value) in enumerate(points) if value > 0), default=0)
    return points[: last if last > 2 else last + 1]


def summed(series: Iterable[Points]) -> list[tuple[float, float]]:
    """The sum of series that have the same times; what one of them lacks is left out."""
    every = [dict(each) for each in series if each]
    times = set.intersection(*(set(each) for each in every)) if every else set()
    return [(time, sum(each[time] for each in every)) for time in sorted(times)]


def mean_of(series: Iterable[Points], axis: TimeAxis) -> list[tuple[float, float]]:
    """The mean of several series whose times differ."""
    times, known = _by_column(series, axis)
    return [(time, sum(values) / len(values)) for time, values in zip(times, known, strict=True) if values]


def _by_column(series: Iterable[Points], axis: TimeAxis) -> tuple[list[float], list[list[float]]]:
    """The middle of each column, and the means there of the series that have a value."""
    columns, width, length = axis.columns, axis.width, axis.length
    known: list[list[float]] = [[] for _ in range(columns)]
    for points in series:
        inside = [(min(int(time / width), columns - 1), value) for time, value in points if -width < time <= length]
        for at, values in group_by_key(inside).items():
            known[at].append(sum(values) / len(values))
    return [(at + 0.5) * width for at in range(columns)], known


def heat(samples: TimeSeries, part: str, whole: str, axis: TimeAxis) -> list[float]:
    """The growth of one counter over that of another in each column; nan where that did not grow.

    Of intervals in which both are known: before the first step one of them may not be.
    """
    columns, width = axis.columns, axis.width
    tops, belows = [0.0] * columns, [0.0] * columns
    parts = {(begin, end): grown for begin, end, grown in samples.steps(part)}
    for begin, end, grown in samples.steps(whole):
        for at in range(max(0, int(begin / width)), min(columns - 1, int(end / width)) + 1):
            seconds = max(0.0, min(end, at * width + width) - max(begin, at * width))
            if (begin, end) in parts:
                tops[at] += parts[begin, end] * seconds / (end - begin)
                belows[at] += grown * seconds / (end - begin)
    return [top / below if below > 1e-9 else NAN for top, below in zip(tops, belows, strict=True)]
