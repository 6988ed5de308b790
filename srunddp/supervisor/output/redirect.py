"""Where a rank's output goes: to the rank's own file, to the terminal, or to both.

The worker's descriptors 1 and 2 are redirected, so the output of NCCL, of C code and of the
script's children is caught as well. The output passes through the supervisor only if it has to
reach both the file and the terminal, or the terminal with a prefix.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from srunddp.errors import ConfigError, Scope, UsageError
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.util.atomic_file import append_whole, plain
from srunddp.util.descriptors import close_all, fill_standard
from srunddp.util.quick_dataclass import dataclass

if TYPE_CHECKING:
    from srunddp.supervisor.output.relay import OutputRelay

STDOUT = 1
STDERR = 2
# The line that marks another start in a log that is not empty. ``srunddp triage`` looks for it.
ANOTHER_START = b"\nsrunddp: another start begins here\n"
_PIPE_SIZE = 1 << 18  # four times Linux's default, so that the worker seldom has to wait


@dataclass(frozen=True)
class OutputTarget:
    """Where the output of one rank goes.

    Attributes:
        file: The file to which the output is appended; None for none.
        terminal: Whether the supervisor's standard output and error get the output.
        prefix: The text before each line on the terminal, but not in the file; empty for none.
    """

    file: Path | None
    terminal: bool
    prefix: str


def output_target(
    log_dir: str | None,
    prefix: bool,
    show_ranks: str | None,
    *,
    rank: int,
    world_size: int,
    node: str,
    run: str,
) -> OutputTarget:
    """Return where the output of one rank goes according to the options. Nothing is opened yet.

    Args:
        log_dir: ``--log-dir``, the folder in which each run has a folder; None to write no files.
        prefix: ``--prefix``, whether node and rank stand before each line on the terminal.
        show_ranks: ``--show-ranks``, the ranks whose output goes to the terminal as well as to
            their file; None for rank 0.
        rank: This rank.
        world_size: The number of ranks.
        node: This rank's node.
        run: The name of the run's folder, the same on all ranks and after a requeue.

    Raises:
        UsageError: ``show_ranks`` is not a list of ranks, names a rank that does not exist, or is
            given without ``log_dir``.
    """
    if show_ranks is not None and log_dir is None:
        raise _wrong_ranks(
            "given without --log-dir", "a folder for the other ranks' output", "add --log-dir DIR"
        )
    ranks = shown_ranks("0" if show_ranks is None else show_ranks, world_size)
    terminal = log_dir is None or any(rank in chosen for chosen in ranks)
    if log_dir is None:
        file = None
    else:
        file = Path(log_dir, plain(run), f"{plain(node)}.rank{rank}.log")
    return OutputTarget(
        file, terminal=terminal, prefix=f"{node}:{rank}: " if prefix and terminal else ""
    )


def shown_ranks(text: str, world_size: int) -> tuple[range, ...]:
    """Return the ranks that a text such as ``0,3-5``, ``all`` or ``none`` names.

    Raises:
        UsageError: The text has another form, or names a rank that does not exist.
    """
    if text in ("all", "none"):
        return (range(world_size if text == "all" else 0),)
    matches = [
        re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part) for part in text.split(",")
    ]
    ranks = tuple(range(int(match[1]), int(match[2] or match[1]) + 1) for match in matches if match)
    if len(ranks) < len(matches) or not all(ranks):
        raise _wrong_ranks(f"{text!r}", "ranks, all or none", "write a list like 0,3-5")
    highest = max(chosen.stop for chosen in ranks) - 1
    if highest >= world_size:
        raise _wrong_ranks(
            f"{text!r}", f"ranks from 0 to {world_size - 1}", f"leave rank {highest} out"
        )
    return ranks


def _wrong_ranks(found: str, expected: str, hint: str) -> UsageError:
    return UsageError(found, expected=expected, hint=hint, where="--show-ranks", scope=Scope.JOB)


@dataclass
class OutputRedirect:
    """Redirects one rank's output, from before the fork to after the worker's end.

    The order of calls is: :meth:`open` before the fork; after it :meth:`in_worker` in the worker
    and :meth:`start` in the supervisor; :meth:`finish` when the worker has ended.

    Attributes:
        target: Where the output goes.
        limits: The times of the thread that passes output on.
        filled: The descriptors among 0, 1 and 2 that were closed when srunddp started. They are
            open on ``/dev/null`` until the script begins, so that no other file gets these numbers.
    """

    target: OutputTarget
    limits: Limits = DEFAULT_LIMITS
    filled: list[int] = field(default_factory=list)
    _file: int | None = None
    # The reading and the writing end of the pipes of STDOUT and STDERR.
    _pipes: dict[int, tuple[int, int]] = field(default_factory=dict)
    _relay: OutputRelay | None = None

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that the worker inherits for its output: both ends of each pipe, and the
        file's.
        """
        return [end for ends in self._pipes.values() for end in ends] + (
            [] if self._file is None else [self._file]
        )

    @classmethod
    def open(cls, target: OutputTarget, limits: Limits = DEFAULT_LIMITS) -> OutputRedirect:
        """Open the file and the pipes that the target needs, if any.

        Call this before the fork, and before any socket is opened.

        Raises:
            ConfigError: The file cannot be written.
        """
        output = cls(target, limits)
        output.filled = fill_standard()
        if target.file:
            output._file = open_to_append(target.file, "--log-dir")
        if target.terminal and (target.file or target.prefix):
            output._pipes = {number: _pipe() for number in (STDOUT, STDERR)}
        return output

    def in_worker(self) -> None:
        """Redirect descriptors 1 and 2. Call this in the worker, before it writes or starts
        anything.
        """
        for number in (STDOUT, STDERR):
            target = self._pipes[number][1] if self._pipes else self._file
            if target is not None:
                os.dup2(target, number)
                if number in self.filled:
                    self.filled.remove(number)
        self._close(self.descriptors)

    def leave_to_script(self) -> None:
        """Close the descriptors in ``filled``, which the script would also find closed if Python
        ran it. Call this in the worker, right before the script.
        """
        close_all(self.filled)

    def start(self) -> None:
        """Start the thread that passes the output on, if one is needed.

        Call this in the supervisor, after the fork and with signals blocked.
        """
        self._close([write for _, write in self._pipes.values()])
        if self._pipes:
            # Imported here because most ranks do not need it.
            from srunddp.supervisor.output.relay import NonBlockingStream, OutputRelay

            prefix = self.target.prefix.encode(errors="backslashreplace")
            file = self.target.file
            streams = {
                read: NonBlockingStream(number, prefix, file, self.limits)
                for number, (read, _) in self._pipes.items()
            }
            self._relay = OutputRelay(streams, self._file, self.limits)
            self._relay.start()
        elif self._file is not None:
            self._close([self._file])

    def finish(self, limit: float) -> None:
        """Pass on the rest of the output, and close the pipes. Call this when the worker has ended.

        If a process that the worker left behind still holds a pipe open, this call ends when no
        output has come for a moment.

        Args:
            limit: How many seconds this may take, even if no process reads the output.
        """
        if self._relay:
            self._relay.finish(limit)

    @staticmethod
    def _close(descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)


def open_to_append(path: Path, option: str, header: str = "") -> int:
    """Open a file of this rank for appending, and make its folder if it is missing.

    Args:
        path: The file.
        option: The option that asks for the file; errors name it.
        header: The text with which a new file begins; a file that exists is emptied first. If the
            header is empty, output is appended to the text in the file.

    Returns:
        The descriptor.

    Raises:
        ConfigError: The folder or the file cannot be written.
    """
    # With O_NONBLOCK, opening a named pipe in the file's place fails instead of blocking for ever.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    place = path.parent
    try:
        os.makedirs(place, exist_ok=True)
        place = path
        opened = os.open(path, flags | (os.O_TRUNC if header else 0), 0o666)
        if not header and not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        os.set_blocking(opened, True)
        append_whole(opened, header.encode())
        if not header and os.fstat(opened).st_size:
            with contextlib.suppress(OSError):
                append_whole(opened, ANOTHER_START)
        return opened
    except OSError as error:
        if place is path and error.errno == errno.ELOOP:
            reason = "it is a symbolic link"
        else:
            reason = error.strerror or str(error)
        found = f"{place} cannot be written: {reason}"
        expected = "a folder in which every node may make files"
        hint = f"name another with {option}, or correct its permissions"
        if place is path and os.path.lexists(path):
            scope = Scope.RANK
        else:
            scope = Scope.NODE
        raise ConfigError(found, expected=expected, hint=hint, where=option, scope=scope) from None


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    # Enlarging fails if the pipes of this user have reached their common limit. The default size is
    # enough then.
    with contextlib.suppress(OSError):
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    return read, write
