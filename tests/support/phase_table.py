"""Writes the phases of a supervisor into docs/how-it-works.md: ``python -m
tests.support.phase_table``.

Each table lies between two marks. It is made from the code: from the values of the phases, and from
the docstrings of the events and of the functions in the table of transitions.
"""

from __future__ import annotations

from inspect import cleandoc
from itertools import groupby

from srunddp.supervisor import phases
from srunddp.supervisor.phases import Phase, Row
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "how-it-works.md"
BEGIN = "<!-- {}: begin -->"
END = "<!-- {}: end -->"


def rendered(page: str) -> str:
    """Return the page with the present tables between their marks."""
    page = _replaced(page, "phases of a supervisor", _phases())
    page = _replaced(page, "events of a supervisor", _events())
    return _replaced(page, "transitions of a supervisor", _transitions())


def _phases() -> str:
    rows = ["| phase | what it means |", "|---|---|"]
    rows += [f"| {phase.name} | {phase.value} |" for phase in Phase]
    return "\n".join(rows)


def _events() -> str:
    rows = ["| event | what has happened |", "|---|---|"]
    for event in dict.fromkeys(row.event for row in phases.ROWS):
        rows.append(f"| `{event.__name__}` | {_summary(event.__doc__)} |")
    return "\n".join(rows)


def _transitions() -> str:
    rows = ["| phase | event | what is done | then |", "|---|---|---|---|"]
    # The code has a row for each event. Rows that differ only in the event are shown as one row.
    for (take, before, following), same in groupby(phases.ROWS, _shown_as_one):
        events = ", ".join(f"`{row.event.__name__}`" for row in reversed(list(same)))
        then = "the same" if following == before else _names(following)
        rows.append(f"| {_names(before)} | {events} | {_summary(take.__doc__)} | {then} |")
    return "\n".join(rows)


def _shown_as_one(row: Row) -> tuple[object, tuple[Phase, ...], tuple[Phase, ...]]:
    return row.take, row.phases, row.following


def _names(named: tuple[Phase, ...]) -> str:
    return ", ".join(phase.name for phase in named)


def _summary(docstring: str | None) -> str:
    """Return the text of a docstring before its attributes, in one line."""
    text, _, _ = cleandoc(docstring or "").partition("\n\nAttributes:\n")
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _replaced(page: str, name: str, text: str) -> str:
    begin = BEGIN.format(name)
    end = END.format(name)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
