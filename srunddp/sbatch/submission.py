"""Finds the job script that another script submits by sbatch."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from srunddp.sbatch.bash import commands
from srunddp.sbatch.bash_variables import unquoted, variables
from srunddp.sbatch.launch import TALKERS, line_of
from srunddp.sbatch.slurm_options import takes_next

# Names by which a script submits itself again.
_ITSELF = re.compile(r"\$0|\$\{0\}|.*BASH_SOURCE.*")


@dataclass(frozen=True)
class Submission:
    """A command that calls sbatch.

    Attributes:
        line: The number of the command's line, from 1. If the command is the value of a variable,
            it is the line that sets the variable.
        script: The job script that is submitted; empty if the command names none, as with
            ``--wrap``.
    """

    line: int
    script: str


def find_submission(text: str) -> Submission | None:
    """Find the first command by which a script submits another job script.

    Args:
        text: The script.

    Returns:
        None if there is none.
    """
    for line, words in sorted(_with_words(text)):
        program = next((at for at, each in enumerate(words) if "=" not in each), len(words))
        if words[program:] and words[program].rpartition("/")[2] == "sbatch":
            script = _script(words[program + 1 :])
            if not _ITSELF.fullmatch(script):
                return Submission(line, script)
    return None


def _with_words(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the words of each command with the number of its line, also of the commands in the
    values of variables.
    """
    found = list(commands(text))
    for command in found:
        texts = [word.text for word in command.words]
        if texts[0] not in TALKERS:
            yield line_of(text, command.words[0]), texts
    for variable in variables(found).values():
        value = variable.value
        if value.startswith("$(") and value.endswith(")"):
            value = unquoted(value[2:-1])
        for command in commands(value):
            yield line_of(text, variable.word), [word.text for word in command.words]


def _script(words: Sequence[str]) -> str:
    """Return the job script among the words behind sbatch: the first word that is neither an option
    nor an option's value; empty if there is none.
    """
    left = list(words)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if takes_next(word) and left:
            left.pop(0)
    return left[0] if left else ""
