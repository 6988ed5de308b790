"""Which paths are copies on this node, by `srunddp stage push`, and a run in them.

A node that sees a shared path uses that; only what it does not see is looked for in its copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from srunddp.errors import ConfigError, Scope
from srunddp.stage.offline import caches

VARIABLE = "SRUNDDP_STAGED"
# Files in the folder of a job.
PLACES = "places.json"
LOCK = "lock"
# Variables that may name a place: some hold several paths, with colons between them, others one.
_LISTS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
_PATHS = (
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "TORCH_HOME",
    "SRUNDDP_IFACES",
)
# Where slurmstepd goes if it cannot enter the step's working directory.
_LEFT_BY_THE_LAUNCHER = "/tmp"


@dataclass(frozen=True)
class PathMapping:
    """A file or folder that was staged.

    Attributes:
        role: ``env``, ``project`` or ``data``.
        path: the shared one.
        here: where it is on this node, the same where that sees it.
    """

    role: str
    path: str
    here: str


@dataclass(frozen=True)
class StagedPaths:
    """What was brought to this node.

    Attributes:
        folder: that has the copies.
        cwd: the working directory for ranks that start in the root, or where Slurm could not enter
            theirs.
    """

    folder: str
    places: tuple[PathMapping, ...]
    cwd: str = ""

    @classmethod
    def load(cls, folder: str) -> StagedPaths:
        """Read those of a job's folder.

        Raises:
            ValueError, TypeError, KeyError: their file is broken.
            OSError: it cannot be read.
        """
        written = json.loads(Path(folder, PLACES).read_bytes())
        return cls(folder, tuple(PathMapping(**each) for each in written["places"]), written["cwd"])

    def here(self, path: str) -> str:
        """Return where an absolute path is on this node; what is in no place, or is seen here,
        stays as it is written.
        """
        if not path.startswith("/"):
            return path
        # normpath() keeps two slashes at the beginning, as POSIX leaves their meaning to the
        # system.
        whole = os.path.normpath("/" + path.lstrip("/"))
        # With a slash behind both, /data does not hold /database.
        above = [place for place in self.places if f"{whole}/".startswith(f"{place.path}/")]
        place = max(above, key=lambda place: len(place.path), default=None)
        if place is None or place.here == place.path:
            return path
        slash = "/" if path.endswith("/") else ""
        return place.here + whole.removeprefix(place.path) + slash

    def shared(self, path: str) -> str:
        """Return what an absolute path on this node is a copy of; the path itself, where it is
        none.
        """
        for place in self.places:
            if place.here != place.path and f"{path}/".startswith(f"{place.here}/"):
                return place.path + path.removeprefix(place.here)
        return path

    def argument(self, word: str) -> str:
        """Change an argument of the script that is a path, or has one after its first ``=``."""
        name, equals, value = word.partition("=")
        if word.startswith("/"):
            return self.here(word)
        return name + equals + self.here(value)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that change, with their values here; also those of cache folders in
        their usual place.
        """
        before = caches(environ) | {
            name: environ[name] for name in (*_LISTS, *_PATHS) if name in environ
        }
        changed = {}
        for name, value in before.items():
            entries = value.split(":") if name in _LISTS else [value]
            here = ":".join(map(self.here, entries))
            if here != value:
                changed[name] = here
        return changed

    def intended_cwd(self, environ: Mapping[str, str], folder: str) -> str:
        """Return the working directory that the step was to have.

        Args:
            environ: of the rank; srun leaves its own folder in it, which a shell before this
                process may have replaced.
            folder: that this process is in; what the launcher could enter stays, but for the root.
        """
        if folder == "/":
            return self.cwd or folder
        if self.here(folder) == folder and folder in (_LEFT_BY_THE_LAUNCHER, environ.get("HOME")):
            # A shell before this process may have corrected PWD to the folder that it is in. Then
            # the folder of the push is the best guess.
            for requested in (
                environ.get("PWD", ""),
                self.cwd,
                environ.get("SLURM_SUBMIT_DIR", ""),
            ):
                if self.here(requested) != requested:
                    return requested
        return folder

    def search_path(
        self, entries: Sequence[str], environ: Mapping[str, str], before: str, now: str
    ) -> list[str]:
        """Return where Python is to look for modules.

        Args:
            entries: where it looks.
            environ: with what it has made them of.
            before: the working directory at its start, which those of PYTHONPATH may be relative
                to.
            now: the working directory of today.
        """
        relative = {}
        if before != now:
            for entry in environ.get("PYTHONPATH", "").split(":"):
                if not entry.startswith("/"):
                    old = os.path.normpath(os.path.join(before, entry))
                    relative[old] = os.path.normpath(os.path.join(now, entry))
        return [relative.get(entry, self.here(entry)) for entry in entries]

    @property
    def note(self) -> str:
        """Tell what rank 0 says where its node does not see the project; empty where it does."""
        copies = [
            place for place in self.places if place.role == "project" and place.here != place.path
        ]
        if not copies:
            return ""
        return (
            f"this node does not see {copies[0].path}: what the script writes with relative paths"
            f" goes into the copy {copies[0].here}, and is not brought back"
        )


def lock_file(descriptor: int, wait: float = 0.0, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file.

    Args:
        descriptor: of the open file.
        wait: seconds to try.
        kind: exclusive, or shared.

    Returns:
        Whether it is locked now.
    """
    end = time.monotonic() + wait
    while True:
        try:
            # flock() has no limit of time, and so it is attempted again and again.
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.1)


def read(environ: Mapping[str, str]) -> StagedPaths:
    """Read what was staged, from the folder that ``SRUNDDP_STAGED`` names.

    Raises:
        ConfigError: it is not set; the folder or its file is not there, is broken, or is not this
            user's alone.
    """
    folder = environ.get(VARIABLE, "")
    if not folder.startswith("/"):
        state = repr(folder) if folder else "not set"
        raise ConfigError(
            f"--staged, and {VARIABLE} is {state}",
            expected="ranks that a staged srunddp started",
            hint="start the ranks by the path that `srunddp stage push` printed",
            scope=Scope.NODE,
        )
    folder = os.path.normpath(folder)
    try:
        with _reading():
            _require_ours(folder)
            return StagedPaths.load(folder)
    except (ValueError, TypeError, KeyError):
        raise _wrong(
            f"{folder}/{PLACES} is broken", "the places that `srunddp stage push` wrote"
        ) from None


def _require_ours(folder: str) -> None:
    """See to it that the folder is this user's alone, so that nobody else can have put anything
    there.

    Raises:
        ConfigError: it is not.
        OSError: it is not there.
    """
    # lstat() does not follow a link, which in /tmp anybody may have made.
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise _wrong(f"{folder} is not a folder", "the one that `srunddp stage push` made")
    if status.st_uid != os.geteuid():
        raise _wrong(f"{folder} belongs to user id {status.st_uid}", "one of yours")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _wrong(f"{folder} may be changed by others", "that its owner alone may")


def lock(folder: str) -> int:
    """Keep the folder from being removed, as long as this process lives or one that it forks.

    Returns:
        The descriptor that holds it, which processes inherit; above 2, also where standard output
        is closed.

    Raises:
        ConfigError: it is being removed.
    """
    with _reading(), open(os.path.join(folder, LOCK), "rb") as file:
        # A lock of flock() belongs to the open file, which is shared with all processes that are
        # forked from here, and lasts until the last of them ends. F_DUPFD sets no close-on-exec
        # flag, so the descriptor outlives an exec as well.
        held = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, 3)
    # The folder may have been removed between open() and flock(): then the file has no name any
    # more.
    if lock_file(held, kind=fcntl.LOCK_SH) and os.fstat(held).st_nlink:
        return held
    os.close(held)
    raise _wrong(f"{folder} is being removed", "a staged folder that stays during the run")


def enter() -> StagedPaths:
    """Read what was staged, and work with it from now on; see :func:`read` and :func:`activate`.

    Raises:
        ConfigError: nothing usable was staged on this node.
    """
    staged = read(os.environ)
    activate(staged)
    return staged


def activate(staged: StagedPaths) -> str:
    """Let this process, and what it starts, work with what is here: working directory, modules,
    variables.

    Returns:
        The working directory that the step was to have.

    Raises:
        ConfigError: its copy is not there.
    """
    before = ""
    # It has been deleted, which is said when the script is looked for.
    with contextlib.suppress(FileNotFoundError):
        before = os.getcwd()
    intended = staged.intended_cwd(os.environ, before)
    folder = staged.here(intended)
    if folder != before:
        with _reading():
            os.chdir(folder)
        # chdir() leaves it as it is, and a shell that the script starts believes it.
        os.environ["PWD"] = folder
    # Before the variables change: Python has read PYTHONPATH as it is up to here.
    sys.path[:] = staged.search_path(sys.path, os.environ, before, folder)
    os.environ.update(staged.variables(os.environ))
    return intended


def refuse_inside_copy(staged: StagedPaths, folder: str, file: Path, option: str) -> Path:
    """Resolve where a rank writes by an option; not to a copy, for copies are removed.

    Args:
        staged: what was brought to this node.
        folder: the working directory.
        file: what the option names.
        option: its name, for the message.

    Raises:
        ConfigError: it would be in a place that this node does not see.
    """
    path = os.path.normpath(os.path.join(folder, file))
    if staged.here(path) != path:
        raise ConfigError(
            f"{option} leads to {path}, which this node has as a copy alone",
            expected="a folder that all nodes see, or one of each node's own",
            hint=f"name another with {option}",
            scope=Scope.NODE,
        )
    return Path(path)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _wrong(
            f"{error.filename} cannot be read: {error.strerror}",
            "what `srunddp stage push` left on this node",
        ) from None


def _wrong(found: str, expected: str) -> ConfigError:
    hint = "run `srunddp stage push` again, and start the ranks by the path that it prints"
    return ConfigError(found, expected=expected, hint=hint, scope=Scope.NODE)
