"""The size of the code, and the words it uses: bounds that only fall."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

PRODUCT_LINES, TEST_LINES = 29_439, 43_799
MODULES, MODULE_LINES = 183, 350
TEST_NAME = 60

# What modules, classes, functions, parameters and variables were called before they had the field's words.
OLD_WORDS = """
Act Alone Announcement Apart Asked Average Bench Caller Claim Company Crowd Deal Deferred Door Drawn Feed Guard Held
History Hub Keeping LateLoss LostError Met MismatchError Named NoWorldError NotAfterPmi Outliers Pace Post Prepared
Pump Raised Rates Replica Requests Rising Roster Rows Saving Shelf Silent Stateful Story Sums Told Unproven Ways Wire
Wish Wishes allow_many announce announcement because company condemn crowd crowds cure cures deal door farewell feeds
hear hub in_copies is_guarded is_well judge known_as learnt looked_up mourn news odd_one odd_ones on_channel rehearse
rehearses replica replica_of roster shelf shield_worker shielded standing story tells_of tidy told typed_into
undisturbed unguarded unheard unordered waited why_not wish wished wishes without_name_lookups
"""


@cache
def tree(folder: str) -> dict[Path, str]:
    """The text files that git has below a folder, or those that are there where git is absent."""
    done = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    names = done.stdout.split("\0")[:-1] or [str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*")]
    paths = [ROOT / name for name in names if "__pycache__" not in name and (ROOT / name).is_file()]
    return {path: path.read_text() for path in paths if folder == "srunddp" or path.suffix == ".py"}


def lines(text: str) -> int:
    return text.count("\n")


def modules() -> dict[Path, str]:
    return {path: text for path, text in tree("srunddp").items() if path.suffix == ".py" and path.stem != "__init__"}


def identifiers(text: str) -> Iterator[str]:
    """What a module defines or assigns: not what it reads, which may be another project's."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


@pytest.mark.parametrize(("folder", "limit"), [("srunddp", PRODUCT_LINES), ("tests", TEST_LINES)])
def test_the_lines_of_product_and_tests_are_bounded(folder: str, limit: int) -> None:
    total = sum(map(lines, tree(folder).values()))
    assert total <= limit


def test_modules_are_few() -> None:
    number = len(modules())
    assert number <= MODULES


def test_no_module_is_long() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {lines(text)}" for path, text in modules().items() if lines(text) > MODULE_LINES
    ]
    assert long == []


def test_names_of_tests_are_short_and_no_rows_of_a_table() -> None:
    names = [name for text in tree("tests").values() for name in identifiers(text) if name.startswith("test_")]
    assert [name for name in names if len(name) > TEST_NAME or name.startswith("test_row_")] == []


@pytest.mark.parametrize("folder", ["srunddp", "tests"])
def test_no_old_word_is_left(folder: str) -> None:
    old = set(OLD_WORDS.split())
    files = {path: text for path, text in tree(folder).items() if path.suffix == ".py" and "programs" not in path.parts}
    found = []
    for path, text in files.items():
        names = {name.lstrip("_") for name in identifiers(text)} | set(path.relative_to(ROOT).with_suffix("").parts)
        found += [f"{path.relative_to(ROOT)}: {word}" for word in sorted(old & names)]
    assert found == []
