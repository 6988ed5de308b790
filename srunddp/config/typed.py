"""A node of YAML, from a file or the command line, as a value of a dataclass field's type.

The type alone says what a text means, not YAML 1.1, which has ``no`` for a boolean, ``10:15`` for a number in base 60
and ``1e-3`` for a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

NULLS = ("", "~", "null", "none")
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_TEXTS = (str, Path)
_NAMES = {
    NoneType: "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    Path: "a path",
}


class MismatchError(Exception):
    """The node is no value of the type."""

    def __init__(self, node: yaml.Node) -> None:
        super().__init__(node)
        self.node = node


def value_of(node: yaml.Node, kind: Any) -> Any:
    """The node's value.

    Args:
        node: what is quoted in it is a text and nothing else; a list may also be ``a,b``, or ``[a, b]`` in one scalar.
        kind: a type that :func:`expected` knows.

    Raises:
        MismatchError: it has none of that type.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _choice(node, arguments)
    if origin in (Union, UnionType):
        return _first(node, arguments)
    if origin in (tuple, list):
        items = _items(node)
        kinds = _kinds(origin, arguments, len(items))
        if len(items) != len(kinds):
            raise MismatchError(node)
        return origin(value_of(item, kind) for item, kind in zip(items, kinds, strict=True))
    return _scalar(node, kind)


def expected(kind: Any) -> str:
    """The type in words, for messages.

    Raises:
        TypeError: a type that no text can be read as.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _or([text_of(choice) for choice in arguments])
    if origin in (Union, UnionType):
        return _or([expected(member) for member in arguments])
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return f"a list, each {expected(arguments[0])}"
    if origin is tuple:
        return f"a list of {', '.join(map(expected, arguments))}"
    if kind in _NAMES:
        return _NAMES[kind]
    raise TypeError(f"{kind!r}")


def text_of(value: Any) -> str:
    """The value as the command line takes it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, bool | None):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def is_ambiguous(text: str) -> bool:
    """Whether the text, were it not quoted, could be read as something else than a text."""
    return any(_converts(convert, text) for convert in _SCALARS.values())


def is_null(node: yaml.Node) -> bool:
    """Nothing, or one of null's names without quotes."""
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value.strip().lower() in NULLS


def _scalar(node: yaml.Node, kind: Any) -> Any:
    if not isinstance(node, yaml.ScalarNode) or node.tag not in yaml.SafeLoader.yaml_constructors:
        raise MismatchError(node)
    if kind in _TEXTS:
        return kind(node.value)
    if node.style is not None or not _converts(_SCALARS[kind], node.value):
        raise MismatchError(node)
    return _SCALARS[kind](node.value)


def _choice(node: yaml.Node, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        try:
            if value_of(node, type(choice)) == choice:
                return choice
        except MismatchError:
            continue
    raise MismatchError(node)


def _first(node: yaml.Node, members: tuple[Any, ...]) -> Any:
    """Of the strictest member that takes it; a text takes all, a list every scalar."""
    for member in sorted(members, key=_laxity):
        try:
            return value_of(node, member)
        except MismatchError:
            continue
    raise MismatchError(node)


def _laxity(kind: Any) -> int:
    if get_origin(kind) is Literal:
        return -1
    return list(_NAMES).index(kind) if kind in _NAMES else len(_NAMES)


def _items(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if not isinstance(node, yaml.ScalarNode):
        raise MismatchError(node)
    text = node.value.strip()
    if node.style is not None:
        return [node]
    if text.startswith("["):
        return _items(_composed(node))
    return [plain(part.strip()) for part in text.split(",")] if text else []


def _composed(node: yaml.ScalarNode) -> yaml.Node:
    try:
        composed = yaml.compose(node.value, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        raise MismatchError(node) from None
    if not isinstance(composed, yaml.SequenceNode):
        raise MismatchError(node)
    return composed


def plain(text: str) -> yaml.ScalarNode:
    """The text as a scalar without quotes."""
    return yaml.ScalarNode("tag:yaml.org,2002:str", text)


def _kinds(origin: Any, arguments: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    if origin is list or arguments[1:] == (...,):
        return arguments[:1] * length
    return arguments


def _null(text: str) -> None:
    if text.strip().lower() not in NULLS:
        raise ValueError(text)


def _bool(text: str) -> bool:
    return _BOOLS[text.strip().lower()]


def _float(text: str) -> float:
    # YAML's own names have a dot before them.
    return float(re.sub(r"\.(?=(inf|nan)$)", "", text.strip(), flags=re.IGNORECASE))


_SCALARS: Mapping[Any, Callable[[str], Any]] = {NoneType: _null, bool: _bool, int: int, float: _float}


def _converts(convert: Callable[[str], Any], text: str) -> bool:
    try:
        convert(text)
    except (KeyError, ValueError):
        return False
    return True


def _or(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
