"""No module imports one that imports it, by whatever way: a reader begins at the bottom.

import-linter holds the layers between packages. This looks inside them too, and at imports in
functions and for annotations alone, which cost the program nothing, and a reader as much as others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.conftest import ROOT

# A user's callback is passed the Trainer, and its annotations say so: a Protocol in its place would
# refuse a callback that is annotated with the Trainer itself. At run time no import closes the
# ring.
KNOWN = [
    [
        "srunddp.train.callback",
        "srunddp.train.callback_runner",
        "srunddp.train.fit",
        "srunddp.train.trainer",
    ]
]


def module_of(path: Path, root: Path) -> str:
    """``srunddp.run.cli`` for its file; a package for its ``__init__.py``."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST, modules: frozenset[str]) -> Iterator[str]:
    """The modules, among these, that a module's text imports anywhere."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                wanted = [each.name for each in names]
            case ast.ImportFrom(module=str() as source, level=0, names=names):
                wanted = [f"{source}.{each.name}" for each in names]
                # A name that is no module is the source's own.
                wanted = [each if each in modules else source for each in wanted]
            case _:
                continue
        yield from (each for each in wanted if each in modules)


def graph(root: Path, package: str) -> dict[str, set[str]]:
    """The modules of a package, and what each imports of it."""
    texts = {module_of(path, root): path.read_text() for path in (root / package).rglob("*.py")}
    modules = frozenset(texts)
    return {name: {*imports_of(ast.parse(text), modules)} for name, text in texts.items()}


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """The modules that come back to themselves, each circle's together."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            for each in arrows[ahead.pop()] - found:
                found.add(each)
                ahead.append(each)
        return found

    reaches = {name: reached(name) for name in arrows}
    rings = {
        frozenset({name, *(each for each in reaches[name] if name in reaches[each])})
        for name in arrows
        if name in reaches[name]
    }
    return sorted(sorted(ring) for ring in rings)


def test_no_module_comes_back_to_itself() -> None:
    assert [ring for ring in circles(graph(ROOT, "srunddp")) if ring not in KNOWN] == []


def test_a_circle_is_found_however_it_is_closed(tmp_path: Path) -> None:
    for name, text in {
        "a": "import p.b",
        "b": "from p import c",
        "c": "def late():\n    from p.d import thing",
        "d": "if TYPE_CHECKING:\n    from p.a import Other",
        "e": "import p.a",
    }.items():
        path = tmp_path / "p" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert circles(graph(tmp_path, "p")) == [["p.a", "p.b", "p.c", "p.d"]]
