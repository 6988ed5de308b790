"""One version in all files, and a changelog in which each change is under the version that brings
it.
"""

from __future__ import annotations

import re
from collections import Counter

from packaging.version import Version

from srunddp import __version__
from tests.conftest import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_every_file_that_says_the_version_says_this_one() -> None:
    for name, pattern in {
        "README.md": r"\*\*Status: (\S+)\.\*\*",
        "CITATION.cff": r"^version: (.+)$",
        "docs/start.md": r"prints `srunddp, version (.+?)`",
    }.items():
        found = re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)
        assert found == [__version__], name


def test_the_changelog_is_unreleased_above_while_this_version_is_in_development() -> None:
    newest, *older = re.findall(r"^## \[(.+?)\]", CHANGELOG, re.MULTILINE)
    if Version(__version__).is_devrelease:
        assert newest == "Unreleased"
    else:
        assert newest == __version__
    released = [Version(name) for name in older]
    assert released == sorted(released, reverse=True)
    assert all(version < Version(__version__) for version in released)


def test_each_part_of_a_version_is_in_the_changelog_once() -> None:
    for section in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE):
        parts = re.findall(r"^(### .+|\*\*[^*:]+)", section, re.MULTILINE)
        assert [part for part, count in Counter(parts).items() if count > 1] == []
