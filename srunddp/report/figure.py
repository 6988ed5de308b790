"""What a chart consists of, before it is written as HTML; see ``templates/chart.html``.

Only the canvas is stretched to the width of the page, in units of its own. Text has a fixed size in
pixels, and its place is given in percent, so that it can be read in a wide and in a narrow window.
Colours are CSS classes, see ``templates/page.css``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEVELS = 16  # colours of a heat map, h0 to h15 in page.css
_LABEL_LETTERS = 11  # of a label beside a chart, at most


@dataclass(frozen=True)
class Key:
    """One entry of a legend.

    Attributes:
        colour: a class of page.css.
        words: what has that colour.
    """

    colour: str
    words: str


@dataclass(frozen=True)
class Scale:
    """The legend of a heat map: the values of its first colour and of its last, in words."""

    low: str
    high: str


@dataclass(frozen=True)
class Label:
    """A word at the left of a chart.

    Attributes:
        words: as long as there is room for.
        y: in pixels.
        is_marked: it stands out.
    """

    words: str
    y: float
    is_marked: bool = False


@dataclass(frozen=True)
class Shape:
    """What is drawn: the classes of page.css, and the path as SVG has it."""

    kind: str
    path: str


@dataclass(frozen=True)
class Hover:
    """A part of a chart that shows words when the mouse is over it: its path, and the lines."""

    path: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Canvas:
    """The part of a chart that is stretched.

    Attributes:
        width: in its own units, as is the height.
        height: in the same units.
        shapes: the later ones above the earlier ones.
        hovers: above them all.
    """

    width: float
    height: float
    shapes: Sequence[Shape]
    hovers: Sequence[Hover]


@dataclass(frozen=True)
class EpochMark:
    """Where an epoch begins, in percent of the width; and its number, which not all show."""

    x: str
    words: str | None


@dataclass(frozen=True)
class Tick:
    """A time, in percent of the width, and its label."""

    x: str
    words: str


@dataclass(frozen=True)
class Figure:
    """A chart.

    Attributes:
        name: its title, with the unit.
        pixels: its height.
        legend: what has which colour.
        grid: heights of lines across it, in pixels.
        labels: at its left.
        limit: the height of the line of a limit, in pixels; None without one.
        canvas: what is drawn.
        epochs: where they begin.
        ticks: of the time.
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
        """The legend, where it is one of words."""
        return () if isinstance(self.legend, Scale) else self.legend

    @property
    def scale(self) -> Scale | None:
        """The legend, where it is one of values."""
        return self.legend if isinstance(self.legend, Scale) else None


def short_label(words: str) -> str:
    """Shorten a label in its middle, as its end may be what tells it from others."""
    if len(words) <= _LABEL_LETTERS:
        return words
    # Three letters, the ellipsis and the last seven: node names differ at their end.
    return f"{words[:3]}…{words[4 - _LABEL_LETTERS :]}"


def box(left: float, right: float, top: float, height: float) -> str:
    """Write the path of a rectangle for SVG."""
    return f"M{left:.6g} {top:g}H{right:.6g}v{height:g}H{left:.6g}z"


def line(points: Iterable[tuple[float, float]]) -> str:
    """Write the path of a line through points for SVG."""
    # A tenth of a unit is less than a pixel, and more digits would make the page much bigger.
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
