"""The errors that a user can cause. Each has one message and one fixed exit code.

    SrunddpError
    ├── ConfigError       78  the configuration, the environment or a file is wrong
    │   ├── UsageError     2  the command line itself is wrong
    │   └── ConfigFileError    several things in one file are wrong
    ├── UnavailableError  69  Slurm or a node is not available, or does not answer as it should
    │   └── RendezvousError   the ranks did not find each other
    │       └── CutOffError   this task is cut off from the others
    ├── NotNeededError     0  the run is over without this task
    └── PeerError             another rank failed during the rendezvous: that rank's code

``Stopped`` is not an error: every rank raises it to exit at an agreed stop. If a script fails, its
own exit code is kept. Errors that click finds in the command line become UsageErrors.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any


class Scope(Enum):
    """Which ranks have the same error. This decides which of them prints it."""

    JOB = "job"  # every rank: rank 0 prints
    NODE = "node"  # every rank of this node: local rank 0 prints
    RANK = "rank"  # this rank alone


def one_line(text: str) -> str:
    """Return a message with its control characters escaped.

    A value of a variable or a file's name in the message may contain line ends and terminal
    escape sequences.

    Args:
        text: The message.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def one_of(names: Iterable[str], conjunction: str = "or") -> str:
    """Join names as in ``a, b or c``.

    Args:
        names: One name at least.
        conjunction: The word before the last name.
    """
    *most, last = names
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint with the known name that is nearest to a mistyped one.

    Args:
        name: The name as the user wrote it.
        known: The names that exist.
        cutoff: How similar a known name must be to ``name``, from 0 (any name) to 1 (equal).

    Returns:
        ``did you mean NAME?``; empty if no known name is similar.
    """
    # Imported here: every command imports this module, but few meet an unknown name.
    import difflib

    near = difflib.get_close_matches(name, known, 3, cutoff)
    # Swapped letters are the most frequent mistake, but difflib may rank another word first.
    near.sort(key=lambda each: sorted(each) != sorted(name))
    if near:
        return f"did you mean {near[0]}?"
    return ""


class SrunddpError(Exception):
    """Base class of all errors: one message with what was found, what was expected, and what to do.

    Attributes:
        exit_code: The exit code of a process that ends with this error.
        said: Whether the message must not be printed (again).
        final: Whether the run must not be restarted after this error, even with restarts left.
        scope: Which ranks have the same error.
        found: What is wrong, after the file or the setting (``where``) that the error is about.
        expected: What would be right; may be empty.
        hint: What the user can do; may be empty.
    """

    # sysexits' EX_SOFTWARE; derived classes set a more specific code.
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
        """Build the message ``WHERE: FOUND; expected EXPECTED -> HINT``.

        Args:
            found: What is wrong.
            expected: What would be right; empty leaves that part out.
            hint: What the user can do; empty leaves that part out.
            where: The file or the setting that the error is about; empty leaves that part out.
            scope: Which ranks have the same error, so that it is printed once.
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
    """Turn an OSError inside the ``with`` block into a ConfigError.

    Args:
        what: What failed, for the message; empty for the name of the file.
        message: Further arguments of :class:`ConfigError`.

    Raises:
        ConfigError: The block has raised an OSError.
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
    """Several things in one file are wrong. The message has one line for each, and each line after
    the first begins with ``srunddp: error:``.

    Attributes:
        each: The errors, in the order of the file.
    """

    def __init__(self, each: Sequence[ConfigError]) -> None:
        """Combine the errors of one file.

        Args:
            each: The errors in the order of the file; one at least.
        """
        # Code that shows only one line shows the first error and how many more there are.
        first = each[0]
        hint = f"{each[0].hint}; then see the other errors of this file, {len(each) - 1} more"
        super().__init__(first.found, expected=first.expected, hint=hint, scope=first.scope)
        self.each = tuple(each)

    def __str__(self) -> str:
        return "\nsrunddp: error: ".join(map(str, self.each))


class UnavailableError(SrunddpError):
    """Slurm or a node is not available, or does not answer as it should (sysexits'
    EX_UNAVAILABLE).
    """

    exit_code = 69


class RendezvousError(UnavailableError):
    """The rendezvous failed: the ranks did not find each other."""


class CutOffError(RendezvousError):
    """This task has lost the connection to the other tasks, which may continue without it."""


class NotNeededError(SrunddpError):
    """Ends a task that the run no longer needed when the run ended. It is no failure."""

    exit_code = 0
    said = True


class PeerError(SrunddpError):
    """Another rank failed in a call that all ranks make together.

    All ranks exit with the code of the rank that failed.
    """

    def __init__(
        self, found: str, *, code: int, expected: str = "", hint: str = "", scope: Scope = Scope.JOB
    ) -> None:
        """Build the message.

        Args:
            found: What was wrong on the other rank.
            code: The exit code of the other rank.
            expected: What would be right; empty leaves that part out.
            hint: What the user can do; empty leaves that part out.
            scope: Which ranks have the same error.
        """
        # All ranks exit with the code of the rank that failed, because a launcher reports the exit
        # code of only one rank, chosen by chance.
        super().__init__(found, expected=expected, hint=hint, scope=scope)
        self.exit_code = code


class ReassignedError(Exception):
    """Tells the caller that this task has another number from now on, and has to repeat the
    rendezvous with it. It is no failure.

    Attributes:
        rank: The task's new number, which is a rank unless the task waits on a spare node.
        ranks_per_node: How many ranks each node has from now on, written as Slurm writes counts.
        layout: How often the ranks of the run have been renumbered, this time included.
        generation: How many restarts the run has had.
        expected: On rank 0, the numbers of the other tasks that repeat the rendezvous.
    """

    def __init__(
        self,
        rank: int,
        ranks_per_node: str,
        layout: int,
        generation: int,
        expected: tuple[int, ...] = (),
    ) -> None:
        """Set the attributes.

        Args:
            rank: The task's new number.
            ranks_per_node: How many ranks each node has.
            layout: How often the ranks have been renumbered.
            generation: How many restarts the run has had.
            expected: On rank 0, the other tasks that repeat the rendezvous.
        """
        super().__init__(rank)
        self.rank = rank
        self.ranks_per_node = ranks_per_node
        self.layout = layout
        self.generation = generation
        self.expected = expected


class Stopped(SystemExit):
    """Ends the process at an agreed stop: all ranks have written a checkpoint after the same step,
    and none has failed.

    Attributes:
        code: The exit code of all ranks: 143, as after SIGTERM; 75 (sysexits' EX_TEMPFAIL) if the
            job still has to be requeued.
    """

    code: int

    # Pass only the code to SystemExit and store the sentence in an attribute: given a string,
    # SystemExit would make Python print it and exit with 1.
    def __init__(self, sentence: str, code: int) -> None:
        """Set the sentence and the code.

        Args:
            sentence: Why the run stops, for the user.
            code: The exit code, 143 or 75.
        """
        super().__init__(code)
        self._sentence = sentence

    def __str__(self) -> str:
        return self._sentence
