"""Where a rank's output goes: a file of its own, the terminal, or both.

The worker's descriptors 1 and 2 are what is turned, so that the output of NCCL, of C and of the
script's own children is caught as well. Only what has to reach the terminal too, or with a prefix,
passes through the supervisor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from srunddp.errors import ConfigError, Scope, UsageError
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.util.atomic_file import append_whole, plain

if TYPE_CHECKING:
    from srunddp.supervisor.output.relay import OutputRelay

STDOUT = 1
STDERR = 2
# In a requeued job's files; triage looks for it.
ANOTHER_START = b"\nsrunddp: another start begins here\n"
_PIPE_SIZE = 1 << 18  # four times Linux's default: the worker waits for the supervisor less often


@dataclass(frozen=True)
class OutputTarget:
    """The file that one rank's output is appended to, or None, and whether the supervisor's
    terminal gets it too.

    ``prefix`` is before each line on the terminal, and not in the file; empty for none.
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
    """What the options mean for one rank; nothing is opened yet.

    Args:
        log_dir: ``--log-dir``, the folder below which each run has one; None to write no files.
        prefix: ``--prefix``, node and rank before each line on the terminal.
        show_ranks: ``--show-ranks``, the ranks that go to the terminal as well as to their file;
            None for rank 0.
        rank, world_size, node: of this rank.
        run: the same on all ranks, and after a requeue: the run's folder is called so.

    Raises:
        UsageError: ``show_ranks`` is not a list of ranks, names one that is not there, or has no
            ``log_dir``.
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
    """Read ``0,3-5``, ``all`` or ``none``; a UsageError for another form, or a rank that is not
    there.
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
    """One rank's output, from before the fork to after the worker's end.

    In this order: :meth:`open`; after the fork :meth:`in_worker` there and :meth:`start` here;
    :meth:`finish`.
    """

    target: OutputTarget
    limits: Limits = DEFAULT_LIMITS
    _file: int | None = None
    # Of STDOUT and STDERR: where to read and write.
    _pipes: dict[int, tuple[int, int]] = field(default_factory=dict)
    _relay: OutputRelay | None = None

    @property
    def descriptors(self) -> list[int]:
        """Those that the worker has, and turns."""
        return [end for ends in self._pipes.values() for end in ends] + (
            [] if self._file is None else [self._file]
        )

    @classmethod
    def open(cls, target: OutputTarget, limits: Limits = DEFAULT_LIMITS) -> OutputRedirect:
        """Open the file and what leads to it, or a ConfigError; before the fork and any socket. May
        open nothing.
        """
        output = cls(target, limits)
        if target.file or target.prefix:
            _fill_standard()
        if target.file:
            output._file = open_to_append(target.file, "--log-dir")
        if target.terminal and (target.file or target.prefix):
            output._pipes = {number: _pipe() for number in (STDOUT, STDERR)}
        return output

    def in_worker(self) -> None:
        """Turn descriptors 1 and 2; in the worker, before it writes or starts anything."""
        for number in (STDOUT, STDERR):
            target = self._pipes[number][1] if self._pipes else self._file
            if target is not None:
                os.dup2(target, number)
        self._close(self.descriptors)

    def start(self) -> None:
        """In the supervisor, after the fork and with its signals blocked: pass on what comes, in a
        thread.
        """
        self._close([write for _, write in self._pipes.values()])
        if self._pipes:
            # Most ranks need neither.
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
        """When the worker has ended, pass on the rest within so many seconds, and close, even if
        nobody reads.

        A process that the worker left behind may hold its output open: then until nothing comes for
        a moment.
        """
        if self._relay:
            self._relay.finish(limit)

    @staticmethod
    def _close(descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)


def open_to_append(path: Path, option: str, header: str = "") -> int:
    """Open a file of this rank, which ``option`` wants, and make its folder, which may be another
    on each node.

    ``header``: what it is to begin with, and nothing else; none for a file that may be there. A
    ConfigError where the folder or the file cannot be written to.
    """
    # Without O_NONBLOCK a named pipe in the file's place would hold this rank for ever.
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
    # The user's pipes have reached their limit together: the default will do.
    with contextlib.suppress(OSError):
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    return read, write


def _fill_standard() -> None:
    """Where 0, 1 or 2 is closed, the next file would get that number, and the worker's output with
    it.
    """
    for number in (0, STDOUT, STDERR):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
