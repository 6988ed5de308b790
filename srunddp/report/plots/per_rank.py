"""Pictures with a row for each rank: its time in the steps, and its start."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from statistics import median

from matplotlib import colormaps
from matplotlib.axes import Axes

from srunddp.errors import one_line
from srunddp.report import format
from srunddp.report.plots import style, timeline
from srunddp.report.plots.style import COLOURS, TimeAxis, heat, png
from srunddp.report.plots.timeline import DrawnFigure
from srunddp.report.run import NAMES, RunData
from srunddp.report.summary import Summary
from srunddp.util.hostlist import fold_ranks

_NAMED = 32  # ranks that each have a number at the axis
_ROW, _LOWEST, _HIGHEST = 0.16, 1.6, 6.0  # inches
_MOST_BARS = 192
_Draw = Callable[[RunData, Summary, TimeAxis], DrawnFigure]


def steps(run: RunData, summary: Summary, axis: TimeAxis) -> DrawnFigure:
    """The time of each rank's own in a step; where that is not known, the step time."""
    own = any(each.own_s is not None for each in summary.ranks)
    name = "own_s" if own else "step_s"
    rows = {rank: [value * 1e3 for value in heat(each, name, "steps", axis)] for rank, each in run.steps.items()}
    known = sorted(value for row in rows.values() for value in row if not math.isnan(value))
    if not known:
        why = "Steps were counted, but not timed" if summary.steps else "No steps were counted"
        return DrawnFigure(None, "", (f"{why}, so that there is no picture of them.",))
    figure, (panel,) = style.figure([_height(len(rows))])
    # A few long steps are not to make all others look alike.
    most = max(1.25 * median(known), known[int(len(known) * 0.995)])
    _mesh(panel, list(rows.values()), axis, most)
    clipped = known[-1] > most
    kind = "Own time per step, all but the backward pass," if own else "Step time"
    bar = figure.colorbar(panel.collections[0], ax=panel, extend="max" if clipped else "neither", pad=0.01)
    bar.set_label("per step (ms)")
    slowest = summary.slowest.rank if own and summary.slowest else None
    _rank_axis(panel, list(rows), slowest)
    which = f"; most: {one_line(fold_ranks([slowest], summary.layout))}" if slowest is not None else ""
    panel.set_title(f"{kind} by rank{which}", pad=16 if axis.epochs else 6)
    style.time_axis([panel], axis)
    return DrawnFigure(figure, f"Heat map of {kind.lower()} of {format.count(len(rows), 'rank')} over time{which}.")


def _height(rows: int) -> float:
    return max(_LOWEST, min(_HIGHEST, _ROW * rows + 0.8))


def _mesh(panel: Axes, rows: list[list[float]], axis: TimeAxis, most: float) -> None:
    colours = colormaps["cividis"].with_extremes(bad="#EDEDED")
    edges = [axis.at(axis.width * at) for at in range(axis.columns + 1)]
    panel.pcolormesh(edges, [row - 0.5 for row in range(len(rows) + 1)], rows, cmap=colours, vmin=0, vmax=most)
    panel.grid(visible=False)


def _rank_axis(panel: Axes, ranks: list[int], marked: int | None) -> None:
    """The first rank at the top; one is marked."""
    every = max(1, math.ceil(len(ranks) / _NAMED))
    at = ranks.index(marked) if marked in ranks else -every
    places = [place for place in range(len(ranks)) if place == at or (place % every == 0 and abs(place - at) >= every)]
    panel.set_yticks(places, [str(ranks[place]) for place in places], fontsize=8)
    panel.set_ylim(len(ranks) - 0.5, -0.5)
    panel.set_ylabel("rank")
    if at in places:
        panel.get_yticklabels()[places.index(at)].set(color=COLOURS[1], fontweight="bold")


def launch(run: RunData, summary: Summary, axis: TimeAxis) -> DrawnFigure:
    """A bar for each phase of each rank's start."""
    every = max(1, math.ceil(len(summary.launches) / _MOST_BARS))
    shown = dict(islice(summary.launches.items(), 0, None, every))
    if not any(shown.values()):
        return DrawnFigure(None, "", ("No phases of the start were marked.",))
    end = max(end for phases in shown.values() for _, end in phases.values())
    scale = TimeAxis(end, axis.interval, ())
    at = scale.at
    figure, (panel,) = style.figure([_height(len(shown))])
    for name, colour in zip(NAMES, ("#BBBBBB", *COLOURS), strict=False):
        spans = [(row, *phases[name]) for row, phases in enumerate(shown.values()) if name in phases]
        if spans:
            rows, begins, lengths = zip(*((row, at(begin), at(end - begin)) for row, begin, end in spans), strict=True)
            thick = 0.7 if len(shown) <= _NAMED else 1.0
            panel.barh(rows, lengths, left=begins, height=thick, color=colour, label=name)
    _rank_axis(panel, [*shown], None)
    panel.set_xlim(0, scale.at(end) * 1.01 or 1)
    panel.set_xlabel(f"time since the first process began ({scale.unit[1]})")
    panel.grid(visible=False, axis="y")
    panel.set_title(f"Launch phases by rank{f', one of {every}' if every > 1 else ''}")
    style.legend(panel)
    return DrawnFigure(figure, f"Launch phases of {format.count(len(shown), 'rank')} as bars over time.")


@dataclass(frozen=True)
class Plot:
    """A picture: its file's name, what is shown, the same for who does not see it, and a PNG; that is empty where there
    is nothing to show, and then ``missing`` says why."""

    name: str
    title: str
    alt: str
    image: bytes
    missing: str


_ALL: dict[str, tuple[str, _Draw]] = {
    "timeline": ("Time line", timeline.timeline),
    "gpus": ("GPUs", timeline.gpus),
    "nodes": ("Nodes", timeline.nodes),
    "steps": ("Step time by rank", steps),
    "launch": ("Launch", launch),
}


def pictures(run: RunData, summary: Summary) -> list[Plot]:
    """All of them, in the order of the page."""
    axis, found = TimeAxis(max(summary.seconds, 1.0), summary.interval_s or 5.0, summary.epochs), []
    with style.style():
        for name, (title, draw) in _ALL.items():
            drawn = draw(run, summary, axis)
            image = png(drawn.figure) if drawn.figure is not None else b""
            found.append(Plot(f"report-{name}.png", title, drawn.alt, image, " ".join(drawn.missing)))
    return found
