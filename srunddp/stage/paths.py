"""Maps shared paths to the copies on this node that `srunddp stage push` has made, and makes a run
work in them.

A node that sees a shared path uses it. The copy is used only for a path that the node does not see.
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
# Variables that may name a staged path: the first kind holds several paths separated by colons, the
# second kind one path.
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
# The directory that slurmstepd enters if it cannot enter the step's working directory.
_LEFT_BY_THE_LAUNCHER = "/tmp"


@dataclass(frozen=True)
class PathMapping:
    """A staged file or folder, and where it is on this node.

    Attributes:
        role: ``env``, ``project`` or ``data``.
        path: the shared path, which the push named.
        here: the path on this node: ``path`` itself if the node sees it, else its copy.
    """

    role: str
    path: str
    here: str


@dataclass(frozen=True)
class StagedPaths:
    """Everything that was staged for a job, as it is on one node.

    Attributes:
        folder: the job's folder on this node, which has the copies.
        places: every staged path and where it is here.
        cwd: the working directory of the push, for ranks that start in ``/`` or whose own directory
            Slurm could not enter.
    """

    folder: str
    places: tuple[PathMapping, ...]
    cwd: str = ""

    @classmethod
    def load(cls, folder: str) -> StagedPaths:
        """Read the places from the file in a job's folder.

        Raises:
            ValueError, TypeError, KeyError: the file has the wrong content.
            OSError: the file cannot be read.
        """
        written = json.loads(Path(folder, PLACES).read_bytes())
        return cls(folder, tuple(PathMapping(**each) for each in written["places"]), written["cwd"])

    def here(self, path: str) -> str:
        """Return where an absolute path is on this node. A relative path, a path outside the staged
        ones and a path that this node sees are returned unchanged.
        """
        if not path.startswith("/"):
            return path
        # normpath() keeps two slashes at the beginning, because POSIX lets the system decide what
        # they mean.
        whole = os.path.normpath("/" + path.lstrip("/"))
        # The slash behind both keeps /data from matching /database.
        above = [place for place in self.places if f"{whole}/".startswith(f"{place.path}/")]
        place = max(above, key=lambda place: len(place.path), default=None)
        if place is None or place.here == place.path:
            return path
        slash = "/" if path.endswith("/") else ""
        return place.here + whole.removeprefix(place.path) + slash

    def shared(self, path: str) -> str:
        """Return the shared path of which an absolute path on this node is a copy; the path itself
        if it is in no copy.
        """
        for place in self.places:
            if place.here != place.path and f"{path}/".startswith(f"{place.here}/"):
                return place.path + path.removeprefix(place.here)
        return path

    def argument(self, word: str) -> str:
        """Replace a script's argument that is a staged path, or that has one after its first
        ``=``.
        """
        name, equals, value = word.partition("=")
        if word.startswith("/"):
            return self.here(word)
        return name + equals + self.here(value)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the new values of the variables that name a path with a copy here. The default
        cache folders count as named, even if their variables are not set.
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
        """Return the working directory that the step should have had.

        Args:
            environ: the rank's variables. srun leaves its own working directory in ``PWD``, but a
                shell may have replaced it since.
            folder: the working directory of this process. It is right unless it is ``/``, ``/tmp``
                or the home directory, where a launcher may leave a process.
        """
        if folder == "/":
            return self.cwd or folder
        if self.here(folder) == folder and folder in (_LEFT_BY_THE_LAUNCHER, environ.get("HOME")):
            # A shell before this process may have set PWD to the directory that it is in. Then the
            # push's directory is the best guess.
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
        """Return the folders for ``sys.path``, with copies in place of shared paths.

        Args:
            entries: the folders of sys.path so far.
            environ: the variables from which Python made ``entries``.
            before: the working directory at Python's start, to which entries of PYTHONPATH may be
                relative.
            now: the present working directory.
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
        """The note that rank 0 prints if its node has only a copy of the project; else empty."""
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
    """Lock a file with flock().

    Args:
        descriptor: the descriptor of the open file.
        wait: how many seconds to try; 0 for a single attempt.
        kind: ``fcntl.LOCK_EX`` for an exclusive lock, ``fcntl.LOCK_SH`` for a shared one.

    Returns:
        Whether the lock is held now.
    """
    end = time.monotonic() + wait
    while True:
        try:
            # flock() has no time limit, so try without waiting, again and again.
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.1)


def read(environ: Mapping[str, str]) -> StagedPaths:
    """Read what was staged, from the folder that ``SRUNDDP_STAGED`` names.

    Raises:
        ConfigError: the variable is not set; or the folder or its file is missing or broken,
            belongs to another user, or may be changed by another user.
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
    """Check that only this user can have put files into the folder.

    Raises:
        ConfigError: the folder is a link, belongs to another user, or may be changed by others.
        OSError: the folder does not exist.
    """
    # lstat() does not follow a link, which any user can make in /tmp.
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise _wrong(f"{folder} is not a folder", "the one that `srunddp stage push` made")
    if status.st_uid != os.geteuid():
        raise _wrong(f"{folder} belongs to user id {status.st_uid}", "a folder of yours")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _wrong(
            f"{folder} may be changed by others", "a folder that only its owner may change"
        )


def lock(folder: str) -> int:
    """Prevent the removal of a folder while this process, or one that it starts, is alive.

    Returns:
        The descriptor that holds the lock. Processes inherit it. It is above 2 even if standard
        output is closed.

    Raises:
        ConfigError: the folder is already being removed.
    """
    with _reading(), open(os.path.join(folder, LOCK), "rb") as file:
        # A lock of flock() belongs to the open file. All processes forked from here share that
        # file, so the lock lasts until the last of them ends. F_DUPFD leaves close-on-exec off, so
        # the descriptor survives an exec as well.
        held = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, 3)
    # The folder may have been removed between open() and flock(); then the file has no name left.
    if lock_file(held, kind=fcntl.LOCK_SH) and os.fstat(held).st_nlink:
        return held
    os.close(held)
    raise _wrong(f"{folder} is being removed", "a staged folder that stays during the run")


def enter() -> StagedPaths:
    """Read what was staged and use it from now on; see :func:`read` and :func:`activate`.

    Raises:
        ConfigError: this node has nothing usable from a push.
    """
    staged = read(os.environ)
    activate(staged)
    return staged


def activate(staged: StagedPaths) -> str:
    """Make this process, and what it starts, use the copies: for the working directory, for
    Python's modules and for variables.

    Returns:
        The shared path of the working directory that the step should have had.

    Raises:
        ConfigError: the copy of that directory is missing.
    """
    before = ""
    # Ignore that the working directory was deleted: the search for the script reports it.
    with contextlib.suppress(FileNotFoundError):
        before = os.getcwd()
    intended = staged.intended_cwd(os.environ, before)
    folder = staged.here(intended)
    if folder != before:
        with _reading():
            os.chdir(folder)
        # chdir() does not change PWD, which a shell that the script starts would believe.
        os.environ["PWD"] = folder
    # Before the variables change, because sys.path was made from the old PYTHONPATH.
    sys.path[:] = staged.search_path(sys.path, os.environ, before, folder)
    os.environ.update(staged.variables(os.environ))
    return intended


def refuse_inside_copy(staged: StagedPaths, folder: str, file: Path, option: str) -> Path:
    """Resolve a path that an option names for output. Refuse a path in a copy, because copies are
    removed.

    Args:
        staged: what was staged on this node.
        folder: the working directory.
        file: the path that the option names, absolute or relative to ``folder``.
        option: the option's name, for the message.

    Raises:
        ConfigError: the path is in a folder of which this node has only a copy.
    """
    path = os.path.normpath(os.path.join(folder, file))
    if staged.here(path) != path:
        raise ConfigError(
            f"{option} leads to {path}, of which this node has only a copy",
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
