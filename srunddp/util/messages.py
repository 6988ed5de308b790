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

import builtins
import functools
import json
import socket
import types
import typing
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Self, TypeVar

from srunddp.util.json_lines import receive_line

D = TypeVar("D")
M = TypeVar("M", bound="Message")
_PLAIN = (int, float, bool, str, types.NoneType)


class Message:
    """What one process tells another.

    What arrives is checked by the fields' annotations. They may be ``int``, ``float``, ``bool``,
    ``str``, ``object`` for any JSON, another dataclass of such fields, and unions, tuples and
    ``dict[str, X]`` of these.

    A kind's ``__post_init__`` may raise a ValueError where values of the right types are wrong all
    the same.

    Attributes:
        kind: What the line calls this kind of message.
        extensible: Whether the other end may be another version of srunddp, and send more fields;
            they are ignored. A protocol says so, for all its kinds.
    """

    kind: ClassVar[str] = ""
    extensible: ClassVar[bool] = False
    _kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, kind: str = "", *, extensible: bool = False) -> None:
        cls.kind = kind
        if not kind:  # a protocol, which has kinds of its own
            cls._kinds = {}
            cls.extensible = extensible
            return
        for base in cls.__bases__:  # a kind may be of two protocols
            assert issubclass(base, Message)
            base._kinds[kind] = cls

    def encode(self) -> bytes:
        """Return the line that :meth:`decode` reads, with its end."""
        # `default` is called for a field that is a dataclass of its own.
        return json.dumps({"kind": self.kind, **vars(self)}, default=vars).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self | None:
        """Return the message of this protocol that is in a line; None where there is none."""
        try:
            values = json.loads(line)
            kind = cls._kinds[values.pop("kind")]
            message = _dataclass_of(kind, values, ignoring_others=cls.extensible)
        # No JSON, or too deep; no object; no such kind; no such values.
        except (ValueError, RecursionError, OverflowError, AttributeError, KeyError, TypeError):
            return None
        assert isinstance(message, cls)
        return message


def _dataclass_of(wanted: type[D], values: object, *, ignoring_others: bool = False) -> D:
    """Return a dataclass with these values; raise a TypeError where they do not fit its fields."""
    if not isinstance(values, dict):
        raise TypeError(f"{wanted.__name__} is {values!r}")
    field_types = _field_types(wanted)  # type: ignore[arg-type]  # a class is hashable
    checked = {}
    for name, value in values.items():
        if name in field_types:
            checked[name] = _checked(field_types[name], value, ignoring_others)
        elif not ignoring_others:
            raise TypeError(f"{wanted.__name__} has no {name}")
    # A field that is missing and has no default is the constructor's TypeError.
    return wanted(**checked)


@functools.cache
def _field_types(wanted: type) -> dict[str, Any]:
    # Cached, since the annotations are strings (PEP 563), each of which is compiled and evaluated
    # here.
    hints = typing.get_type_hints(wanted)
    return {field.name: hints[field.name] for field in fields(wanted)}


def _checked(wanted: Any, value: Any, ignoring_others: bool) -> Any:
    """Return the value of an annotation that JSON's value stands for, such as a tuple for a list.

    Raises:
        TypeError: It stands for none.
    """
    if wanted is object:
        return value
    # A sender that sets a float field to 5 writes an integer of JSON.
    if wanted is float and type(value) is int:
        return float(value)
    if wanted in _PLAIN:
        if type(value) is wanted:  # a bool is no int
            return value
        raise TypeError(f"{value!r} is no {wanted.__name__}")
    if isinstance(wanted, type) and is_dataclass(wanted):
        return _dataclass_of(wanted, value, ignoring_others=ignoring_others)
    arguments = typing.get_args(wanted)
    match typing.get_origin(wanted), value:
        case (types.UnionType, _):
            return _checked_union(arguments, value, ignoring_others)
        case (builtins.tuple, list()) if arguments[-1] is ...:
            return tuple(_checked(arguments[0], each, ignoring_others) for each in value)
        case (builtins.tuple, list()) if len(arguments) == len(value):
            pairs = zip(arguments, value, strict=True)
            return tuple(_checked(inner, each, ignoring_others) for inner, each in pairs)
        case (builtins.dict, dict()):
            inner = arguments[1]
            return {key: _checked(inner, each, ignoring_others) for key, each in value.items()}
    raise TypeError(f"{value!r} is no {wanted}")


def _checked_union(alternatives: tuple[Any, ...], value: Any, ignoring_others: bool) -> Any:
    # The order of the annotation decides where a value fits several alternatives.
    for wanted in alternatives:
        with suppress(TypeError):
            return _checked(wanted, value, ignoring_others)
    raise TypeError(f"{value!r} is none of {alternatives}")


def send(connection: socket.socket, message: Message) -> None:
    """Send a message. That the connection is broken is noticed by whoever reads from it."""
    with suppress(OSError):
        connection.sendall(message.encode())


def receive(
    connection: socket.socket, protocol: type[M], deadline: float | None = None
) -> M | None:
    """Read one message of a protocol; None where the line that came is none.

    Args:
        connection: The next message stays in the socket.
        protocol: Whose kinds are understood.
        deadline: A time of :func:`time.monotonic`; None for the socket's own limit.

    Raises:
        OSError: The time is over, or the connection broke.
    """
    return protocol.decode(receive_line(connection, deadline))
