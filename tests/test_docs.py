"""The pages keep what they promise: every link leads somewhere."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there.read_text()), target


def test_every_setting_of_the_loop_is_in_the_reference_with_its_default() -> None:
    from srunddp.settings.keys import keys_of
    from srunddp.settings.typed import text_of
    from srunddp.train.config import Config

    section = (ROOT / "docs" / "reference.md").read_text().split("\n### Settings\n")[1].split("\n### ")[0]
    named = dict(re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \|", section, re.MULTILINE))
    assert named == {name: text_of(key.default) or "''" for name, key in keys_of(Config).items()}
