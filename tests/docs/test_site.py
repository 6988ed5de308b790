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


def test_each_page_is_built_and_found_by_the_search(html: Path) -> None:
    found = {
        item["location"].partition("#")[0]
        for item in json.loads((html / "search.json").read_text())["items"]
    }
    for page in site.PAGES:
        built = page.relative_to(ROOT).with_suffix(".html")
        built = built.with_name("index.html") if page.name == "README.md" else built
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


def test_the_python_page_has_signatures_and_docstrings(html: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (html / "docs" / "reference" / "python.html").read_text())
    for name in ("init", "Trainer", "Config", "CheckpointManager", "Preemption"):
        assert name in text
    assert "train_data" in text


def test_each_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert named | NOT_IN_NAV == {str(page.relative_to(ROOT)) for page in site.PAGES}
