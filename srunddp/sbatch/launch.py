"""Finds the command of a job script that starts torchrun, accelerate launch or deepspeed."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from srunddp.sbatch.bash import NESTED_WITHOUT_QUOTES, Command, Word
from srunddp.sbatch.launcher_options import (
    ACCELERATE,
    DEEPSPEED,
    LAUNCH,
    TORCHRUN,
    Given,
    Module,
    Option,
    find,
)

# Matches a line of a script that contains a launcher's name before any comment.
NAMED = re.compile(
    r"[^#]*(torchrun|torch\.distributed\.(run|launch)|accelerate(\.commands\.| |-)launch"
    r"|deepspeed\s+-{0,2}[\w$./{}-]*\.py)"
)
_MODULES = {
    "torch.distributed.run": TORCHRUN,
    "torch.distributed.launch": LAUNCH,
    "accelerate.commands.launch": ACCELERATE,
    "deepspeed.launcher.runner": DEEPSPEED,
}
PYTHON = re.compile(r"python[\d.]*")  # the name of a program
# Values that stay the same if all their quotes are removed and new quotes are put around them.
_INNER = r"\$(?:\w++|[#?@*!$-]|\{[^{}\"'\\]*\}|NESTED)|`[^`\"'\\]*`"
_PLAIN = re.compile(
    rf"(?:{_INNER}|\"(?:{_INNER}|[^\"'\\`$])*\"|'[^'\"\\`$]*'|[^\"'\\`$~])*".replace(
        "NESTED", NESTED_WITHOUT_QUOTES
    )
)
# Commands that may have a launcher's name as an argument, but do not start the launcher.
TALKERS = ("echo", "printf", "which", "command", "type")
SHELLS = ("bash", "sh")
# Behind one of these words, deepspeed is the name of a package.
_INSTALLERS = {"install", "uninstall", "add", "load", "show", "list", "import"}


@dataclass(frozen=True)
class Launch:
    """A command that starts a launcher.

    Attributes:
        words: All words of the command.
        before: The number of words before the launcher.
        launcher: The words that call the launcher, such as ``python -m torch.distributed.run``.
        given: The options given to the launcher.
        script: SCRIPT and all words after it.
        in_loop: Whether the command is in a loop.
    """

    words: Sequence[Word]
    before: int
    launcher: str
    given: Given
    script: Sequence[Word]
    in_loop: bool

    @property
    def texts_before(self) -> list[str]:
        """The words before the launcher, without quotes."""
        return [word.text for word in self.words[: self.before]]

    @property
    def is_accelerate(self) -> bool:
        """Whether the launcher is that of accelerate."""
        return self.given.table is ACCELERATE

    @property
    def is_deepspeed(self) -> bool:
        """Whether the launcher is that of DeepSpeed."""
        return self.given.table is DEEPSPEED

    @property
    def reads_a_file(self) -> bool:
        """Whether the launcher reads options from a file."""
        return self.given.has("config-file")

    @property
    def is_module(self) -> bool:
        """Whether SCRIPT is the name of a module."""
        return any(isinstance(option.meaning, Module) for option, _ in self.given.acting())

    @property
    def passes_local_rank(self) -> bool:
        """Whether the launcher adds ``--local-rank=N`` to the arguments of the script."""
        if self.is_deepspeed:
            return not self.given.has("no-local-rank")
        return self.given.table is LAUNCH and not self.given.has("use-env")

    @property
    def program(self) -> str:
        """The word by which srunddp is called in place of the launcher: with the same folder in
        front, if the script names the launcher's folder.
        """
        first = self.words[self.before]
        if first.name == first.text:
            return "srunddp"
        folder, _, rest = first.source.rpartition(first.name)
        return f"{folder}srunddp{rest}"

    def line(self, text: str) -> int:
        """Return the number of the launcher's line, from 1."""
        return line_of(text, self.words[self.before])


def line_of(text: str, word: Word) -> int:
    """Return the number of a word's line, from 1."""
    return text.count("\n", 0, word.start) + 1


def find_launches(found: Iterable[Command]) -> list[Launch]:
    """Return the launches among commands."""
    return [launch for command in found if (launch := find_launch(command))]


def find_launch(command: Command, *, without_script: bool = False) -> Launch | None:
    """Return the launch in a command; None if the command has no launcher, or no script for it.

    Args:
        command: A command of a script.
        without_script: Whether to accept a launcher without a script, as a variable may hold one.
    """
    words = command.words
    if words[0].text in TALKERS:
        return None
    for place in range(len(words)):
        length, table = _launcher(words[place:])
        if length and not (table is DEEPSPEED and _only_names(words[:place])):
            break
    else:
        return None
    launcher = " ".join(word.text for word in words[place : place + length])
    given, script = _options(words[place + length :], table)
    if not (script or without_script):
        return None
    return Launch(words, place, launcher, given, script, command.in_loop)


def _only_names(before: Sequence[Word]) -> bool:
    """Tell whether the word deepspeed, behind some words of a command, is the name of a package or
    an argument of a Python script, and not the launcher.

    Args:
        before: The words of the command before deepspeed.
    """
    texts = [word.name for word in before]
    a_program = any(PYTHON.fullmatch(text) or text.endswith(".py") for text in texts)
    return a_program or not _INSTALLERS.isdisjoint(texts)


def _launcher(words: Sequence[Word]) -> tuple[int, Sequence[Option]]:
    """Return how many words at the beginning of a list call a launcher, and the options that the
    launcher has. The number is 0 if the first word does not begin the call of a launcher.
    """
    first, *rest = words
    if first.name == "torchrun":
        return 1, TORCHRUN
    if first.name == "accelerate" and rest and rest[0].text == "launch":
        return 2, ACCELERATE
    if first.name in ("accelerate-launch", "deepspeed"):
        return 1, ACCELERATE if first.name == "accelerate-launch" else DEEPSPEED
    if PYTHON.fullmatch(first.name):
        # python may have options before -m, as in python -u -m torch.distributed.run.
        module = next((at for at, word in enumerate(words) if word.text == "-m"), len(words)) + 1
        if module < len(words) and words[module].text in _MODULES:
            return module + 1, _MODULES[words[module].text]
    return 0, ()


def _options(words: Sequence[Word], table: Sequence[Option]) -> tuple[Given, Sequence[Word]]:
    """Return the launcher's options that are given, and the words from SCRIPT on.

    Args:
        words: The words behind the launcher.
        table: The options that the launcher has.
    """
    texts = [word.text for word in words]
    values: dict[str, str] = {}
    unclear: dict[str, str] = {}
    at = 0
    while at < len(texts) and texts[at].startswith("-") and texts[at] != "--":
        name, equals, value = texts[at].lstrip("-").partition("=")
        # All launchers but deepspeed also accept --nproc_per_node for --nproc-per-node.
        name = name.replace("_", "-")
        option = find(table, name)
        if not option and not texts[at].startswith("--"):
            option = find(table, name[:1])  # a letter with its value behind it, such as -t3
            equals = "="
            value = texts[at][2:]
        if not option:
            return Given(table, values, texts[at], unclear), words[at + 1 :]
        takes_next = not (equals or option.flag)
        if takes_next and at + 1 < len(texts):
            value = texts[at + 1]
        values[option.name] = value
        given = words[at : at + 2] if takes_next else words[at : at + 1]
        unclear.pop(option.name, None)
        if not all(_PLAIN.fullmatch(word.source) for word in given):
            unclear[option.name] = " ".join(word.source for word in given)
        at += 2 if takes_next else 1
    if at < len(texts) and texts[at] == "--":
        at += 1
    return Given(table, values, unclear=unclear), words[at:]
