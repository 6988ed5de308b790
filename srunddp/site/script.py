"""What the text of a training script says, without running it."""

from __future__ import annotations

import ast


def parsed(script: str | None) -> tuple[ast.Module | None, str]:
    """The script, and what is wrong with its text. That it is there is another check's."""
    if script is None:
        return None, ""
    try:
        with open(script, "rb") as file:
            return ast.parse(file.read()), ""
    except (SyntaxError, ValueError) as error:
        return None, f"{script}:{getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', error)}"
    except OSError:
        return None, ""


def imports(tree: ast.Module) -> set[str]:
    """The packages that it imports anywhere."""
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def names(tree: ast.Module, name: str) -> bool:
    """Whether it has this name, as a variable, an attribute or an import."""
    return any(name in (getattr(node, key, None) for key in ("id", "attr", "name")) for node in ast.walk(tree))
