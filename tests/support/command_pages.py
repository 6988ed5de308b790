"""Writes the part of docs/reference/COMMAND.md that ``--help`` says: ``python -m
tests.support.command_pages``.

It lies between two marks, below which a page goes on by hand.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from inspect import cleandoc

import click

from tests.conftest import ROOT
from tests.support.man_pages import Sections, contexts

PAGES = ROOT / "docs" / "reference"
BEGIN = "<!-- help: begin -->"
END = "<!-- help: end -->"
OF_GROUPS = ("stage",)  # their commands share the group's page


def parts() -> dict[str, str]:
    """The generated part of each page, by the name of its file."""
    made: dict[str, list[str]] = {}
    for context in contexts():
        words = context.command_path.split()[1:]
        name = words[0] if words[0] in OF_GROUPS else "-".join(words)
        if not isinstance(context.command, click.Group):
            made.setdefault(f"{name}.md", []).append(
                "\n\n".join(_of(context, alone=name not in OF_GROUPS))
            )
    return {name: "\n\n".join(found) for name, found in made.items()}


def rendered(page: str, part: str) -> str:
    """The page with this part; an AssertionError where it has no marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, page
    assert end, page
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def _of(context: click.Context, *, alone: bool) -> Iterator[str]:
    command = context.command
    sections = Sections()
    if not alone:
        yield f"## {context.command_path}"
    yield f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```"
    for part in filter(None, [*cleandoc(command.help or "").split("\n\n"), command.epilog]):
        yield (
            f"```text\n{part[2:]}\n```"
            if part.startswith("\b\n")
            else _text(" ".join(part.split()))
        )
    command.format_options(context, sections)
    for heading, rows in sections.rows.items():
        table = "\n".join(f"| {_names(names)} | {_text(text)} |" for names, text in rows)
        yield f"| {heading} | |\n|---|---|\n{table}"


def _names(text: str) -> str:
    """As code; within backticks GitHub and Zensical would each show another bar."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _text(text: str) -> str:
    """What Markdown would take for its own, as it is."""
    return re.sub(r"([|*<\[\]])", r"\\\1", text)


if __name__ == "__main__":
    for name, part in parts().items():
        page = PAGES / name
        page.write_text(rendered(page.read_text(), part))
