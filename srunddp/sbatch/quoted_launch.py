"""Finds a launch that is alone in the quotes of ``bash -c``, so that the shell can be left out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from srunddp.sbatch.bash import Command, commands
from srunddp.sbatch.bash_variables import Variable, names_in, variables
from srunddp.sbatch.launch import SHELLS, Launch, find_launch
from srunddp.sbatch.launcher_options import NoEffect
from srunddp.sbatch.step_size import has_size, with_held_options

_QUOTED = re.compile(r"'([^'\n]*)'|\"([^\"\n]*)\"")
# Characters that need the shell in the quotes: for other commands, comments and redirections.
_MORE = re.compile(r"[;&|<>()`#]")
# Characters in the arguments of SCRIPT that the shell of the job script might replace differently
# from the shell in the quotes.
_REPLACED = re.compile(r"[$\\~*?\[{!]")
# Variables with the same value in the job script and in each of its job steps.
_OF_THE_JOB = {"SLURM_JOB_NUM_NODES"}
# Variables with the same value in the job script and in a step on all nodes of the job.
_OF_A_WHOLE_STEP = {"SLURM_NNODES"}


@dataclass(frozen=True)
class QuotedLaunch:
    """A launch whose shell and quotes can be left out.

    Attributes:
        shell: The words that are left out, such as ``bash -c``.
        text: The job script without the shell and the quotes. Lines keep their numbers.
    """

    shell: str
    text: str


def find_quoted(text: str) -> QuotedLaunch | None:
    """Find a launch that does the same without the shell and the quotes around it.

    Args:
        text: A job script without a launch as a command.

    Returns:
        None if there is no such launch, or more than one.
    """
    found = list(commands(text))
    values = variables(found)
    quoted = [each for command in found if (each := _without_shell(text, command, values))]
    return quoted[0] if len(quoted) == 1 else None


def _without_shell(
    text: str, command: Command, values: Mapping[str, Variable]
) -> QuotedLaunch | None:
    """Return the job script without the shell around the launch in a command.

    Args:
        text: The job script.
        command: The command.
        values: The variables of the job script, by name.

    Returns:
        None if the command is no shell with a launch, or if the launch might do something else
            without the shell.
    """
    if len(command.words) < 3:
        return None
    *before, shell, option, last = command.words
    quotes = _QUOTED.fullmatch(last.source)
    if shell.name not in SHELLS or option.text != "-c" or not quotes:
        return None
    inside = quotes[1] or quotes[2] or ""
    launches = [find_launch(each) for each in commands(inside)]
    if _MORE.search(inside) or len(launches) != 1 or not launches[0]:
        return None
    launch = launches[0]
    if launch.before or any(_REPLACED.search(word.source) for word in launch.script):
        return None
    same = {*values, *_OF_THE_JOB}
    if not has_size(with_held_options([word.text for word in before], values)):
        same |= _OF_A_WHOLE_STEP
    if not _carried_names(launch) <= same:
        return None
    begin = shell.start
    end = last.start + len(last.source)
    left_out = text[begin : last.start].strip()
    return QuotedLaunch(left_out, f"{text[:begin]}{inside}{text[end:]}")


def _carried_names(launch: Launch) -> set[str]:
    """Return the names of the variables in the launcher's options that the new command replaces."""
    acting = launch.given.acting()
    values = [value for option, value in acting if not isinstance(option.meaning, NoEffect)]
    return {name for value in values for name in names_in(value)}
