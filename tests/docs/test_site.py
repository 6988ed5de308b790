"""The site is built strictly, and has all pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import site

# Linked from other pages alone.
NOT_IN_NAV = {"docs/reference/README.md"}


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    site.build(folder / "site")
    return folder / "site" / "html"


def built_from(page: Path) -> Path:
    """The file of the site that a page becomes."""
    if page.name == "README.md":
        return page.relative_to(ROOT).with_name("index.html")
    return page.relative_to(ROOT).with_suffix(".html")


def test_each_page_is_built_and_found_by_the_search(html: Path) -> None:
    found = {
        item["location"].partition("#")[0]
        for item in json.loads((html / "search.json").read_text())["items"]
    }
    for page in site.PAGES:
        built = built_from(page)
        assert (html / built).exists(), built
        assert str(built).removesuffix("index.html") in {
            each.removesuffix("index.html") for each in found
        }, built


def test_the_site_fetches_nothing_from_elsewhere(html: Path) -> None:
    for page in html.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]* (?:src|href)="?(https?://[^" >]+)', page.read_text()
        )
        assert loaded == [], page


def test_each_page_has_the_style_by_which_long_lines_of_output_wrap(html: Path) -> None:
    style = html / "docs" / "site.css"
    assert "pre-wrap" in style.read_text()
    for page in site.PAGES:
        built = html / built_from(page)
        linked = re.findall(r'<link[^>]* href="?([^" >]+/site\.css|site\.css)', built.read_text())
        assert [(built.parent / link).resolve() for link in linked] == [style.resolve()], page


def test_the_python_pages_have_signatures_and_docstrings(html: Path) -> None:
    for page, names in {
        "python": ("srunddp.heartbeat", "train_data", "PeerError"),
        "python-train": ("CheckpointManager", "Preemption", "import_torchvision"),
    }.items():
        text = (html / "docs" / "reference" / f"{page}.html").read_text()
        shown = re.sub(r"<[^>]+>", "", text)
        assert [name for name in names if name not in shown] == [], page


def test_each_page_has_a_title_and_a_description_of_its_own(html: Path) -> None:
    """Search engines show these, and no page says what another one does."""
    seen: dict[str, Path] = {}
    for page in site.PAGES:
        text = (html / built_from(page)).read_text()
        for pattern in (r"<title>(.+?)</title>", r'<meta name="description" content="(.+?)">'):
            [found] = re.findall(pattern, text)
            assert seen.setdefault(found, page) == page, found


def test_a_description_is_the_first_sentences_of_the_text() -> None:
    before = "# Title\n\n```sh\nfirst\n```\n\n- a list\n\n"
    text = "One `code`, [a link](there.md).\nTwo. Three:\n"
    assert site.description(before + text) == "One code, a link. Two."
    assert site.description(before) == ""


def test_with_an_address_the_site_has_a_link_to_the_repository() -> None:
    assert "repo_url: https://git.example/srunddp\n" in site.configuration(
        "https://git.example/srunddp"
    )
    assert "repo_url:" not in site.configuration("")


def test_each_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert named | NOT_IN_NAV == {str(page.relative_to(ROOT)) for page in site.PAGES}
