"""Parse a YAML file, and name the position of a node in it for messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from srunddp.errors import ConfigError

if TYPE_CHECKING:
    import yaml

# For each known mistake, a fragment of PyYAML's message, and what users who do not know YAML get
# instead: an explanation and a hint. LINE is replaced by the number of the line in which the
# unfinished list or mapping begins.
_KNOWN = {
    r"character '\t'": ("a tab", "indent with spaces"),
    "alphabetic or numeric": ("a * or & without quotes", 'quote the whole value: "*"'),
    "nested deeper": (
        "too many brackets, braces or `- `, one in another",
        "close those that are open, and write fewer levels",
    ),
    "undefined alias": ("a * without quotes", "quote the whole value, with the *"),
    "',' or '}', but got '['": ("a [ without quotes", "quote the whole value, with the brackets"),
    "',' or '}'": (
        "a { in line LINE that is not closed, or a comma that is missing after it",
        "write {A: 1, B: 2}",
    ),
    "',' or ']'": (
        "a [ in line LINE that is not closed, or a comma that is missing after it",
        "write [a, b]",
    ),
    "mapping": (
        "a colon or an indentation that does not fit",
        "give all keys of an entry the same indentation, with a space after each colon",
    ),
}


def compose(text: bytes, path: str, **error: Any) -> yaml.Node | None:
    """Parse a YAML file and return its root node.

    Args:
        text: The file's content.
        path: The file's name, for messages.
        error: Further arguments of :class:`ConfigError`: ``expected``, ``hint`` and ``scope``. The
            hint is replaced by a better one if the mistake is a known one.

    Returns:
        The root node; None for an empty file.

    Raises:
        ConfigError: The text is not YAML; the error names file, line and column.
    """
    # Imported here because most ranks read no YAML.
    import yaml

    from srunddp.util.yaml_loader import BoundedLoader

    try:
        return yaml.compose(text, Loader=BoundedLoader)
    except (yaml.YAMLError, ValueError, OverflowError) as wrong:
        problem = getattr(wrong, "problem", None) or getattr(wrong, "reason", None)
        problem = str(problem or "a number too large")
        known = (meant for words, meant in _KNOWN.items() if words in problem)
        problem, error["hint"] = next(known, (problem, error.get("hint", "")))
        if begin := getattr(wrong, "context_mark", None):
            problem = problem.replace("LINE", str(begin.line + 1))
        raise ConfigError(
            f"this is not YAML: {problem}", where=_error_position(wrong, text, path), **error
        ) from None


def _error_position(error: Exception, text: bytes, path: str) -> str:
    """Return FILE:LINE:COLUMN of a PyYAML error; line 1, column 1 if PyYAML does not say."""
    # PyYAML counts lines and columns from 0, editors count from 1.
    if mark := getattr(error, "problem_mark", None):
        return f"{path}:{mark.line + 1}:{mark.column + 1}"
    position = getattr(error, "position", None) or 0
    # For a character that YAML does not allow, PyYAML's position counts characters; for bytes that
    # cannot be decoded, it counts bytes.
    if "special" in str(error):
        whole = text.decode(errors="replace")
    else:
        whole = text[:position].decode(errors="replace")
    before = whole[:position]
    return f"{path}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def yaml_position(path: str, node: yaml.Node) -> str:
    """Return where a node begins, as FILE:LINE:COLUMN. Line and column are counted from 1, as
    editors do.
    """
    return f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def shown(node: yaml.Node) -> str:
    """Describe the value of a node for an error message: a text in quotes, of at most 80
    characters, or the kind of node in words.
    """
    if type(node).__name__ == "ScalarNode":
        return repr(node.value if len(node.value) <= 80 else node.value[:79] + "…")
    if type(node).__name__ == "SequenceNode":
        return "a list"
    return "keys with values"
