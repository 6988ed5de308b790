"""Reads and updates the table of tests/README.md: which test checks which promise of README.md, and
in which tier the test runs.

The test files are parsed and not imported, because importing them would import torch. ``python -m
tests.support.promises`` updates the tiers in the table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.conftest import NOT_QUICK, ROOT

GUIDE = ROOT / "tests" / "README.md"

# Folders whose tests need more than a plain machine and this package, each with the option of
# bin/test that runs them.
APART = {"docs": "docs", "gpu": "gpu", "interop": "interop", "soak": "soak"}
NEEDS_A_LAUNCHER = {"slurm", "mpirun"}

_MARK = re.compile(r"\bmark\.(\w+)")
_GATED = re.compile(r"\bgated\(")  # tests.slurm.conftest.gated() marks some values of a parameter
_ROW = re.compile(r"^\| *(?P<quote>[^|]*?) *\| *`(?P<test>tests/[^`]+)` *\| *(?P<tier>\w*) *\|$")


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        quote: Words of README.md, without Markdown's marks.
        test: The name of a test function, as FILE::FUNCTION.
        tier: The first tier that runs the test: quick, gate or all, or an option of
            :data:`APART`.
    """

    quote: str
    test: str
    tier: str


@dataclass(frozen=True)
class KnownTest:
    """A test function.

    Attributes:
        name: The function, as FILE::FUNCTION, with the file's path from the root of the checkout.
        marks: The names of pytest's marks on the function and on its module.
        some: The names of the marks that only some cases of the test have.
    """

    name: str
    marks: frozenset[str]
    some: frozenset[str] = field(default=frozenset())

    @property
    def folder(self) -> str:
        """The name of the folder in tests/, or of the file if it is in tests/ itself."""
        return self.name.split("/")[1]

    @property
    def needs_a_launcher(self) -> bool:
        return not self.marks.isdisjoint(NEEDS_A_LAUNCHER)

    @property
    def is_for_the_gate(self) -> bool:
        return "gate" in self.marks | self.some

    @property
    def tier(self) -> str:
        """The first tier that runs the test, or some of its cases."""
        if self.folder in APART:
            return APART[self.folder]
        if self.needs_a_launcher:
            return "gate" if self.is_for_the_gate else "all"
        if self.folder in NOT_QUICK or not self.marks.isdisjoint({"slow", "alone"}):
            return "gate"
        return "quick"


def as_text(markdown: str) -> str:
    """Return the words of a text without Markdown's marks for links, code, bold, quotations, items
    of lists and cells of tables.
    """
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", markdown)
    text = re.sub(r"`|\*\*|^> |^\s*- ", "", text, flags=re.MULTILINE)
    return " ".join(text.replace("|", " ").split())


def blocks(page: str) -> Iterator[str]:
    """Yield the text of each part of a page that may promise something: of each paragraph, item of
    a list, row of a table, and block of code.
    """
    code = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    for block in code.findall(page):
        yield as_text(block.strip("`\n"))
    for paragraph in re.split(r"\n{2,}", code.sub("", page)):
        # Split before each item of a list and before each row of a table. An item may have several
        # lines.
        for part in re.split(r"\n(?=- |\|)", paragraph.strip()):
            if part and not re.fullmatch(r"#.*|\|[-|]*", part):
                yield as_text(part)


def rows(page: str) -> list[Row]:
    """Read the lines of the table in a page. A line without words of README.md has the words of the
    line above it.
    """
    found: list[Row] = []
    for line in page.splitlines():
        if match := _ROW.match(line):
            quote = as_text(match["quote"]) or found[-1].quote
            found.append(Row(quote, match["test"], match["tier"]))
    return found


def with_tiers(page: str, known: dict[str, KnownTest]) -> str:
    """Return the page with the present tiers in its table. The row of a test that is not known
    stays as it is.
    """
    lines = page.splitlines()
    for number, line in enumerate(lines):
        if (match := _ROW.match(line)) and match["test"] in known:
            lines[number] = (
                f"| {match['quote']} | `{match['test']}` | {known[match['test']].tier} |"
            )
    return "\n".join(lines) + "\n"


def find_tests(root: Path) -> dict[str, KnownTest]:
    """Find all test functions of a checkout, by name."""
    return {
        test.name: test
        for path in sorted((root / "tests").rglob("test_*.py"))
        for test in _of_file(root, path)
    }


def _of_file(root: Path, path: Path) -> Iterator[KnownTest]:
    tree = ast.parse(path.read_text())
    values = _values(tree)
    if "pytestmark" in values:
        of_module = _marks(values["pytestmark"], values)
    else:
        of_module = set()
    fixtures = {**_fixtures(_parent(path)), **_functions(tree)}
    for name, function in _functions(tree).items():
        if not name.startswith("test_"):
            continue
        own: set[str] = set()
        some: set[str] = set()
        for decorator in function.decorator_list:
            direct = ast.unparse(decorator).startswith(
                "pytest.mark."
            ) and "parametrize" not in ast.unparse(decorator)
            (own if direct else some).update(_marks(decorator, values))
        for argument in function.args.args:
            if argument.arg in fixtures:
                for decorator in fixtures[argument.arg].decorator_list:
                    some |= _marks(decorator, values)
        yield KnownTest(
            f"{path.relative_to(root)}::{name}", frozenset(own | of_module), frozenset(some)
        )


def _parent(path: Path) -> Path:
    return path.with_name("conftest.py")


@cache
def _fixtures(conftest: Path) -> dict[str, ast.FunctionDef]:
    if conftest.exists():
        return _functions(ast.parse(conftest.read_text()))
    return {}


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _values(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the expressions that a module assigns to its own names."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _marks(expression: ast.expr, values: dict[str, ast.expr]) -> set[str]:
    """Return the names of the marks in an expression, and in the expressions that its names stand
    for.
    """
    source = ast.unparse(expression)
    found = set(_MARK.findall(source))
    if _GATED.search(source):
        found.add("gate")
    for node in ast.walk(expression):
        if isinstance(node, ast.Name) and node.id in values:
            rest = {name: value for name, value in values.items() if name != node.id}
            found |= _marks(values[node.id], rest)
    return found


if __name__ == "__main__":
    GUIDE.write_text(with_tiers(GUIDE.read_text(), find_tests(ROOT)))
