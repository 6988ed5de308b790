"""The keys of a dataclass: its fields' dotted names, with types, defaults and what its docstring says of them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from typing import Any, get_type_hints

from srunddp.config.typed import expected, text_of
from srunddp.errors import ConfigError, Scope

# What the command line takes besides.
RESERVED = ("config", "help")


@dataclass(frozen=True)
class Key:
    """A field that a text can fill.

    Attributes:
        kind: its type.
        default: MISSING where it must be given.
        sentence: of the class docstring's Attributes.
    """

    kind: Any
    default: Any
    sentence: str


def keys_of(kind: Any, base: Any = None, prefix: str = "") -> dict[str, Key]:
    """By dotted name, those of nested dataclasses among them.

    Raises:
        ConfigError: a field's type cannot be read from a text, or its name is ``config`` or ``help``.
    """
    found: dict[str, Key] = {}
    sentences = _sentences(kind)
    for field, hint in _fields(kind):
        default = _default(field, base)
        if is_dataclass(hint):
            found |= keys_of(hint, None if default is MISSING else default, f"{prefix}{field.name}.")
            continue
        _check(kind, field.name, hint, reserved=() if prefix else RESERVED)
        found[prefix + field.name] = Key(hint, default, sentences.get(field.name, ""))
    return found


def build(kind: Any, values: Mapping[str, Any], base: Any = None, prefix: str = "") -> Any:
    """An instance with these values, by dotted name; the others are those of ``base``, or the defaults."""
    changes: dict[str, Any] = {}
    for field, hint in _fields(kind):
        name, default = prefix + field.name, _default(field, base)
        if is_dataclass(hint):
            changes[field.name] = build(hint, values, None if default is MISSING else default, name + ".")
        elif name in values:
            changes[field.name] = values[name]
    return kind(**changes) if base is None else dataclasses.replace(base, **changes)


def usage(keys: Mapping[str, Key], program: str) -> str:
    """Every key with its default and its sentence."""
    lines = [
        f"Usage: {program} [--config=FILE.yaml]... [--KEY=VALUE]...",
        "",
        "Every KEY may stand in a FILE too, those with dots as nested mappings. The command line wins over files.",
        "",
    ]
    for name, key in keys.items():
        default = "" if key.default is MISSING else text_of(key.default)
        required = ", required" if key.default is MISSING else ""
        lines.append(f"  --{name}={default}  ({expected(key.kind)}{required})")
        lines += textwrap.wrap(key.sentence, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _fields(kind: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    try:
        hints = get_type_hints(kind)
    except NameError as error:
        cure = "define the class at the top of a module, and import its types outside TYPE_CHECKING"
        raise _wrong(f"{kind.__name__}: {error}", "types that its module knows", cure) from None
    return ((field, hints[field.name]) for field in dataclasses.fields(kind) if field.init)


def _default(field: dataclasses.Field[Any], base: Any) -> Any:
    if base is not None:
        return getattr(base, field.name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def _check(kind: Any, name: str, hint: Any, *, reserved: tuple[str, ...]) -> None:
    where = f"{kind.__name__}.{name}"
    if name in reserved:
        raise _wrong(f"{where}: --{name} has a meaning already", "another name", "rename the field")
    try:
        expected(hint)
    except TypeError as error:
        types = "bool, int, float, str, Path, Literal, a tuple or list of these, or a dataclass"
        raise _wrong(f"{where} is of type {error}", types, "change it, or use field(init=False)") from None


def _sentences(kind: Any) -> dict[str, str]:
    """By field; ``a, b: text`` is both's, and lines that are indented further belong to the text before them."""
    found: dict[str, str] = {}
    for parent in reversed(kind.__mro__):
        _, _, attributes = inspect.cleandoc(vars(parent).get("__doc__") or "").partition("\nAttributes:\n")
        block = textwrap.dedent(re.split(r"\n(?=\S)", attributes)[0])
        for names, text in re.findall(r"^(\w+(?:, \w+)*): (.*(?:\n +.*)*)", block, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(text.replace("``", "").split()))
    return found


def _wrong(found: str, expected: str, cure: str) -> ConfigError:
    return ConfigError(found, expected=expected, cure=cure, scope=Scope.JOB)
