"""The keys of a dataclass: its fields' dotted names, with types, defaults and what its docstring
says of them.
"""

import contextlib
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

import yaml

from srunddp.errors import ConfigError, Scope, one_of

# What else the command line takes: no key may have one of these names.
RESERVED = ("config", "help")
# YAML's own names of nothing, and "none", which people who write Python take for one.
NULLS = ("", "~", "null", "none")
# The words of YAML 1.1. Not 1 and 0, which are numbers for whoever reads the file.
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


@dataclass(frozen=True)
class ConfigField:
    """A field that a text can fill.

    Attributes:
        kind: Its type.
        default: MISSING where it has none.
        sentence: What the class's Attributes say of it.
    """

    kind: Any
    default: Any
    sentence: str


class SettingsBase:
    """A dataclass that derives from it refuses, by name, settings that it had once.

    Attributes:
        REMOVED: by name, the hint what to do instead.
    """

    REMOVED: ClassVar[Mapping[str, str]] = {}

    # In __new__, which comes before the __init__ that dataclass makes: that would raise a
    # TypeError, and without a hint.
    def __new__(cls, *args: Any, **settings: Any) -> Self:
        for name in filter(
            cls.REMOVED.get, settings.keys() - getattr(cls, "__dataclass_fields__", {})
        ):
            raise config_error(
                f"{name} is no longer a setting", f"a field of {cls.__name__}", cls.REMOVED[name]
            )
        return super().__new__(cls)


def removed_settings(kind: Any, prefix: str = "") -> dict[str, str]:
    """Return the hints of :class:`SettingsBase`, by dotted name, with those of nested dataclasses.

    Args:
        kind: A dataclass.
        prefix: Of the names.
    """
    found = {prefix + name: hint for name, hint in getattr(kind, "REMOVED", {}).items()}
    for field, hint in _fields(kind):
        if is_dataclass(hint):
            found |= removed_settings(hint, f"{prefix}{field.name}.")
    return found


def fields_of(kind: Any, base: Any = None, prefix: str = "") -> dict[str, ConfigField]:
    """Return the fields by dotted name, with those of nested dataclasses.

    Args:
        kind: A dataclass.
        base: An instance, whose values are the defaults; None for the class's.
        prefix: Of the names.

    Raises:
        ConfigError: A field's type cannot be read from a text, or its name is ``config`` or
            ``help``.
    """
    found: dict[str, ConfigField] = {}
    sentences = _sentences(kind)
    for field, hint in _fields(kind):
        default = _default(field, base)
        if is_dataclass(hint):
            found |= fields_of(
                hint, None if default is MISSING else default, f"{prefix}{field.name}."
            )
            continue
        _check(kind, field.name, hint, reserved=() if prefix else RESERVED)
        found[prefix + field.name] = ConfigField(hint, default, sentences.get(field.name, ""))
    return found


def build(kind: Any, values: Mapping[str, Any], base: Any = None, prefix: str = "") -> Any:
    """Make an instance.

    Args:
        kind: A dataclass.
        values: By dotted name; of the right types.
        base: An instance that has the other values; None for the defaults.
        prefix: Of the names.
    """
    changes: dict[str, Any] = {}
    for field, hint in _fields(kind):
        name = prefix + field.name
        default = _default(field, base)
        if is_dataclass(hint):
            changes[field.name] = build(
                hint, values, None if default is MISSING else default, name + "."
            )
        elif name in values:
            changes[field.name] = values[name]
    # A nested dataclass is made from its default, which need not be what its class makes by itself.
    if base is None:
        return kind(**changes)
    return dataclasses.replace(base, **changes)


def usage(keys: Mapping[str, ConfigField], program: str) -> str:
    """Return the text of ``--help``: every key with its default and its sentence.

    Args:
        keys: By dotted name.
        program: The name of the script.
    """
    lines = [
        f"Usage: {program} [--config=FILE.yaml]... [--KEY=VALUE]...",
        "",
        (
            "Every KEY may stand in a FILE too, those with dots as nested mappings. The command"
            " line wins over files."
        ),
        "",
    ]
    for name, key in keys.items():
        if key.default is MISSING:
            default = ""
        else:
            default = text_of(key.default)
        lines.append(
            f"  --{name}={default} "
            f" ({expected(key.kind)}{', required' if key.default is MISSING else ''})"
        )
        lines += textwrap.wrap(key.sentence, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _fields(kind: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    # Annotations are texts where the module says `from __future__ import annotations`; they are
    # read in the module of the class, where a type that is imported for type checkers alone is not
    # known.
    try:
        hints = get_type_hints(kind)
    except NameError as error:
        raise config_error(
            f"{kind.__name__}: {error}",
            "types that its module knows",
            "define the class at the top of a module, and import its types outside TYPE_CHECKING",
        ) from None
    return ((field, hints[field.name]) for field in dataclasses.fields(kind) if field.init)


def _default(field: dataclasses.Field[Any], base: Any) -> Any:
    if base is not None:
        return getattr(base, field.name)
    if field.default_factory is MISSING:
        return field.default
    return field.default_factory()


def _check(kind: Any, name: str, hint: Any, *, reserved: tuple[str, ...]) -> None:
    where = f"{kind.__name__}.{name}"
    if name in reserved:
        raise config_error(
            f"{where}: --{name} has a meaning already", "another name", "rename the field"
        )
    try:
        expected(hint)
    except TypeError as error:
        raise config_error(
            f"{where} is of type {error}",
            "bool, int, float, str, Path, Literal, a tuple or list of these, or a dataclass",
            "change it, or use field(init=False)",
        ) from None


def _sentences(kind: Any) -> dict[str, str]:
    """Return the sentences of a class's Attributes, by field.

    ``a, b: text`` is both's, and lines that are indented further belong to the text before them.
    """
    found: dict[str, str] = {}
    # From the most general class on, so that a derived one may say something else of a field. Not
    # by kind.__doc__, which is inherited only where the class has no docstring itself.
    for parent in reversed(kind.__mro__):
        _, _, attributes = inspect.cleandoc(vars(parent).get("__doc__") or "").partition(
            "\nAttributes:\n"
        )
        block = textwrap.dedent(re.split(r"\n(?=\S)", attributes)[0])
        for names, text in re.findall(r"^(\w+(?:, \w+)*): (.*(?:\n +.*)*)", block, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(text.replace("``", "").split()))
    return found


def config_error(found: str, expected: str, hint: str) -> ConfigError:
    """Return an error that all ranks have alike, so that rank 0 alone prints it.

    Args:
        found: What is wrong.
        expected: What would be right.
        hint: What to do.
    """
    return ConfigError(found, expected=expected, hint=hint, scope=Scope.JOB)


class TypeMismatchError(Exception):
    """The node, which is its argument, is no value of the type."""


def value_of(node: yaml.Node, kind: Any) -> Any:
    """Return the value of a node.

    Args:
        node: What is quoted in it is a text and nothing else; a list may also be ``a,b``, or ``[a,
            b]`` in one scalar.
        kind: A type that :func:`expected` knows.

    Raises:
        TypeMismatchError: It has none of that type.
    """
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal:
        return _literal(node, arguments)
    if origin in (Union, UnionType):
        return _union(node, arguments)
    if origin in (tuple, list):
        items = _items(node)
        if origin is list or arguments[1:] == (...,):
            kinds = arguments[:1] * len(items)
        else:
            kinds = arguments
        if len(items) != len(kinds):
            raise TypeMismatchError(node)
        return origin(value_of(item, kind) for item, kind in zip(items, kinds, strict=True))
    return _scalar(node, kind)


def expected(kind: Any) -> str:
    """Return a type in words, for messages.

    Args:
        kind: Of a setting.

    Raises:
        TypeError: No text can be read as one.
    """
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal:
        return one_of([text_of(choice) for choice in arguments])
    if origin in (Union, UnionType):
        return one_of([expected(member) for member in arguments])
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return f"a list, each {expected(arguments[0])}"
    if origin is tuple:
        return f"a list of {', '.join(map(expected, arguments))}"
    if kind in _NAMES:
        return _NAMES[kind]
    raise TypeError(f"{kind!r}")


def text_of(value: Any) -> str:
    """Return a value as the command line takes it.

    Args:
        value: Of a setting.
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    # Before str(), which would write True: the words are YAML's.
    if isinstance(value, bool | None):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def is_ambiguous(text: str) -> bool:
    """Return whether a text, were it not quoted, could be read as something else than a text.

    Args:
        text: Of a setting.
    """
    return any(_converts(convert, text) for convert in _SCALARS.values())


def is_null(node: yaml.Node) -> bool:
    """Return whether a node is nothing, or one of null's names without quotes.

    Args:
        node: Of a file, or made of an option.
    """
    return (
        isinstance(node, yaml.ScalarNode)
        and node.style is None
        and node.value.strip().lower() in NULLS
    )


def _scalar(node: yaml.Node, kind: Any) -> Any:
    # A tag such as !!python/object is no text, whatever stands behind it.
    if not isinstance(node, yaml.ScalarNode) or node.tag not in yaml.SafeLoader.yaml_constructors:
        raise TypeMismatchError(node)
    if kind in _TEXTS:
        return kind(node.value)
    # What has quotes was meant as a text, also where it looks like a number.
    if node.style is not None or not _converts(_SCALARS[kind], node.value):
        raise TypeMismatchError(node)
    return _SCALARS[kind](node.value)


def _literal(node: yaml.Node, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        with contextlib.suppress(TypeMismatchError):
            if value_of(node, type(choice)) == choice:
                return choice
    raise TypeMismatchError(node)


def _union(node: yaml.Node, members: tuple[Any, ...]) -> Any:
    """Return the value by the strictest member that takes the node.

    A text takes every scalar, and so does a list: `3` is to be a number for `int | str`, whichever
    of them is written first.
    """
    for member in sorted(members, key=_order):
        with contextlib.suppress(TypeMismatchError):
            return value_of(node, member)
    raise TypeMismatchError(node)


def _order(kind: Any) -> int:
    """Return how strict a type is; the lower, the stricter."""
    if get_origin(kind) is Literal:
        return -1
    # _NAMES is in this order: null, a bool, a number, a text.
    if kind in _NAMES:
        return list(_NAMES).index(kind)
    return len(_NAMES)


def _items(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if not isinstance(node, yaml.ScalarNode):
        raise TypeMismatchError(node)
    text = node.value.strip()
    # One text in quotes is a list of one, commas or not.
    if node.style is not None:
        return [node]
    if text.startswith("["):
        # PyYAML raises the last three at escapes beyond Unicode, and at a thousand nested brackets.
        with contextlib.suppress(yaml.YAMLError, ValueError, OverflowError, RecursionError):
            composed = yaml.compose(node.value, Loader=yaml.SafeLoader)
            if isinstance(composed, yaml.SequenceNode):
                return _items(composed)
        raise TypeMismatchError(node)
    if text:
        return [scalar_node(part.strip()) for part in text.split(",")]
    return []


def scalar_node(text: str) -> yaml.ScalarNode:
    """Return a text as a scalar without quotes.

    Args:
        text: Of an option.
    """
    return yaml.ScalarNode("tag:yaml.org,2002:str", text)


_SCALARS: Mapping[Any, Callable[[str], Any]] = {
    NoneType: lambda text: dict.fromkeys(NULLS)[text.strip().lower()],
    bool: lambda text: _BOOLS[text.strip().lower()],
    int: int,
    # YAML writes .inf and .nan, and Python's float() takes inf and nan.
    float: lambda text: float(re.sub(r"\.(?=(inf|nan)$)", "", text.strip(), flags=re.IGNORECASE)),
}


def _converts(convert: Callable[[str], Any], text: str) -> bool:
    with contextlib.suppress(KeyError, ValueError):
        convert(text)
        return True
    return False
