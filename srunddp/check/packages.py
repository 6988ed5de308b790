"""Which version of a package Python would import here, and which packages a script imports; nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from importlib.machinery import PathFinder
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from typing import TypedDict

from srunddp.util.kernel_file import text_of


class Package(TypedDict):
    """One package: its version, empty where nothing tells it, and the folder that it is in, empty where it is not."""

    version: str
    place: str


def find(name: str, first: str = "") -> Package:
    """What ``import name`` would bring, or the distribution of that name; ``first`` is the script's folder."""
    module = name.partition(".")[0]
    origin = _origin(module, first)
    if not origin:
        there = next(iter(distributions(name=name) if name else ()), None)
        return Package(version=there.version if there else "", place=str(there.locate_file("")) if there else "")
    package = os.path.dirname(origin) if os.path.basename(origin).startswith("__init__.") else origin
    place = os.path.dirname(package)
    # That of torch tells its build as well, which its metadata need not.
    own = _assigned(Path(package, "version.py")) if module == "torch" else ""
    return Package(version=own or _version(module, place) or _assigned(Path(origin)), place=place)


def _origin(module: str, first: str) -> str:
    """The file of a module, or the folder of a package without ``__init__``; empty where there is none."""
    try:
        spec = PathFinder.find_spec(module, [first]) if first else None
        if spec is None or spec.origin is None:  # a plain folder beside the script hides no package
            spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def _version(module: str, place: str) -> str:
    """Of what was installed in the folder ``place`` as this module, rather than further along ``sys.path``."""
    for name in (module, *packages_distributions().get(module, ())):
        for found in distributions(name=name, path=[place]):
            return found.version
    return ""


def _assigned(path: Path) -> str:
    """The text that a file assigns to ``__version__``; empty where it cannot be read."""
    found = re.search(r"""^__version__\s*(?::[^=\n]*)?=\s*["']([^"'\n]*)["']""", text_of(path), re.MULTILINE)
    return found[1] if found else ""


def parsed(script: str | None) -> tuple[ast.Module | None, str]:
    """The script, and what is wrong with its text. That it is there is another check's."""
    if script is None:
        return None, ""
    try:
        with open(script, "rb") as file:
            return ast.parse(file.read()), ""
    except (SyntaxError, ValueError) as error:
        return None, f"{script}:{getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', error)}"
    except (OSError, RecursionError):  # Python itself may run what is too deep for ast
        return None, ""


def imports(tree: ast.Module) -> set[str]:
    """The packages that it imports anywhere, but for what is in a ``try`` block or for type checkers alone."""
    names: set[str] = set()
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
        elif not isinstance(node, ast.Try) and not (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ):
            todo += ast.iter_child_nodes(node)
    return {name.partition(".")[0] for name in names}
