"""What the text of a training script says, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

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
