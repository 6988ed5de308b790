"""Writes the report as a single HTML file that contains the charts, needs no script and loads
nothing.

The layout is in ``templates``. jinja2 escapes all texts that come from the run.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from srunddp._version import __version__
from srunddp.errors import ConfigError, one_line
from srunddp.report import format, text
from srunddp.report.advice import Advice
from srunddp.report.figure import LEVELS, Figure
from srunddp.report.overview import failure, tiles
from srunddp.report.panels import Section
from srunddp.report.summary import Summary

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = "templates"


@dataclass(frozen=True)
class _Table:
    """A table, of which the page shows only the title until the reader opens it.

    Attributes:
        title: How many rows there are, and the values that they all share.
        head: The names of the columns.
        rows: The texts of the cells, row by row.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(summary: Summary, notes: Sequence[Advice], sections: Sequence[Section]) -> str:
    """Return the HTML of the whole page.

    Args:
        summary: The figures of the run.
        notes: The advice on what to change next.
        sections: The parts with charts.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    ranks = format.count(summary.world_size, "rank")
    remarks = text.remarks(summary)
    if not remarks and not notes:
        remarks = ["No threshold is passed"]
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=f"Run {summary.name or '?'}: {ranks}, {summary.script}",
            style=_style(),
            heading=list(text.heading(summary)),
            version=__version__,
            written=format.moment(time.time()),
            failure=failure(summary),
            tiles=tiles(summary),
            notes=notes,
            remarks=remarks,
            figures=text.figures(summary),
            sections=sections,
            tables=list(_tables(summary)),
        )
    )


def chart(figure: Figure) -> str:
    """Return the HTML of one chart, as it is on the page.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    macros = _environment().get_template("chart.html").module
    return str(macros.draw(figure))  # type: ignore[attr-defined]  # chart.html defines draw


def _tables(summary: Summary) -> Iterator[_Table]:
    """Yield the tables of nodes, ranks, GPUs and settings; a table without rows is left out."""
    for noun, rows in text.tables(summary).items():
        if rows:
            head, *body = format.cells(rows)
            yield _Table(format.folded(noun, rows)[0], head, body)
    settings = [*_flat("--", summary.options), *_flat("", summary.settings)]
    if settings:
        yield _Table("Configuration", ("setting", "value"), settings)


def _flat(prefix: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the full name and the value of each setting, as texts.

    Args:
        prefix: The names of the groups that contain ``settings``, such as ``optimizer.``. With
            ``--`` the names are written as options of the command line.
        settings: The values by name; a dict is a group of settings.
    """
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        elif prefix == "--":
            yield f"--{name.replace('_', '-')}", _value(value)
        else:
            yield f"{prefix}{name}", _value(value)


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _style() -> Any:
    """Return the style sheet, marked as safe so that its ``>`` is not escaped."""
    from markupsafe import Markup

    file = resources.files(__package__).joinpath(_TEMPLATES, "page.css")
    return Markup(file.read_text(encoding="utf-8"))


@functools.cache
def _environment() -> Environment:
    """Return jinja2's environment with the templates of the page. jinja2 is imported only here,
    because few commands write the page.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise ConfigError(
            f"the report's page cannot be made: {error}",
            expected="jinja2, which pip installs with srunddp",
            hint="pip install jinja2, or print the text alone with --text",
        ) from None

    def shown(value: object) -> object:
        """Escape the control characters of a text; jinja2 then escapes its HTML. Numbers and
        finished HTML are returned as they are.
        """
        if isinstance(value, str) and not isinstance(value, Markup):
            return one_line(value)
        return value

    def lines(each: Iterable[str]) -> Markup:
        # Join by Markup and not by str, because Markup.join() escapes HTML in the lines.
        return Markup("\n").join(map(one_line, each))

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, _TEMPLATES),
        autoescape=True,
        # Make a misspelled name in a template an error instead of an empty text.
        undefined=jinja2.StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["levels"] = LEVELS
    environment.filters |= {
        "lines": lines,
        "percent": format.percent,
        "pixels": lambda value: f"{value:.1f}",
        "units": lambda value: f"{value:.6g}",
        "width": lambda share: f"{share:.0%}",
    }
    return environment
