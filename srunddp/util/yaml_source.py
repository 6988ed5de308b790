"""Where something stands in a YAML file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import yaml


def yaml_error_position(error: Exception, text: bytes, path: str) -> str:
    """File, line and column of what PyYAML raised; the file's first where it does not say."""
    if mark := getattr(error, "problem_mark", None):
        return f"{path}:{mark.line + 1}:{mark.column + 1}"
    position = getattr(error, "position", None) or 0
    # In characters where one of them is not allowed, in bytes where they do not decode.
    whole = text.decode(errors="replace") if "special" in str(error) else text[:position].decode(errors="replace")
    before = whole[:position]
    return f"{path}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def yaml_position(path: str, node: yaml.Node) -> str:
    """File, line and column of a node."""
    return f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
