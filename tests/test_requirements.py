"""What an installation brings: README.md says it, and setup.py does it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


def argument(name: str) -> object:
    """The value of an argument of ``setup()`` that is written out."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    [call] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"
    ]
    [value] = [keyword.value for keyword in call.keywords if keyword.arg == name]
    found: object = ast.literal_eval(value)
    return found


def ranges(requirements: object) -> dict[str, str]:
    """The versions that each requirement admits, by package."""
    assert isinstance(requirements, Iterable)
    found = {}
    for requirement in requirements:
        match = re.fullmatch(r"([\w.-]+)(.*)", requirement)
        assert match
        found[match[1].lower()] = match[2]
    return found


def test_a_torch_that_is_new_enough_stays() -> None:
    """There is a lower bound and no upper one, so pip has no reason to replace it."""
    [oldest] = re.findall(r"keeps your torch if it is ([\d.]+) or newer", README)
    assert ranges(argument("install_requires"))["torch"] == f">={oldest}"
    extras = argument("extras_require")
    assert isinstance(extras, dict)
    assert [
        extra for extra, requirements in extras.items() if "torch" in ranges(requirements)
    ] == []


def test_the_readme_names_all_that_is_added() -> None:
    [sentence] = re.findall(r"It adds (.*?) if they are\s+missing", README)
    said = {name.lower() for name in re.split(r", | and ", sentence)}
    assert said | {"torch"} == set(ranges(argument("install_requires")))


def test_each_extra_brings_what_the_readme_says() -> None:
    extras = argument("extras_require")
    assert isinstance(extras, dict)
    assert set(ranges(extras["mpi"])) == {"mpi4py"}
    assert set(ranges(extras["stage"])) == {"uv"}
    named = set(re.findall(r'"\.\[(\w+)\]"', README))
    assert named == set(extras) - {"test", "docs"}


def test_the_oldest_python_is_that_of_the_readme() -> None:
    [oldest] = re.findall(r"Python (\d\.\d+) or newer", README)
    assert argument("python_requires") == f">={oldest}"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
