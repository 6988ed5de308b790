"""Finds launches that are not separate commands: those in quotes or in variables.

They are not converted, because other commands in the same quotes would run once for each rank. But
the error shows the srun line that the user has to write instead.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from srunddp.sbatch.bash import Command, Word, commands, rest_of_line
from srunddp.sbatch.bash_variables import (
    Variable,
    expanded,
    is_assignment,
    names_in,
    unquoted,
    variables,
)
from srunddp.sbatch.launch import SHELLS, TALKERS, Launch, find_launch, line_of

# Matches what separates two commands in the value of a variable.
_SEPARATES = re.compile(r"[;&|\n]")


@dataclass(frozen=True)
class HiddenLaunch:
    """A launch in quotes or in a variable.

    Attributes:
        variable: The name of the variable; empty if the launch is only in quotes.
        line: The number of the line that sets the variable, or has the quotes, from 1.
        runs_in: The number of the line whose command runs the launch; 0 if none is found.
        launch: The command that the user has to write: the words before the quotes or the variable,
            and then the launch.
        others: The other commands in the quotes.
        rest: The redirections, the pipe or the ``&`` behind the command; empty if there are none.
    """

    variable: str
    line: int
    runs_in: int
    launch: Launch
    others: Sequence[str]
    rest: str = ""


def find_hidden(text: str) -> HiddenLaunch | None:
    """Find the first launch that is in quotes or in a variable.

    Args:
        text: A job script without a launch as a command.

    Returns:
        None if there is none. A launch in a here-document is not found.
    """
    found = list(commands(text))
    values = variables(found)
    holder = next((each for each in values.values() if _launch_in(each.value)), None)
    names = _holding(holder, values) if holder else []
    for command in found:
        if is_assignment(command) or command.words[0].text in TALKERS:
            continue
        for place, word in enumerate(command.words):
            inside = expanded(unquoted(word.source), values, names)
            holds = holder and not {*names}.isdisjoint(names_in(word.source))
            if holds or (word.source != word.text and _launch_in(inside)):
                return _hidden(text, command, place, holder, names, values)
    if holder:
        line = line_of(text, holder.word)
        if launch := _launch_in(holder.value):
            return HiddenLaunch(holder.name, line, 0, launch, ())
    return None


def _launch_in(value: str) -> Launch | None:
    for command in commands(value):
        if launch := find_launch(command, without_script=True):
            return launch
    return None


def _holding(holder: Variable, values: dict[str, Variable]) -> list[str]:
    """Return the names of a variable and of all variables whose values contain it, also
    indirectly.
    """
    names = [holder.name]
    for each in values.values():
        if each.name not in names and not {*names}.isdisjoint(names_in(each.value)):
            names.append(each.name)
    return names


def _hidden(
    text: str,
    command: Command,
    place: int,
    holder: Variable | None,
    names: Sequence[str],
    values: dict[str, Variable],
) -> HiddenLaunch | None:
    """Combine a command with the launch that is in one of its words.

    Args:
        text: The script.
        command: The command that runs the launch.
        place: The place of the word that contains the launch, or a variable with the launch.
        holder: The variable whose value contains the launcher; None if the word itself contains it.
        names: The names of the variables to replace by their values.
        values: The variables of the script, by name.

    Returns:
        None if no launch is found when the variables are replaced.
    """
    words = command.words
    before = list(words[:place])
    if len(before) > 1 and before[-1].text.endswith("c") and before[-2].name in SHELLS:
        # In bash -c "…", words behind the quotes are no arguments of the launch.
        inside = unquoted(words[place].source)
        before = before[:-2]
    else:
        inside = " ".join([unquoted(words[place].source), *(w.source for w in words[place + 1 :])])
        if before and before[-1].text == "eval":
            before = before[:-1]
    inner = _commands_inside(inside, values, names)
    launches = [launch for each in inner if (launch := find_launch(each, without_script=True))]
    if not launches:
        return None
    launch = launches[0]
    others = [
        " ".join(word.source for word in each.words)
        for each in inner
        if not find_launch(each, without_script=True)
    ]
    own = list(launch.words[: launch.before])
    assignments = [word for word in own if "=" in word.text and not word.text.startswith("-")]
    own = [word for word in own if word not in assignments and word.text != "exec"]
    all_before: list[Word] = [*assignments, *before, *own]
    return HiddenLaunch(
        holder.name if holder else "",
        line_of(text, holder.word if holder else words[place]),
        line_of(text, words[0]),
        replace(
            launch,
            words=[*all_before, *launch.words[launch.before :]],
            before=len(all_before),
            in_loop=command.in_loop,
        ),
        others,
        rest_of_line(text, words[-1]),
    )


def _commands_inside(
    inside: str, values: Mapping[str, Variable], names: Sequence[str]
) -> list[Command]:
    """Return the commands of a text in quotes, with variables replaced.

    If the value of a variable before the launcher has several commands, that variable is replaced
    too. Otherwise the ``&&`` between these commands would become an argument when the line is
    written behind srun.

    Args:
        inside: The text.
        values: The variables of the script, by name.
        names: The names of the variables to replace by their values in any case.
    """
    replaced = list(names)
    while True:
        found = list(commands(expanded(inside, values, replaced)))
        more = {
            name
            for word in _words_before_launch(found)
            for name in names_in(word.source)
            if name in values
            and name not in replaced
            and _SEPARATES.search(values[name].value.strip())
        }
        if not more:
            return found
        replaced += sorted(more)


def _words_before_launch(found: Sequence[Command]) -> list[Word]:
    words: list[Word] = []
    for command in found:
        if launch := find_launch(command, without_script=True):
            return [*words, *launch.words[: launch.before]]
        words += command.words
    return words
