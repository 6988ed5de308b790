"""Typed messages between processes: one line of JSON each, checked on arrival.

Derive a class from :class:`Message` for each protocol, and from that one a frozen dataclass for
each kind of message::

    class RankMessage(Message): ...

    @dataclass(frozen=True)
    class ScriptIsOver(RankMessage, kind="script_is_over"):
        waits: bool = False

A line of garbage, or of a newer version, never reaches who handles messages:
:meth:`Message.decode` gives None for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, Self


def _is_int(value: object) -> bool:
    return type(value) is int  # a bool is none


def _is_float(value: object) -> bool:
    return type(value) is float


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_str(value: object) -> bool:
    return type(value) is str


def _is_list_of_int(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_int, value))


def _is_list_of_triples(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_triple, value))


def _is_triple(value: object) -> bool:
    """Whether it is a number, a text and a number, as a rank, its address and its port."""
    if not isinstance(value, list) or len(value) != 3:
        return False
    first, second, third = value
    return _is_int(first) and _is_str(second) and _is_int(third)


# By what a field's annotation says. JSON has no tuples; they arrive as lists.
_CHECKS: dict[str, Callable[[object], bool]] = {
    "int": _is_int,
    "float": _is_float,
    "bool": _is_bool,
    "str": _is_str,
    "float | None": lambda value: value is None or _is_float(value),
    "str | None": lambda value: value is None or _is_str(value),
    "tuple[int, ...]": _is_list_of_int,
    "tuple[tuple[int, str, int], ...]": _is_list_of_triples,
}


class Message:
    """What one process tells another.

    The annotation of each field is one of ``_CHECKS``, word for word: it says what is checked when
    a message arrives.

    A kind's ``__post_init__`` may raise a ValueError where values of the right types are wrong all
    the same.

    Attributes:
        kind: What the line calls this kind of message.
    """

    kind: ClassVar[str] = ""
    _kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:
            cls.kind = kind
            cls._kinds[kind] = cls
        else:  # a protocol, which has kinds of its own
            cls._kinds = {}

    def encode(self) -> bytes:
        """Return the line that :meth:`decode` reads, with its end."""
        return json.dumps({"kind": self.kind, **vars(self)}).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self | None:
        """Return the message of this protocol that is in a line; None where there is none."""
        try:
            values = json.loads(line)
            kind = cls._kinds[values.pop("kind")]
        # No JSON, or too deep; no object; no such kind.
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
            return None
        message = kind.of(values)
        assert message is None or isinstance(message, cls)
        return message

    @classmethod
    def of(cls, values: object) -> Self | None:
        """Return the message of this kind with the values of its fields, as JSON has them.

        None where one is missing, is too many, or has another type.
        """
        if not isinstance(values, dict):
            return None
        try:
            return cls(**_checked(cls, values))
        except (TypeError, ValueError):
            return None


def _checked(kind: type[Message], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with lists as tuples; raise a TypeError where one has another type."""
    types = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    checked = {}
    for name, value in values.items():
        if name not in types or not _CHECKS[types[name]](value):
            raise TypeError(f"{kind.kind}.{name} is {value!r}")
        if isinstance(value, list):
            checked[name] = tuple(tuple(each) if isinstance(each, list) else each for each in value)
        else:
            checked[name] = value
    return checked
