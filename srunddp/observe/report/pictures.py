"""Which pictures a run has, and why one is left out. matplotlib is imported with the modules that draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from srunddp.observe.report import panels, rank_panels
from srunddp.observe.report.canvas import TimeAxis, png, style
from srunddp.observe.report.run import Run
from srunddp.observe.report.summary import Summary


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


_Draw = Callable[[Run, Summary, TimeAxis], panels.Drawn]
_ALL: dict[str, tuple[str, _Draw]] = {
    "timeline": ("Time line", panels.timeline),
    "gpus": ("GPUs", panels.gpus),
    "nodes": ("Nodes", panels.nodes),
    "steps": ("Step time by rank", rank_panels.steps),
    "launch": ("Launch", rank_panels.launch),
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
