"""The errors a user can cause. Each is one message and one fixed exit code.

    SrunddpError
    ├── ConfigError       78  the configuration, the environment or a file is wrong
    │   ├── UsageError     2  the command line itself is wrong
    │   └── ConfigFileError    several things in one file are wrong
    ├── UnavailableError  69  Slurm, or a node, does not do its part
    │   └── RendezvousError   the ranks did not find each other
    └── PeerError             another rank failed during the rendezvous: that rank's code

``Stopped`` is none of them: all ranks end so together, where they agreed to. A script's own exit
code passes through; what click refuses is a UsageError too.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any


class Scope(Enum):
    """Who sees the same error, and so which rank has to print it."""

    JOB = "job"  # every rank: rank 0 prints
    NODE = "node"  # every rank of this node: local rank 0 prints
    RANK = "rank"  # this rank alone


def one_line(text: str) -> str:
    """Return a text with what a terminal would obey escaped.

    A variable or a file's name may hold line ends and commands.

    Args:
        text: Of a message.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def one_of(names: Iterable[str], conjunction: str = "or") -> str:
    """Return names as ``a, b or c``.

    Args:
        names: One at least.
        conjunction: Before the last one.
    """
    *most, last = names
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint with the nearest of the known names; empty where none is near.

    Args:
        name: As it was written.
        known: That there are.
        cutoff: How near, from 0 for anything to 1 for the same.
    """
    # Every command imports this module, and few come to an unknown name.
    import difflib

    near = difflib.get_close_matches(name, known, 3, cutoff)
    # Swapped letters are the most frequent mistake, and difflib may take another word for nearer.
    near.sort(key=lambda each: sorted(each) != sorted(name))
    if near:
        return f"did you mean {near[0]}?"
    return ""


class SrunddpError(Exception):
    """One message: what was found, what was expected, what to do.

    Attributes:
        exit_code: What the rank then exits with.
        said: Whether the user has seen it.
        final: Whether no restart of the run may follow, however far this start has come.
        scope: Who has the same error.
        found: What is wrong, with the place before it.
        expected: What would be right; may be empty.
        hint: What to do; may be empty.
    """

    # sysexits' EX_SOFTWARE; derived classes have better ones.
    exit_code = 70
    said = False
    final = False

    def __init__(
        self,
        found: str,
        *,
        expected: str = "",
        hint: str = "",
        where: str = "",
        scope: Scope = Scope.RANK,
    ) -> None:
        """Put the message together.

        Args:
            found: What is wrong.
            expected: What would be right.
            hint: What to do.
            where: The file or the setting that it is about.
            scope: Who has the same error, so that it is printed once.
        """
        self.scope = scope
        self.found = f"{where}: {found}" if where else found
        self.expected = expected
        self.hint = hint
        parts = (
            self.found,
            f"; expected {expected}" if expected else "",
            f" -> {hint}" if hint else "",
        )
        super().__init__(one_line("".join(parts)))


class ConfigError(SrunddpError):
    """The configuration is wrong (sysexits' EX_CONFIG)."""

    exit_code = 78


@contextlib.contextmanager
def file_errors(what: str = "", **message: Any) -> Iterator[None]:
    """Make a ConfigError of what the kernel refuses of a file within.

    Args:
        what: What failed; empty for the name of the file.
        message: Arguments of :class:`ConfigError`.

    Raises:
        ConfigError: In place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{what or error.filename}: {os.strerror(error.errno or 0)}", **message
        ) from None


class UsageError(ConfigError):
    """The command line itself is wrong."""

    exit_code = 2


class ConfigFileError(ConfigError):
    """Several things in a file are wrong; the text has a line for each, after ``srunddp: error:``.

    Attributes:
        each: An error for each of them.
    """

    def __init__(self, each: Sequence[ConfigError]) -> None:
        """Put them together.

        Args:
            each: One at least, in the order of the file.
        """
        # What shows one message alone shows the first error, and how many more there are.
        first = each[0]
        hint = f"{each[0].hint}; then see the other errors of this file, {len(each) - 1} more"
        super().__init__(first.found, expected=first.expected, hint=hint, scope=first.scope)
        self.each = tuple(each)

    def __str__(self) -> str:
        return "\nsrunddp: error: ".join(map(str, self.each))


class UnavailableError(SrunddpError):
    """Slurm, or a node, is not there or does not do its part (sysexits' EX_UNAVAILABLE)."""

    exit_code = 69


class RendezvousError(UnavailableError):
    """The ranks did not meet."""


class PeerError(SrunddpError):
    """Another rank failed in a call that all ranks make together.

    The exit code is that rank's, on all ranks.
    """

    def __init__(
        self, found: str, *, code: int, expected: str = "", hint: str = "", scope: Scope = Scope.JOB
    ) -> None:
        """Put the message together.

        Args:
            found: What was wrong there.
            code: The exit code of that rank.
            expected: What would be right.
            hint: What to do.
            scope: Who has the same error.
        """
        # The launchers report one exit code of all ranks, and which one is chance: all have the one
        # that tells what happened.
        super().__init__(found, expected=expected, hint=hint, scope=scope)
        self.exit_code = code


class ReassignedError(Exception):
    """No failure: this task has another number from now on, and meets the others again as that.

    Attributes:
        rank: Its number.
        ranks_per_node: How many ranks each node has from now on, as Slurm writes counts; empty if
            the ranks are not numbered anew.
        expected: On rank 0, the numbers of the other tasks that come again.
    """

    def __init__(self, rank: int, ranks_per_node: str = "", expected: tuple[int, ...] = ()) -> None:
        """Note what the task has to know.

        Args:
            rank, ranks_per_node, expected: See the class.
        """
        super().__init__(rank)
        self.rank = rank
        self.ranks_per_node = ranks_per_node
        self.expected = expected


class Stopped(SystemExit):
    """All ranks end after the same step, with a checkpoint; none has failed.

    Attributes:
        code: Of all ranks: 143 as after SIGTERM; 75 (sysexits' EX_TEMPFAIL) where the job has yet
            to be requeued.
    """

    code: int

    # SystemExit prints its argument where that is a text, and then exits with 1: the number goes
    # there, and the sentence is kept apart.
    def __init__(self, sentence: str, code: int) -> None:
        """Put the end together.

        Args:
            sentence: What is said of it.
            code: 143 or 75.
        """
        super().__init__(code)
        self._sentence = sentence

    def __str__(self) -> str:
        return self._sentence
