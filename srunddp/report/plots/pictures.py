"""Which pictures a run has, and why one is left out. matplotlib is imported with the modules that draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from srunddp.report.plots import per_rank, timeline
from srunddp.report.plots.style import TimeAxis, png, style
from srunddp.report.run import Run
from srunddp.report.summary import Summary


@dataclass(frozen=True)
class Picture:
    """One of them.

    Attributes:
        name: of its file; title: what is shown; alt: the same for who does not see it.
        image: a PNG; empty where there is nothing to show, and then ``missing`` says why.
    """

    name: str
    title: str
    alt: str = ""
    image: bytes = b""
    missing: str = ""


_Draw = Callable[[Run, Summary, TimeAxis], timeline.Drawn]
_ALL: dict[str, tuple[str, _Draw]] = {
    "timeline": ("Time line", timeline.timeline),
    "gpus": ("GPUs", timeline.gpus),
    "nodes": ("Nodes", timeline.nodes),
    "steps": ("Step time by rank", per_rank.steps),
    "launch": ("Launch", per_rank.launch),
}


def pictures(run: Run, summary: Summary) -> list[Picture]:
    """All of them, in the order of the page."""
    axis = TimeAxis(max(summary.seconds, 1.0), summary.interval_s or 5.0, summary.epochs)
    with style():
        return [_picture(name, *_ALL[name], run, summary, axis) for name in _ALL]


def _picture(name: str, title: str, draw: _Draw, run: Run, summary: Summary, axis: TimeAxis) -> Picture:
    drawn = draw(run, summary, axis)
    image = png(drawn.figure) if drawn.figure is not None else b""
    return Picture(f"report-{name}.png", title, drawn.alt, image, " ".join(drawn.missing))
