"""A YAML file, and where something stands in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from srunddp.errors import ConfigError

if TYPE_CHECKING:
    import yaml

# Parts of PyYAML's own words, what they mean to those who do not know YAML, and the hint.
_KNOWN = {
    r"character '\t'": ("a tab", "indent with spaces"),
    "alphabetic or numeric": ("a * or & without quotes", 'quote the whole value: "*"'),
    "undefined alias": ("a * without quotes", "quote the whole value, with the *"),
    "',' or '}', but got '['": ("a [ without quotes", "quote the whole value, with the brackets"),
    "mapping": (
        "a colon or an indentation that does not fit",
        "give all keys of an entry the same indentation",
    ),
}


def compose(text: bytes, path: str, **error: Any) -> yaml.Node | None:
    """Parse a YAML file into its root node.

    Args:
        text: The file's content.
        path: Its name, for messages.
        error: What else a ConfigError is to have.

    Returns:
        None for a file without content.

    Raises:
        ConfigError: It is not YAML; with file, line and column.
    """
    import yaml  # most ranks read none

    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as wrong:
        problem = getattr(wrong, "problem", None) or getattr(wrong, "reason", None)
        problem = str(problem or "nested too deeply, or a number too large")
        known = (meant for words, meant in _KNOWN.items() if words in problem)
        problem, error["hint"] = next(known, (problem, error.get("hint", "")))
        raise ConfigError(
            f"this is not YAML: {problem}", where=_error_position(wrong, text, path), **error
        ) from None


def _error_position(error: Exception, text: bytes, path: str) -> str:
    """File, line and column of what PyYAML raised; the file's first where it does not say."""
    # PyYAML counts from 0, and editors from 1.
    if mark := getattr(error, "problem_mark", None):
        return f"{path}:{mark.line + 1}:{mark.column + 1}"
    position = getattr(error, "position", None) or 0
    # In characters where one of them is not allowed, in bytes where they do not decode.
    if "special" in str(error):
        whole = text.decode(errors="replace")
    else:
        whole = text[:position].decode(errors="replace")
    before = whole[:position]
    return f"{path}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def yaml_position(path: str, node: yaml.Node) -> str:
    """Return file, line and column of a node: ``FILE:3:7``."""
    return f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def shown(node: yaml.Node) -> str:
    """Describe a node that is not what it should be, for a message."""
    if type(node).__name__ == "ScalarNode":
        return repr(node.value if len(node.value) <= 80 else node.value[:79] + "…")
    if type(node).__name__ == "SequenceNode":
        return "a list"
    return "keys with values"
