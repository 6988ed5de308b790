"""Finds the variables that a job script sets, as far as its text shows them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from srunddp.sbatch.bash import Command, Word

_SETS = ("export", "declare", "local", "readonly", "typeset", "-x")
_ASSIGNED = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_DEEPEST = 5  # levels of variables in the values of variables
_LONGEST = 10_000  # characters of a value; a longer one is not expanded further


@dataclass(frozen=True)
class Variable:
    """A variable that a job script sets.

    Attributes:
        name: The variable's name.
        value: The value without quotes; variables in the value are not replaced.
        word: The word of the script that sets the variable.
    """

    name: str
    value: str
    word: Word


_QUOTES = re.compile(r""""(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>[^']*)'""", re.DOTALL)


def unquoted(source: str) -> str:
    """Return a word's text without quotes, and without backslashes that only escape a character.

    Args:
        source: The word as the script has it.
    """

    def inside(found: re.Match[str]) -> str:
        if found["single"] is not None:
            return found["single"]
        joined = re.sub(r"\\\n", " ", found["double"])
        return re.sub(r'\\(["$`\\])', r"\1", joined)

    return _QUOTES.sub(inside, source)


def is_assignment(command: Command) -> bool:
    """Tell whether a command only sets variables, as ``A=1`` and ``export A=1`` do."""
    return all(word.text in _SETS or _ASSIGNED.fullmatch(word.source) for word in command.words)


def variables(found: Iterable[Command]) -> dict[str, Variable]:
    """Return the variables that commands set, by name.

    The last of several values counts. A value that contains the variable itself, or is set by
    ``+=``, extends the earlier value.
    """
    made: dict[str, Variable] = {}
    for command in found:
        if is_assignment(command):
            for word in command.words:
                if assigned := _ASSIGNED.fullmatch(word.source):
                    new = Variable(assigned[1], unquoted(assigned[3]), word)
                    old = made.get(new.name)
                    if old and len(old.value) > _LONGEST:
                        continue
                    if old and assigned[2]:
                        new = replace(old, value=old.value + new.value)
                    elif old and new.name in names_in(new.value):
                        value = _replaced(new.value, {old.name: old}, [old.name])
                        new = replace(old, value=value)
                    made[new.name] = new
    return made


def names_in(source: str) -> list[str]:
    """Return the names of the variables in a text of a script."""
    return re.findall(r"\$\{?(\w+)", source)


def expanded(source: str, values: Mapping[str, Variable], names: Sequence[str]) -> str:
    """Return a text in which some variables are replaced by their values. The same variables are
    also replaced in these values, but only up to five levels deep.

    Args:
        source: A text of a script.
        values: The variables of the script, by name.
        names: The names of the variables to replace; all other variables stay.
    """
    for _ in range(_DEEPEST):
        source = _replaced(source, values, names)
    return source


def _replaced(source: str, values: Mapping[str, Variable], names: Sequence[str]) -> str:
    """Return a text in which some variables are replaced once. A text that has become too long,
    because a variable contains itself, is returned unchanged.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name in names:
            return values[name].value
        return found[0]

    if len(source) > _LONGEST:
        return source
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, source)
