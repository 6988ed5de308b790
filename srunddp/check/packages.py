"""Which version of a package Python would import here, without importing it."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import TypedDict


class Package(TypedDict):
    """One package.

    Attributes:
        version: empty where nothing tells it; cuda: of torch, git: of torch and torchvision, else empty.
        place: the folder that it is in; empty where it is not there.
    """

    version: str
    cuda: str
    git: str
    place: str


def find(name: str, first: str = "") -> Package:
    """What ``import name`` would bring.

    Args:
        name: of the package, or of the distribution that brings it, such as PyYAML.
        first: a folder to look in first, the script's.
    """
    module = name.partition(".")[0]
    origin = _origin(module, first)
    if not origin:
        try:
            there = distribution(name)
        except (PackageNotFoundError, ValueError):
            return Package(version="", cuda="", git="", place="")
        return Package(version=there.version, cuda="", git="", place=str(there.locate_file("")))
    said = _constants(Path(origin).parent / "version.py") if module in ("torch", "torchvision") else {}
    place = _place(origin)
    return Package(
        version=said.get("__version__") or _version(module, place) or _constants(Path(origin)).get("__version__", ""),
        cuda=said.get("cuda", ""),
        git=said.get("git_version", ""),
        place=place,
    )


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


def _place(origin: str) -> str:
    package = os.path.dirname(origin) if os.path.basename(origin).startswith("__init__.") else origin
    return os.path.dirname(package)


def _version(module: str, place: str) -> str:
    found = distributed(module, place)
    return found.version if found else ""


def distributed(module: str, place: str) -> Distribution | None:
    """What was installed in the folder ``place`` as this module, rather than further along ``sys.path``."""
    found = list(distributions(path=[place]))
    same = [one for one in found if _normal(one.metadata["Name"] or "") == _normal(module)]
    return next(iter(same), None) or next((one for one in found if module in _modules(one)), None)


def _normal(name: str) -> str:
    """A package's name as all indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _modules(found: Distribution) -> Iterable[str]:
    named = found.read_text("top_level.txt")
    return named.split() if named else {file.parts[0].partition(".")[0] for file in found.files or ()}


def _constants(path: Path) -> dict[str, str]:
    """What a file assigns as plain texts; nothing where it cannot be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, str] = {}
    for line in tree.body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, ast.Constant):
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            if isinstance(line.value.value, str):
                found |= {target.id: line.value.value for target in targets if isinstance(target, ast.Name)}
    return found


_CATCH_ALL = ("RuntimeError", "Exception", "BaseException")


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


def imports(tree: ast.Module, *, guarded: bool = True) -> set[str]:
    """The packages that it imports anywhere; not ``guarded``: only those whose import it lets fail."""
    nodes = list(ast.walk(tree) if guarded else _unguarded(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def _unguarded(tree: ast.Module) -> Iterator[ast.AST]:
    todo: list[ast.AST] = [tree]
    while todo:
        yield (node := todo.pop())
        todo += [child for child in ast.iter_child_nodes(node) if not _guards(child)]


def _guards(node: ast.AST) -> bool:
    """Whether nothing of it is run, or an import in it may fail as one of a mixed build does."""
    if isinstance(node, ast.If):
        return names(node.test, "TYPE_CHECKING")
    caught = [one.type for one in node.handlers] if isinstance(node, ast.Try) else []
    return any(one is None or any(names(one, name) for name in _CATCH_ALL) for one in caught)


def names(tree: ast.AST, name: str) -> bool:
    """Whether it has this name, as a variable, an attribute or an import."""
    return any(name in (getattr(node, key, None) for key in ("id", "attr", "name")) for node in ast.walk(tree))


def quotes(tree: ast.Module, name: str) -> bool:
    """Whether a text in it is this name, or one of the operators below it: ``name::operator``."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return any(text.partition("::")[0] == name for text in texts)
