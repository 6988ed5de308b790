"""The report as one HTML file: no script, nothing from elsewhere, the charts in it."""

import time
from collections.abc import Iterator, Sequence
from importlib import resources

from srunddp._version import __version__
from srunddp.report import format, text
from srunddp.report.advice import Advice
from srunddp.report.overview import failure, tiles
from srunddp.report.panels import Section
from srunddp.report.summary import Summary
from srunddp.report.svg import escaped


def page(summary: Summary, notes: Sequence[Advice], sections: Sequence[Section]) -> str:
    """All of it."""
    title = escaped(
        f"Run {summary.name or '?'}: {format.count(summary.world_size, 'rank')}, {summary.script}"
    )
    head, *rest = text.heading(summary)
    failed = failure(summary)
    parts = [
        f"<h1>{escaped(head)}</h1>",
        *(f"<p>{escaped(line)}</p>" for line in rest),
        (
            f'<p class="missing">srunddp {__version__}, report of'
            f" {escaped(format.moment(time.time()))}</p>"
        ),
        *([_note(failed)] if failed else []),
        *_tiles(summary),
        *_notes(summary, notes),
        "<h2>Figures</h2>\n<table>",
        *(
            f"<tr><th>{about}</th><td>{escaped(said)}</td></tr>"
            for about, said in text.figures(summary).items()
        ),
        "</table>",
        *(
            f'<h2>{each.title}</h2>\n{each.html}<p class="missing">{escaped(each.missing)}</p>'
            for each in sections
        ),
        *_tables(summary),
    ]
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{title}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _tiles(summary: Summary) -> Iterator[str]:
    """The figures at a glance, each with its bar."""
    yield '<div class="tiles">'
    for tile in tiles(summary):
        if tile.share is None:
            bar = ""
        else:
            bar = f'<div class="bar"><div style="width: {tile.share:.0%}"></div></div>'
        name, value, detail = map(escaped, (tile.name, tile.value, tile.detail))
        yield (
            f'<div class="tile"><p>{name}</p><p class="value">{value}</p>{bar}<p'
            f' class="missing">{detail}</p></div>'
        )
    yield "</div>"


def _notes(summary: Summary, notes: Sequence[Advice]) -> Iterator[str]:
    yield "<h2>Notes</h2>"
    yield from map(_note, notes)
    said = text.remarks(summary) or ([] if notes else ["No threshold is passed"])
    yield from (f'<p class="missing">{escaped(line)}.</p>' for line in said)


def _note(note: Advice) -> str:
    if note.cost:
        cost = f'<strong class="cost">{format.percent(note.cost)} of the step time</strong>'
    else:
        cost = ""
    if note.threshold:
        limit = f" (threshold: {escaped(note.threshold)})"
    else:
        limit = ""
    return (
        f'<div class="note {note.severity}">{cost}<p><strong>{escaped(note.rule)}</strong>: '
        f"{escaped(note.found)}{limit}.</p><p>Next: {escaped(note.hint)}</p></div>"
    )


def _tables(summary: Summary) -> Iterator[str]:
    """Nodes, ranks and GPUs, folded away under what is the same for all."""
    yield "<h2>Tables</h2>"
    for noun, rows in text.tables(summary).items():
        if rows:
            head, *body = format.cells(rows)
            yield f"<details><summary>{escaped(format.folded(noun, rows)[0])}</summary>"
            titles = "".join(f"<th>{escaped(cell)}</th>" for cell in head)
            yield f"<table><thead>\n<tr>{titles}</tr>\n</thead><tbody>"
            yield from (
                "<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>"
                for row in body
            )
            yield "</tbody></table>\n</details>"
