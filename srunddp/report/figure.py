"""Defines the parts of a chart before ``templates/chart.html`` writes it as HTML.

Only the canvas, which has units of its own, is stretched to the width of the page. Text has a fixed
size in pixels and its position is in percent, so it stays readable in wide and narrow windows.
Colours are CSS classes, see ``templates/page.css``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEVELS = 16  # colours of a heat map, h0 to h15 in page.css
_LABEL_LETTERS = 11  # longest label beside a chart, in characters


@dataclass(frozen=True)
class Key:
    """One entry of a legend.

    Attributes:
        colour: A CSS class of page.css.
        words: The name of the series or spans that have this colour, and their value if known.
    """

    colour: str
    words: str


@dataclass(frozen=True)
class Scale:
    """The legend of a heat map: the values of its first and last colour, as texts."""

    low: str
    high: str


@dataclass(frozen=True)
class Label:
    """A label at the left of a chart.

    Attributes:
        words: The text, shortened to fit beside the chart.
        y: The position in pixels from the top.
        is_marked: Whether it is highlighted.
    """

    words: str
    y: float
    is_marked: bool = False


@dataclass(frozen=True)
class Shape:
    """A drawn shape: its CSS classes in page.css, and its SVG path."""

    kind: str
    path: str


@dataclass(frozen=True)
class Hover:
    """An area that shows lines of text when the mouse is over it: its SVG path, and the lines."""

    path: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Canvas:
    """The part of a chart that is scaled to the width of the page. The labels beside it are not.

    Attributes:
        width: The width in the canvas's own units.
        height: The height in the same units.
        shapes: What is drawn; later shapes cover earlier ones.
        hovers: The areas for the mouse, above all shapes.
    """

    width: float
    height: float
    shapes: Sequence[Shape]
    hovers: Sequence[Hover]


@dataclass(frozen=True)
class EpochMark:
    """A mark at the beginning of an epoch.

    Attributes:
        x: The position in percent of the width, such as ``12.50%``.
        words: The label; None for a mark without a label.
    """

    x: str
    words: str | None


@dataclass(frozen=True)
class Tick:
    """A position on the time axis.

    Attributes:
        x: The position in percent of the width, such as ``12.50%``.
        words: The label.
        is_minor: Whether the label is hidden in a narrow window, because the labels would overlap.
    """

    x: str
    words: str
    is_minor: bool


@dataclass(frozen=True)
class Figure:
    """A chart.

    Attributes:
        name: The title with the unit.
        pixels: The height in pixels.
        legend: The entries of the legend, or the scale of a heat map.
        grid: The heights of horizontal lines, in pixels from the top.
        labels: The labels at the left.
        limit: The height of the line that shows a limit, in pixels from the top; None for none.
        canvas: What is drawn.
        epochs: Where epochs begin.
        ticks: The labels of the time axis.
    """

    name: str
    pixels: int
    legend: Sequence[Key] | Scale
    grid: Sequence[float]
    labels: Sequence[Label]
    limit: float | None
    canvas: Canvas
    epochs: Sequence[EpochMark]
    ticks: Sequence[Tick]

    @property
    def keys(self) -> Sequence[Key]:
        """The entries of the legend; empty for a heat map, which has a scale."""
        return () if isinstance(self.legend, Scale) else self.legend

    @property
    def scale(self) -> Scale | None:
        """The scale of a heat map; None for other charts."""
        return self.legend if isinstance(self.legend, Scale) else None


def short_label(words: str) -> str:
    """Shorten a label in the middle to 11 characters, because labels often differ at the end."""
    if len(words) <= _LABEL_LETTERS:
        return words
    # Keep the first three characters and the last seven: node names differ at the end.
    return f"{words[:3]}…{words[4 - _LABEL_LETTERS :]}"


def box(left: float, right: float, top: float, height: float) -> str:
    """Return the SVG path of a rectangle. All lengths are in units of the canvas; ``top`` is the
    distance from the upper edge of the canvas.
    """
    return f"M{left:.6g} {top:g}H{right:.6g}v{height:g}H{left:.6g}z"


def line(points: Iterable[tuple[float, float]]) -> str:
    """Return the SVG path of a line through points, which are in the canvas's units."""
    # A tenth of a unit is less than a pixel; more digits would make the page much larger.
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
