"""Each promise of README.md has a test, and tests/README.md says which: neither can change without
the other.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.promises import GUIDE, KnownTest, Row, as_text, blocks, find_tests, rows

README = ROOT / "README.md"
REFRESH = "python -m tests.support.promises writes the tiers anew"


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows(GUIDE.read_text())


@pytest.fixture(scope="module")
def known() -> dict[str, KnownTest]:
    return find_tests(ROOT)


def promises_nothing() -> list[str]:
    """What tests/README.md lists as parts of README.md that no test can show."""
    listed = GUIDE.read_text().partition("## What promises nothing")[2]
    return [
        as_text(line.partition(":")[0]) for line in listed.splitlines() if line.startswith("- ")
    ]


@pytest.mark.slow
def test_each_test_of_the_table_is_there(table: list[Row], known: dict[str, KnownTest]) -> None:
    assert len(table) > 50
    assert [row.test for row in table if row.test not in known] == []


@pytest.mark.slow
def test_the_table_names_the_first_tier_of_each_test(
    table: list[Row], known: dict[str, KnownTest]
) -> None:
    wrong = {
        row.test: known[row.test].tier
        for row in table
        if row.test in known and known[row.test].tier != row.tier
    }
    assert wrong == {}, REFRESH


def test_each_promise_is_in_the_words_of_the_readme(table: list[Row]) -> None:
    text = [*blocks(README.read_text())]
    assert [row.quote for row in table if not any(row.quote in block for block in text)] == []


def test_each_part_of_the_readme_has_a_row_or_promises_nothing(table: list[Row]) -> None:
    quotes = [*(row.quote for row in table), *promises_nothing()]
    text = [*blocks(README.read_text())]
    assert len(text) > 40
    assert [block for block in text if not any(quote in block for quote in quotes)] == []


def test_what_promises_nothing_is_on_the_readme() -> None:
    text = [*blocks(README.read_text())]
    assert promises_nothing()
    assert [
        quote for quote in promises_nothing() if not any(quote in block for block in text)
    ] == []


def test_the_gate_shows_each_promise(table: list[Row], known: dict[str, KnownTest]) -> None:
    """Where only Slurm or mpirun can show it, one of these tests is marked for the gate."""
    in_the_gate: dict[str, bool] = {}
    for row in table:
        if row.test in known:
            shows = known[row.test].tier != "all"
            in_the_gate[row.quote] = in_the_gate.get(row.quote, False) or shows
    assert [quote for quote, shown in in_the_gate.items() if not shown] == []


def test_what_is_marked_for_the_gate_shows_a_promise(
    table: list[Row], known: dict[str, KnownTest]
) -> None:
    """The gate has a quarter of an hour: what it runs of Slurm and mpirun is what the promises
    need.
    """
    named = {row.test for row in table}
    assert [
        name for name, test in known.items() if test.is_for_the_gate and name not in named
    ] == []


@pytest.mark.parametrize("need", ["slurm", "mpirun"])
def test_each_test_of_a_folder_is_marked_with_what_it_needs(
    need: str, known: dict[str, KnownTest]
) -> None:
    """The gate would run one without a marker, as if it needed nothing."""
    inside = [test for name, test in known.items() if name.startswith(f"tests/{need}/")]
    assert len(inside) > 10
    assert [test.name for test in inside if need not in test.marks] == []


SOME = """
import pytest

MANY = [pytest.param(1, marks=pytest.mark.gate), 2]
pytestmark = [pytest.mark.slurm]

@pytest.fixture(params=[pytest.param("mpich", marks=pytest.mark.gate)])
def mpi(request): ...

@pytest.mark.alone
@pytest.mark.parametrize("number", MANY)
def test_by_name(number): ...

@pytest.mark.parametrize("kind", gated(KINDS, "exit3"))
def test_by_helper(kind): ...

def test_by_fixture(mpi): ...

def test_of_no_gate(): ...
"""


def test_marks_are_found_wherever_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "tests" / "slurm").mkdir(parents=True)
    (tmp_path / "tests" / "slurm" / "test_some.py").write_text(SOME)
    found = {test.name.partition("::")[2]: test for test in find_tests(tmp_path).values()}
    assert {name: test.tier for name, test in found.items()} == {
        "test_by_name": "gate",
        "test_by_helper": "gate",
        "test_by_fixture": "gate",
        "test_of_no_gate": "all",
    }
    assert found["test_by_name"].marks == {"slurm", "alone"}


def test_the_parts_of_a_page_are_told_apart() -> None:
    page = "# Title\n\nOne [word](x.md)\nmore.\n\n- an `item`\n  of two lines\n- another\n\n"
    page += "| a | b |\n|---|---|\n| **1** | 2 |\n"
    assert [*blocks(page)] == ["One word more.", "an item of two lines", "another", "a b", "1 2"]
    assert re.sub(r"\s", "", "".join(blocks("```sh\nsrun x\n```\n"))) == "shsrunx"
