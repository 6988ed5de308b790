"""The pages keep what they promise: every link leads somewhere."""

from __future__ import annotations

import re

import pytest

from srunddp.settings.keys import keys_of
from srunddp.settings.typed import text_of
from srunddp.site.jobs.job import Job, MpiJob, Start
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


def named(title: str) -> dict[str, str]:
    """The keys of a section's tables in the reference, with their defaults."""
    section = (ROOT / "docs" / "reference.md").read_text().split(f"\n### {title}\n")[1].split("\n### ")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \|", section, re.MULTILINE))


def keys(kind: type) -> dict[str, str]:
    return {name: text_of(key.default) or "''" for name, key in keys_of(kind).items()}


def test_every_setting_of_the_loop_is_in_the_reference_with_its_default() -> None:
    from srunddp.train.config import Config

    assert named("Settings") == keys(Config)


def test_every_key_of_a_job_script_is_in_the_reference_with_its_default() -> None:
    assert named("srunddp sbatch") == keys(Job)
    assert named("srunddp mpirun") == {name: value for name, value in keys(MpiJob).items() if name not in keys(Start)}
    assert set(keys(Start)) == set([*named("srunddp sbatch")][: len(keys(Start))])
