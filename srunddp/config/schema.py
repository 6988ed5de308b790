"""Finds the keys of a dataclass: the dotted names of its fields, with their types, defaults and
descriptions from its docstring. Converts values to these types.
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

# These names have a fixed meaning on the command line, so no key may have one of them.
RESERVED = ("config", "help")
# YAML's names for null, and "none", because people who write Python expect it.
NULLS = ("", "~", "null", "none")
# The words that YAML 1.1 reads as true or false. 1 and 0 are not accepted as booleans, because
# somebody who reads the file takes them for numbers.
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
    """A field whose value can be read from a text.

    Attributes:
        kind: The type of the field.
        default: The default value; MISSING if there is none.
        sentence: The field's description in the Attributes section of the class's docstring.
    """

    kind: Any
    default: Any
    sentence: str


class SettingsBase:
    """Base class of a dataclass from which settings were removed: a caller who still gives one of
    them gets an error with a hint.

    Attributes:
        REMOVED: The hint for each removed setting, by the setting's name: what to use instead.
    """

    REMOVED: ClassVar[Mapping[str, str]] = {}

    # Check in __new__, which runs before the __init__ that dataclass generates: for a removed
    # setting this __init__ would raise a TypeError without a hint.
    def __new__(cls, *args: Any, **settings: Any) -> Self:
        for name in filter(
            cls.REMOVED.get, settings.keys() - getattr(cls, "__dataclass_fields__", {})
        ):
            raise config_error(
                f"{name} is no longer a setting", f"a field of {cls.__name__}", cls.REMOVED[name]
            )
        return super().__new__(cls)


def removed_settings(kind: Any, prefix: str = "") -> dict[str, str]:
    """Return the hints about the removed settings of a dataclass and of the dataclasses nested in
    it, by the settings' dotted names.

    Args:
        kind: A dataclass.
        prefix: The prefix of the names, with its dot; empty at the top.
    """
    found = {prefix + name: hint for name, hint in getattr(kind, "REMOVED", {}).items()}
    for field, hint in _fields(kind):
        if is_dataclass(hint):
            found |= removed_settings(hint, f"{prefix}{field.name}.")
    return found


def fields_of(kind: Any, base: Any = None, prefix: str = "") -> dict[str, ConfigField]:
    """Return the fields of a dataclass and of the dataclasses nested in it, by dotted name.

    Args:
        kind: A dataclass.
        base: An instance whose values are the defaults; None for the defaults of the class.
        prefix: The prefix of the names, with its dot; empty at the top.

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
    """Make an instance of a dataclass from values that were given by dotted name.

    Args:
        kind: A dataclass.
        values: The given values, by dotted name. Each must already have its field's type.
        base: An instance from which all values are taken that are not given; None for the defaults
            of the class.
        prefix: The prefix of the names, with its dot; empty at the top.
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
    # A nested dataclass starts from the field's default, which may differ from the defaults of its
    # own class.
    if base is None:
        return kind(**changes)
    return dataclasses.replace(base, **changes)


def usage(keys: Mapping[str, ConfigField], program: str) -> str:
    """Return the text of ``--help``: every key with its default and its description.

    Args:
        keys: The keys, by dotted name.
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
    # With `from __future__ import annotations` in the module of the class, annotations are texts.
    # get_type_hints() evaluates them among the names of that module, in which types are missing
    # that it imports under TYPE_CHECKING.
    try:
        hints = get_type_hints(kind)
    except NameError as error:
        raise config_error(
            f"{kind.__name__}: {error}",
            "types that are known in its module",
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
            f"{where}: --{name} already has a meaning", "another name", "rename the field"
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
    """Return the descriptions in the Attributes section of a class's docstring, by field.

    ``a, b: text`` describes two fields. A line that is indented further continues the description
    above it.
    """
    found: dict[str, str] = {}
    # Begin with the most general class, so that a derived class may replace a description.
    # Reading kind.__doc__ alone is not enough: a class that has a docstring does not inherit the
    # docstrings of the classes from which it is derived.
    for parent in reversed(kind.__mro__):
        _, _, attributes = inspect.cleandoc(vars(parent).get("__doc__") or "").partition(
            "\nAttributes:\n"
        )
        block = textwrap.dedent(re.split(r"\n(?=\S)", attributes)[0])
        for names, text in re.findall(r"^(\w+(?:, \w+)*): (.*(?:\n +.*)*)", block, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(text.replace("``", "").split()))
    return found


def config_error(found: str, expected: str, hint: str) -> ConfigError:
    """Return an error that only rank 0 prints, because all ranks find the same error.

    Args:
        found: What is wrong.
        expected: What would be right.
        hint: What to do.
    """
    return ConfigError(found, expected=expected, hint=hint, scope=Scope.JOB)


class TypeMismatchError(Exception):
    """A YAML node is not a value of the wanted type. The error's argument is this node."""


def value_of(node: yaml.Node, kind: Any) -> Any:
    """Convert a YAML node to a value of a type.

    Args:
        node: The node. A scalar in quotes is always a text; a list may also be written as one
            scalar, such as ``a,b`` or ``[a, b]``.
        kind: The type, for which :func:`expected` must not raise a TypeError.

    Raises:
        TypeMismatchError: The node is not a value of that type.
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
    """Describe a type in words, for messages.

    Args:
        kind: The type of a setting.

    Raises:
        TypeError: No value of this type can be read from a text.
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
    """Return a value as a text that the command line accepts.

    Args:
        value: The value of a setting.
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    # str() would give True and None, so write the words that YAML has for them.
    if isinstance(value, bool | None):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def is_ambiguous(text: str) -> bool:
    """Return whether a text without quotes could be read as a value of another type.

    Args:
        text: The text of a setting.
    """
    return any(_converts(convert, text) for convert in _SCALARS.values())


def is_null(node: yaml.Node) -> bool:
    """Return whether a node means null: it is empty, or one of :data:`NULLS` without quotes.

    Args:
        node: A node of a YAML file, or one that :func:`scalar_node` has made from an option.
    """
    return (
        isinstance(node, yaml.ScalarNode)
        and node.style is None
        and node.value.strip().lower() in NULLS
    )


def _scalar(node: yaml.Node, kind: Any) -> Any:
    # Accept no node with a tag such as !!python/object, not even as a text.
    if not isinstance(node, yaml.ScalarNode) or node.tag not in yaml.SafeLoader.yaml_constructors:
        raise TypeMismatchError(node)
    if kind in _TEXTS:
        return kind(node.value)
    # A scalar in quotes is meant as a text, even if it looks like a number.
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
    """Convert a node to the strictest type of a union that accepts it.

    Every scalar could also be read as a text or as a list with one item. Trying the strictest type
    first makes `3` a number for `int | str` as well as for `str | int`.
    """
    for member in sorted(members, key=_order):
        with contextlib.suppress(TypeMismatchError):
            return value_of(node, member)
    raise TypeMismatchError(node)


def _order(kind: Any) -> int:
    """Return how strict a type is: the lower the number, the stricter the type."""
    if get_origin(kind) is Literal:
        return -1
    # _NAMES lists the types in the order of their strictness: null, bool, numbers, texts.
    if kind in _NAMES:
        return list(_NAMES).index(kind)
    return len(_NAMES)


def _items(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if not isinstance(node, yaml.ScalarNode):
        raise TypeMismatchError(node)
    text = node.value.strip()
    # A text in quotes is a list with one item, even if it contains commas.
    if node.style is not None:
        return [node]
    if text.startswith("["):
        # Besides YAMLError, PyYAML raises ValueError or OverflowError for escapes beyond Unicode,
        # and RecursionError for a thousand nested brackets.
        with contextlib.suppress(yaml.YAMLError, ValueError, OverflowError, RecursionError):
            composed = yaml.compose(node.value, Loader=yaml.SafeLoader)
            if isinstance(composed, yaml.SequenceNode):
                return _items(composed)
        raise TypeMismatchError(node)
    if text:
        return [scalar_node(part.strip()) for part in text.split(",")]
    return []


def scalar_node(text: str) -> yaml.ScalarNode:
    """Return a YAML scalar without quotes that has this text.

    Args:
        text: The text of an option.
    """
    return yaml.ScalarNode("tag:yaml.org,2002:str", text)


_SCALARS: Mapping[Any, Callable[[str], Any]] = {
    NoneType: lambda text: dict.fromkeys(NULLS)[text.strip().lower()],
    bool: lambda text: _BOOLS[text.strip().lower()],
    int: int,
    # Remove the dot of YAML's .inf and .nan, because Python's float() reads only inf and nan.
    float: lambda text: float(re.sub(r"\.(?=(inf|nan)$)", "", text.strip(), flags=re.IGNORECASE)),
}


def _converts(convert: Callable[[str], Any], text: str) -> bool:
    with contextlib.suppress(KeyError, ValueError):
        convert(text)
        return True
    return False
