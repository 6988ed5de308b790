"""Writes what a command's ``--help`` says into docs/reference/COMMAND.md: ``python -m
tests.support.command_pages``.

The generated part lies between two marks. What is below them is written by hand.
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
OF_GROUPS = ("stage",)  # groups whose commands share one page, named after the group


def parts() -> dict[str, str]:
    """Return the generated part of each page, by the name of the page's file."""
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
    """Return a page with the part between its marks. A page without marks fails the assertions."""
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
    """Return the names of an option or a command as code. They are between tags, because GitHub and
    Zensical show an escaped bar between backticks in different ways.
    """
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _text(text: str) -> str:
    """Escape the characters that have a meaning in Markdown."""
    return re.sub(r"([|*<\[\]])", r"\\\1", text)


if __name__ == "__main__":
    for name, part in parts().items():
        page = PAGES / name
        page.write_text(rendered(page.read_text(), part))
