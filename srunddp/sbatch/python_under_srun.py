"""Finds the line of a job script in which srun starts Python for each rank, without a launcher."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from srunddp.sbatch.bash import Command, Word, commands, rest_of_line
from srunddp.sbatch.bash_variables import (
    Variable,
    expanded,
    is_assignment,
    unquoted,
    variables,
)
from srunddp.sbatch.launch import PYTHON, SHELLS, line_of

# Matches a launcher whose path bash finds, as in python $(which torchrun).
_LAUNCHER_OF_PATH = re.compile(
    r".*[$`].*(torchrun|accelerate|deepspeed).*(?<!\.py)", re.DOTALL | re.IGNORECASE
)
# Variables that srunddp exports to each rank.
_EXPORTED = re.compile(r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)=.*")


@dataclass(frozen=True)
class PythonUnderSrun:
    """A line in which srun starts Python.

    Attributes:
        line: The number of the line, from 1.
        written: The line with srunddp in the place of python.
        others: Whether the line starts Python in quotes that also contain other commands. They are
            not in ``written``.
    """

    line: int
    written: str
    others: bool = False


def find_python(text: str) -> PythonUnderSrun | None:
    """Find the first line in which srun starts a script by Python.

    Args:
        text: The job script.

    Returns:
        None if there is none.
    """
    found = list(commands(text))
    values = variables(found)
    for command in found:
        if is_assignment(command) or all(word.name != "srun" for word in command.words):
            continue
        line = line_of(text, command.words[0])
        rest = rest_of_line(text, command.words[-1])
        if written := _in_words(command.words):
            return PythonUnderSrun(line, f"{written} {rest}".rstrip())
        if quoted := _in_quotes(command, values):
            return replace(quoted, line=line, written=f"{quoted.written} {rest}".rstrip())
    return None


def _in_words(words: Sequence[Word]) -> str:
    """Return a command with srunddp in the place of python; empty if the command does not start a
    training script by python.
    """
    python = next((at for at, word in enumerate(words) if PYTHON.fullmatch(word.name)), len(words))
    after = [word.source for word in words[python + 1 :]]
    if "-c" in [word.text for word in words[python + 1 : python + 3]]:
        return ""  # behind -c are statements of Python, and no script
    while after and after[0].startswith("-") and after[0] != "-m":
        after = after[1:]  # python's own options, such as -u
    if not after or _LAUNCHER_OF_PATH.fullmatch(after[0]):
        return ""  # there is no script, or python starts a launcher
    return " ".join([*(word.source for word in words[:python]), "srunddp", *after])


def _in_quotes(command: Command, values: Mapping[str, Variable]) -> PythonUnderSrun | None:
    """Find Python in the quotes of ``bash -c``, and return the command with srunddp in its place.

    Args:
        command: The command.
        values: The variables of the script, by name.

    Returns:
        The command, with 0 as the number of the line; None if no Python script is started so.
    """
    words = command.words
    shell = next((at for at, word in enumerate(words[:-2]) if word.name in SHELLS), len(words))
    if shell == len(words) or words[shell + 1].text != "-c":
        return None
    inner = list(commands(expanded(unquoted(words[shell + 2].source), values, list(values))))
    for each in inner:
        own = [word for word in each.words if not _EXPORTED.fullmatch(word.text)]
        if own and PYTHON.fullmatch(own[0].name) and (written := _in_words(own)):
            before = " ".join(word.source for word in words[:shell])
            others = any(_does_more(other) for other in inner if other is not each)
            return PythonUnderSrun(0, f"{before} {written}", others)
    return None


def _does_more(command: Command) -> bool:
    """Tell whether a command does more than set variables that srunddp itself exports to each
    rank.
    """
    return not all(
        word.text == "export" or _EXPORTED.fullmatch(word.text) for word in command.words
    )
