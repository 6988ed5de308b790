"""The pages have the same lists, tables and blocks on the site as on GitHub: Python-Markdown, which
Zensical uses, and CommonMark do not agree on what is inside a list.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.support.site import PAGES

STRUCTURE = {
    *("ol", "ul", "li", "pre", "blockquote", "hr", "img", "a", "em", "strong"),
    *("table", "tr", "th", "td"),
    *(f"h{level}" for level in range(1, 7)),
}
# They add to a page: links at headings, and colours in code.
SITE_ALONE = {"toc", "pymdownx.highlight"}
# What GitHub adds to CommonMark and its tables: alerts, footnotes, task lists and drawings.
GITHUB_ALONE = re.compile(r"^> \[!|^\s*[-*] \[[ x]\]|\[\^\w+\]|^```mermaid", re.MULTILINE)


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, also where it names Python's objects."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


class Structure(HTMLParser):
    """The elements of a page in their order, and the text between them without white space."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in STRUCTURE:
            start = dict(attrs).get("start")
            self.parts.append(f"<{tag} start={start}>" if start else f"<{tag}>")

    def handle_endtag(self, tag: str) -> None:
        if tag in STRUCTURE:
            self.parts.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        text = re.sub(r"\s", "", data)
        if not text:
            return
        if self.parts and self.parts[-1][0] != "<":
            self.parts[-1] += text
        else:
            self.parts.append(text)


def structure(html: str) -> list[str]:
    parser = Structure()
    parser.feed(html)
    return parser.parts


def on_the_site(text: str) -> str:
    import markdown  # not at the top: bin/test --quick has no extra `docs`, and collects this

    settings: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    names = [
        each if isinstance(each, str) else next(iter(each))
        for each in settings["markdown_extensions"]
    ]
    html: str = markdown.markdown(text, extensions=[n for n in names if n not in SITE_ALONE])
    return html


def on_github(text: str) -> str:
    from markdown_it import MarkdownIt  # nor this

    parser = MarkdownIt("gfm-like", {"linkify": False, "html": True}).disable("linkify")
    html: str = parser.render(text)
    return html


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_the_same_structure_on_the_site_as_on_github(page: Path) -> None:
    text = page.read_text()
    assert structure(on_the_site(text)) == structure(on_github(text))
    assert GITHUB_ALONE.findall(text) == []


@pytest.mark.parametrize("text", ["> [!NOTE]\n> A note.\n", "- [x] done\n", "said[^1]\n"])
def test_what_only_github_shows_is_seen(text: str) -> None:
    assert GITHUB_ALONE.findall(text)


@pytest.mark.parametrize(
    "text",
    [
        "1. Check:\n\n   ```sh\n   srunddp check\n   ```\n\n2. Train.\n",
        "1. Check:\n\n   - one\n\n2. Train.\n",
        "These are:\n- one\n- two\n",
        "!!! note\n    A note.\n",
        "3. Third.\n",
        "Text\n| a | b |\n|---|---|\n| 1 | 2 |\n",
    ],
)
def test_what_the_two_show_differently_is_seen(text: str) -> None:
    assert structure(on_the_site(text)) != structure(on_github(text))
