"""A ``dataclass`` decorator for the modules that each rank imports at its start. It makes the same
classes as the standard library's, but faster.

The standard library compiles six methods for each frozen dataclass, which takes more than half a
millisecond before Python 3.13. A rank defines over a hundred of them before its script begins. Here
only ``__init__`` is compiled, and all classes share the other methods.

Type checkers see ``dataclasses.dataclass`` instead of this decorator. ``fields()``, ``replace()``,
``asdict()``, ``match`` and pickling work as with the standard library's classes. The parameters
``order``, ``slots`` and ``unsafe_hash`` are missing; add one of them when a class needs it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import FrozenInstanceError
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type | None = None,
        *,
        frozen: bool = False,
        eq: bool = True,
        repr: bool = True,
        kw_only: bool = False,
    ) -> Any:
        """Make a class a dataclass, as ``dataclasses.dataclass`` does."""

        def decorate(cls: type) -> type:
            made = dataclasses.dataclass(repr=False, eq=False, kw_only=kw_only)(cls)
            if repr:
                _set_unless_defined(made, "__repr__", _repr)
            if eq:
                _set_unless_defined(made, "__eq__", _eq)
                # None counts as undefined, because Python itself sets __hash__ to None in a class
                # that defines only __eq__.
                if made.__dict__.get("__hash__") is None:
                    made.__hash__ = _hash if frozen else None
            if frozen:
                made.__setattr__ = _set_once
                made.__delattr__ = _refuse_to_delete
            return made

        return decorate if cls is None else decorate(cls)


def _set_unless_defined(cls: type, name: str, method: Any) -> None:
    if name not in cls.__dict__:
        setattr(cls, name, method)


def _compared(instance: Any) -> tuple[Any, ...]:
    """Return the values of the fields that decide whether two instances of a class are equal."""
    fields = instance.__dataclass_fields__.values()
    return tuple(getattr(instance, field.name) for field in fields if field.compare)


def _eq(self: Any, other: object) -> Any:
    if type(self) is not type(other):
        return NotImplemented
    return _compared(self) == _compared(other)


def _hash(self: Any) -> int:
    return hash(_compared(self))


@recursive_repr()
def _repr(self: Any) -> str:
    fields = self.__dataclass_fields__.values()
    values = (f"{field.name}={getattr(self, field.name)!r}" for field in fields if field.repr)
    return f"{type(self).__qualname__}({', '.join(values)})"


def _set_once(self: Any, name: str, value: object) -> None:
    """Set a field of a frozen instance if the field has no value yet, else raise an error.

    ``__init__`` is compiled for a class that is not frozen, so it assigns to each field. This is
    allowed because the instance has no value for the field then.
    """
    if name in self.__dict__ or name not in self.__dataclass_fields__:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    self.__dict__[name] = value


def _refuse_to_delete(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
