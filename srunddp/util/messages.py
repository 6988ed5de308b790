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


# By what a field's annotation says. JSON has no tuples; they arrive as lists.
_CHECKS: dict[str, Callable[[object], bool]] = {
    "int": _is_int,
    "float": _is_float,
    "bool": _is_bool,
    "str": _is_str,
    "float | None": lambda value: value is None or _is_float(value),
    "str | None": lambda value: value is None or _is_str(value),
    "tuple[int, ...]": _is_list_of_int,
}


class Message:
    """What one process tells another.

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
            message = kind(**_checked(kind, values))
        # No JSON; no object; no such kind; other fields; too deep.
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            return None
        assert isinstance(message, cls)
        return message


def _checked(kind: type[Message], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with lists as tuples; raise a TypeError where one has another type."""
    for field in fields(kind):  # type: ignore[arg-type]  # each kind is a dataclass
        if field.name not in values:
            continue
        value = values[field.name]
        if not _CHECKS[str(field.type)](value):
            raise TypeError(f"{kind.kind}.{field.name} is {value!r}")
        if isinstance(value, list):
            values[field.name] = tuple(value)
    return values
