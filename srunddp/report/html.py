"""The report as one HTML file: no script, nothing from elsewhere, the charts in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources

from srunddp.errors import one_line
from srunddp.report import format, slurm, text
from srunddp.report.advice import Advice, too_short
from srunddp.report.panels import Section
from srunddp.report.summary import Summary

_STYLE = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
_OPEN = 40  # rows of a table that are shown at once


def page(
    summary: Summary,
    notes: Sequence[Advice],
    sections: Sequence[Section],
    view: slurm.SlurmAccounting,
) -> str:
    """All of it."""
    title = _escaped(f"Run {summary.name or '?'}: {format.count(summary.world_size, 'rank')}, {summary.script}")
    head, *rest = text.heading(summary)
    parts = [
        f"<h1>{_escaped(head)}</h1>",
        *(f"<p>{_escaped(line)}</p>" for line in rest),
        *_notes(summary, notes),
        *_figures(summary),
        *(part for section in sections for part in _charts(section)),
        *_section("Epochs and evaluations", [*_spans(summary)]),
        *_section("Launch phases", [*_launch(summary)]),
        *_section("Nodes", text.node_rows(summary.per_node)),
        *_section("Ranks", text.rank_rows(summary)),
        *_section("GPUs", text.gpu_rows(summary.gpus)),
        *_slurm(view),
    ]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _escaped(words: str) -> str:
    return escape(one_line(words))


def _notes(summary: Summary, notes: Sequence[Advice]) -> Iterable[str]:
    yield "<h2>Notes</h2>"
    if why := too_short(summary):
        yield f'<p class="none">No note; {_escaped(why)}.</p>'
    elif not notes:
        yield '<p class="none">No note: no threshold is passed.</p>'
    for note in notes:
        yield (
            f'<div class="note"><p><strong>{_escaped(note.rule)}</strong>: {_escaped(note.found)} '
            f"(threshold: {_escaped(note.threshold)}).</p><p>Next: {_escaped(note.hint)}</p></div>"
        )
    yield from (f'<p class="missing">{_escaped(line)}.</p>' for line in text.remarks(summary))


def _figures(summary: Summary) -> Iterable[str]:
    yield "<h2>Figures</h2>\n<table>"
    for title, found in text.sections(summary).items():
        if found:
            yield f"<tr><th>{_escaped(title)}</th><td>{'<br>'.join(map(_escaped, found))}</td></tr>"
    yield "</table>"


def _charts(section: Section) -> Iterable[str]:
    yield f"<h2>{_escaped(section.title)}</h2>"
    yield section.html
    if section.missing:
        yield f'<p class="missing">{_escaped(section.missing)}</p>'


def _section(title: str, rows: Sequence[Sequence[str]]) -> Iterable[str]:
    if len(rows) < 2:
        return
    yield f"<h2>{title}</h2>"
    yield from _table(rows[: _OPEN + 1])
    if more := rows[_OPEN + 1 :]:
        yield f"<details><summary>{len(more)} more</summary>"
        yield from _table([rows[0], *more])
        yield "</details>"


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    head = "".join(f"<th>{_escaped(cell)}</th>" for cell in rows[0])
    yield f"<table><thead>\n<tr>{head}</tr>\n</thead><tbody>"
    yield from ("<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    yield "</tbody></table>"


def _spans(summary: Summary) -> Iterator[list[str]]:
    yield ["", "begin", "end", "lasted"]
    named = [(f"epoch {format.UNKNOWN if span.number is None else span.number}", span) for span in summary.epochs]
    named += [("evaluation", span) for span in summary.evaluations]
    for name, span in sorted(named, key=lambda pair: pair[1].begin):
        lasted = format.duration(None if span.end is None else span.end - span.begin)
        end = "not recorded" if span.end is None else format.clock(span.end)
        yield [name, format.clock(span.begin), end, lasted]


def _launch(summary: Summary) -> Iterator[list[str]]:
    yield ["phase", "shortest", "longest", "of rank"]
    for name, least, most, rank in text.launch_rows(summary):
        yield [name, format.duration(least), format.duration(most), str(rank)]


def _slurm(view: slurm.SlurmAccounting) -> Iterable[str]:
    yield "<h2>Slurm's view</h2>"
    yield f"<p>{_escaped(view.sentence)}</p>"
    if view.rows:
        yield from _table(text.slurm_rows(view))
    if view.seff:
        yield "<pre>" + "\n".join(map(_escaped, view.seff.splitlines())) + "</pre>"
