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

# A launcher's name anywhere in a line of a script that is no comment.
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
# Values that stay the same when all quotes are dropped and new ones are put around them.
_INNER = r"\$(?:\w++|[#?@*!$-]|\{[^{}\"'\\]*\}|NESTED)|`[^`\"'\\]*`"
_PLAIN = re.compile(
    rf"(?:{_INNER}|\"(?:{_INNER}|[^\"'\\`$])*\"|'[^'\"\\`$]*'|[^\"'\\`$~])*".replace(
        "NESTED", NESTED_WITHOUT_QUOTES
    )
)
TALKERS = ("echo", "printf", "which", "command", "type")  # they only mention a launcher
SHELLS = ("bash", "sh")
# Behind these words deepspeed is a package's name.
_INSTALLERS = {"install", "uninstall", "add", "load", "show", "list", "import"}


@dataclass(frozen=True)
class Launch:
    """A command that starts a launcher.

    Attributes:
        words: all words of the command.
        before: the number of words before the launcher.
        launcher: the launcher as it is called: ``torchrun``, ``python -m torch.distributed.run``.
        given: the launcher's options.
        script: SCRIPT and all words after it.
        in_loop: whether the command is in a loop.
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
        """The name of srunddp in the place of the launcher, with the launcher's folder if the
        script names it.
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
        command: a command of a script.
        without_script: accept a launcher without a script, as the value of a variable may be.
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
    """Tell whether the word deepspeed after these words is a package's name or an argument."""
    texts = [word.name for word in before]
    a_program = any(PYTHON.fullmatch(text) or text.endswith(".py") for text in texts)
    return a_program or not _INSTALLERS.isdisjoint(texts)


def _launcher(words: Sequence[Word]) -> tuple[int, Sequence[Option]]:
    """Return how many of the first words are the launcher, and its options; 0 if the first word
    begins none.
    """
    first, *rest = words
    if first.name == "torchrun":
        return 1, TORCHRUN
    if first.name == "accelerate" and rest and rest[0].text == "launch":
        return 2, ACCELERATE
    if first.name in ("accelerate-launch", "deepspeed"):
        return 1, ACCELERATE if first.name == "accelerate-launch" else DEEPSPEED
    if PYTHON.fullmatch(first.name):
        # In python -u -m torch.distributed.run, the first -m counts.
        module = next((at for at, word in enumerate(words) if word.text == "-m"), len(words)) + 1
        if module < len(words) and words[module].text in _MODULES:
            return module + 1, _MODULES[words[module].text]
    return 0, ()


def _options(words: Sequence[Word], table: Sequence[Option]) -> tuple[Given, Sequence[Word]]:
    """Return the launcher's options, and the words from SCRIPT on."""
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
            option = find(table, name[:1])  # -t3
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
