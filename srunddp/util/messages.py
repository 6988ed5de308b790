"""Typed messages between processes: one line of JSON each, checked on arrival.

Derive a class from :class:`Message` for each protocol, and from that one a frozen dataclass for
each kind of message::

    class RankMessage(Message): ...

    @dataclass(frozen=True)
    class ScriptIsOver(RankMessage, kind="script_is_over"):
        waits: bool = False

:meth:`Message.decode` returns None for a line that is not a message, or that has a kind or fields
of another version. So the code that handles messages never sees such a line.
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
    """Base class of the messages that one process sends to another.

    :meth:`decode` checks the values against the fields' annotations. These may be ``int``,
    ``float``, ``bool``, ``str``, ``object`` (any JSON), another dataclass of such fields, and
    unions, tuples and ``dict[str, X]`` of these. The ``__post_init__`` of a kind of message may
    raise a ValueError for values that have the right types but are still wrong.

    Attributes:
        kind: The name by which a line says which kind of message it is; empty for a protocol.
        extensible: Whether :meth:`decode` ignores unknown fields, because the sender may be another
            version of srunddp; otherwise a line with such a field is not a valid message. It is set
            in the base class of a protocol.
    """

    kind: ClassVar[str] = ""
    extensible: ClassVar[bool] = False
    _kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, kind: str = "", *, extensible: bool = False) -> None:
        cls.kind = kind
        if not kind:  # the base class of a protocol, from which its kinds of messages are derived
            cls._kinds = {}
            cls.extensible = extensible
            return
        for base in cls.__bases__:  # a kind of message may belong to two protocols
            assert issubclass(base, Message)
            base._kinds[kind] = cls

    def encode(self) -> bytes:
        """Return the message as a line of JSON with its line end, as :meth:`decode` reads it."""
        # For a field that is itself a dataclass, json calls `default`, which returns its fields.
        return json.dumps({"kind": self.kind, **vars(self)}, default=vars).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self | None:
        """Return the message in a line; None if the line has no valid message of this protocol."""
        try:
            values = json.loads(line)
            kind = cls._kinds[values.pop("kind")]
            message = _dataclass_of(kind, values, ignoring_others=cls.extensible)
        # The line is not JSON, is nested too deeply, is not an object, has an unknown kind, or has
        # values that do not fit the fields.
        except (ValueError, RecursionError, OverflowError, AttributeError, KeyError, TypeError):
            return None
        assert isinstance(message, cls)
        return message


def _dataclass_of(wanted: type[D], values: object, *, ignoring_others: bool = False) -> D:
    """Make an instance of a dataclass from a JSON object.

    Args:
        wanted: The dataclass.
        values: The JSON value, which should be an object with the dataclass's fields.
        ignoring_others: Whether to ignore names that are not fields; otherwise they are an error.

    Raises:
        TypeError: The value is not an object, or does not fit the fields.
    """
    if not isinstance(values, dict):
        raise TypeError(f"{wanted.__name__} is {values!r}")
    field_types = _field_types(wanted)  # type: ignore[arg-type]  # a class is hashable
    checked = {}
    for name, value in values.items():
        if name in field_types:
            checked[name] = _checked(field_types[name], value, ignoring_others)
        elif not ignoring_others:
            raise TypeError(f"{wanted.__name__} has no {name}")
    # If a field without a default is missing, the constructor raises the TypeError.
    return wanted(**checked)


@functools.cache
def _field_types(wanted: type) -> dict[str, Any]:
    # Cached because the annotations are strings (PEP 563): get_type_hints() compiles and evaluates
    # each one.
    hints = typing.get_type_hints(wanted)
    return {field.name: hints[field.name] for field in fields(wanted)}


def _checked(wanted: Any, value: Any, ignoring_others: bool) -> Any:
    """Convert a JSON value to the annotated type, for example a list to a tuple. In a dataclass,
    unknown fields are ignored if ``ignoring_others``.

    Raises:
        TypeError: The value does not fit the type.
    """
    if wanted is object:
        return value
    # JSON does not distinguish 5 from 5.0, so a field of type float may arrive as an int.
    if wanted is float and type(value) is int:
        return float(value)
    if wanted in _PLAIN:
        if type(value) is wanted:  # `type() is`, because a bool must not pass as an int
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
    # If a value fits several alternatives, the first one in the annotation counts.
    for wanted in alternatives:
        with suppress(TypeError):
            return _checked(wanted, value, ignoring_others)
    raise TypeError(f"{value!r} is none of {alternatives}")


def send(connection: socket.socket, message: Message) -> None:
    """Send a message. A broken connection raises no error here, because the next read from the
    connection fails anyway.
    """
    with suppress(OSError):
        connection.sendall(message.encode())


def receive(
    connection: socket.socket, protocol: type[M], deadline: float | None = None
) -> M | None:
    """Read one message of a protocol; None if the line is not a valid message.

    Args:
        connection: The socket; the next message stays in it.
        protocol: The base class of the kinds that are accepted.
        deadline: A time of :func:`time.monotonic`; None to keep the socket's own timeout.

    Raises:
        OSError: The deadline has passed, or the connection broke.
    """
    return protocol.decode(receive_line(connection, deadline))
