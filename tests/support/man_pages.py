"""Writes the manual pages of docs/man: ``python -m tests.support.man_pages``.

click-man makes the pages of the commands from ``--help``, and pandoc makes the page of ifaces.conf
from a page in Markdown.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path
from typing import Protocol

import click
from click_man.man import ManPage

from srunddp.cli import main
from tests.conftest import ROOT

MAN = ROOT / "docs" / "man"
SOURCE = MAN / "ifaces.conf.5.md"
ROOT_CONTEXT = click.Context(main, info_name="srunddp", **main.context_settings)
# Characters that roff would take for a command, or show as a different character.
_ROFF = str.maketrans(
    {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "~": "\\(ti", "^": "\\(ha"}
)
# Matches the names of options with their dashes, and the name of a command.
_NAMES = r"(?<!\w)(?:\\-)+[\w\\-]+|^[a-z]+(?: [a-z]+)*"


class Sections(click.HelpFormatter):
    """A formatter of click that collects the rows of ``--help`` by heading, instead of text."""

    def __init__(self) -> None:
        super().__init__(width=10_000)
        self.rows: dict[str, list[tuple[str, str]]] = {}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.title = name
        yield

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        self.rows[self.title] = [*rows]


class _ClickManPage(Protocol):
    """The attributes of click-man's page that are used here. click-man has no types. ``str()``
    returns the text of the page.
    """

    command: str
    version: str
    date: str
    short_help: str
    synopsis: str
    description: str


class _Page:
    """The manual page of a command: click-man's page with the headings and the indented lines of
    ``--help``, and without a date.
    """

    def __init__(self, context: click.Context) -> None:
        command = context.command
        formatter = Sections()
        page: _ClickManPage = ManPage(context.command_path)
        page.version = "srunddp"
        page.date = ""
        page.short_help = _roff(command.get_short_help_str(limit=1000).rstrip("."))
        page.synopsis = " ".join(command.collect_usage_pieces(context))
        parts = [*cleandoc(command.help or "").split("\n\n"), command.epilog]
        page.description = "\n".join(_paragraph(part) for part in parts if part)
        command.format_options(context, formatter)
        self.sections = formatter.rows
        if command is main:  # its --help is written by hand, and not by click
            usage, _, examples, *lists = command.get_help(context).split("\n\n")
            page.synopsis = usage.removeprefix("Usage: srunddp ").replace(
                "\n       srunddp ", "\n.br\n.B srunddp\n"
            )
            page.description += "\n" + _paragraph(f"\b\n{cleandoc(examples)}")
            self.sections = dict(_section(each) for each in lists)
        self.page = page
        related = [
            each.command_path.replace(" ", "-")
            for each in (context.parent, *_below(context))
            if each
        ]
        self.related = [*(f"{name} (1)" for name in related), "ifaces.conf (5)"]

    def __str__(self) -> str:
        title = self.page.command.upper()
        lines = str(self.page).replace(title, title.replace(" ", "-"), 1).splitlines()
        lines[1:1] = [".nh", ".ad l"]
        if not {"Options", "Commands"} & self.sections.keys():
            lines.append(".SH OPTIONS" if " " in self.page.command else ".SH COMMANDS")
        for heading, rows in self.sections.items():
            lines.append(
                f".SH {heading.upper()}" if heading in ("Options", "Commands") else f".SS {heading}"
            )
            for names, text in rows:
                lines += [
                    ".TP",
                    re.sub(_NAMES, r"\\fB\g<0>\\fR", _roff(names)),
                    *([_roff(text)] if text else []),
                ]
        lines += [".SH SEE ALSO", *(f".BR {_roff(each)}," for each in self.related)]
        return "\n".join(lines).rstrip(",") + "\n"


def _section(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the heading and the rows of a list in ``srunddp --help``, where two or more spaces
    divide a row into its two columns.
    """
    title, *lines = [line.strip() for line in text.splitlines()]
    rows = []
    for line in lines:
        names, explanation = re.split("  +", line)
        rows.append((names, explanation))
    return title.rstrip(":"), rows


def _roff(text: str) -> str:
    return re.sub(r"^\.", r"\\&.", text.translate(_ROFF), flags=re.MULTILINE)


def _paragraph(text: str) -> str:
    if text.startswith("\b\n"):
        return f".PP\n.RS 4\n.nf\n{_roff(text[2:])}\n.fi\n.RE"
    return f".PP\n{_roff(text)}"


def _below(context: click.Context) -> Iterator[click.Context]:
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command
            yield click.Context(command, parent=context, info_name=name)


def contexts(context: click.Context | None = None) -> Iterator[click.Context]:
    """Yield the contexts of all commands below a command; None for those below srunddp itself."""
    for each in _below(context or ROOT_CONTEXT):
        yield each
        yield from contexts(each)


def pages() -> dict[str, str]:
    """Return the pages of all commands, by the names of their files."""
    every = (ROOT_CONTEXT, *contexts())
    return {f"man1/{each.command_path.replace(' ', '-')}.1": str(_Page(each)) for each in every}


def page_of_file() -> str:
    """Return the page of ifaces.conf.

    Raises:
        FileNotFoundError: pandoc is missing.
    """
    command = [
        "pandoc",
        "--standalone",
        "--from=markdown-smart",
        "--to=man",
        "--metadata=hyphenate:false",
        "--variable=adjusting:l",
    ]
    text = subprocess.run(
        [*command, str(SOURCE)], capture_output=True, text=True, check=True
    ).stdout
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith('.\\"'))


if __name__ == "__main__":
    for name, text in (pages() | {"man5/ifaces.conf.5": page_of_file()}).items():
        path = Path(MAN, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
