"""Maps shared paths to the copies that `srunddp stage push` has made on this node, and makes a run
use these copies.

A path of which this node has no copy is used as it is. Usually a node has a copy only of what it
does not see; `srunddp stage push --all-nodes` makes copies on nodes that see the folders, too.
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
# Names of two files in a job's folder on a node: PLACES says where each staged folder is, and a
# process that has locked LOCK keeps the job's folder from being removed.
PLACES = "places.json"
LOCK = "lock"
# Variables that may name staged paths: each of _LISTS holds paths separated by colons, each of
# _PATHS holds one path.
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
# The directory that slurmstepd enters if it cannot enter the job step's working directory.
_LEFT_BY_THE_LAUNCHER = "/tmp"


@dataclass(frozen=True)
class PathMapping:
    """A staged folder, and where it is on this node.

    Attributes:
        role: What the folder contains: ``env``, ``project`` or ``data``.
        path: The folder's absolute path on the node that ran ``srunddp stage push``.
        here: The path to use on this node: its copy of the folder, or ``path`` itself if this node
            has no copy.
    """

    role: str
    path: str
    here: str


@dataclass(frozen=True)
class StagedPaths:
    """Everything that was staged for a job, as it is on one node.

    Attributes:
        folder: The job's folder on this node, which contains the copies.
        places: Every staged folder, and where it is on this node.
        cwd: The working directory of ``srunddp stage push``. Ranks work there if they start in
            ``/``, or if Slurm could not enter the working directory of their job step.
    """

    folder: str
    places: tuple[PathMapping, ...]
    cwd: str = ""

    @classmethod
    def load(cls, folder: str) -> StagedPaths:
        """Read what the node's agent has written into a job's folder.

        Args:
            folder: The job's folder on this node.

        Raises:
            ValueError, TypeError, KeyError: The file has the wrong content.
            OSError: The file cannot be read.
        """
        written = json.loads(Path(folder, PLACES).read_bytes())
        return cls(folder, tuple(PathMapping(**each) for each in written["places"]), written["cwd"])

    def here(self, path: str) -> str:
        """Return where an absolute path is on this node. A relative path, and a path of which this
        node has no copy, are returned unchanged.
        """
        if not path.startswith("/"):
            return path
        # normpath() keeps two slashes at the beginning, because POSIX lets the system decide what
        # they mean.
        whole = os.path.normpath("/" + path.lstrip("/"))
        # Both paths end with a slash, so that /data does not match /database.
        above = [place for place in self.places if f"{whole}/".startswith(f"{place.path}/")]
        place = max(above, key=lambda place: len(place.path), default=None)
        if place is None or place.here == place.path:
            return path
        slash = "/" if path.endswith("/") else ""
        return place.here + whole.removeprefix(place.path) + slash

    def shared(self, path: str) -> str:
        """Return the shared path that belongs to an absolute path in a copy on this node. A path
        outside the copies is returned unchanged.
        """
        for place in self.places:
            if place.here != place.path and f"{path}/".startswith(f"{place.here}/"):
                return place.path + path.removeprefix(place.here)
        return path

    def argument(self, word: str) -> str:
        """Return an argument of the script as this node needs it. If the whole argument, or what
        follows its first ``=``, is a path of which this node has a copy, that path is replaced by
        the path of the copy.
        """
        name, equals, value = word.partition("=")
        if word.startswith("/"):
            return self.here(word)
        return name + equals + self.here(value)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return new values for the variables that name a path of which this node has a copy; other
        variables are left out. If ``HF_HOME`` or ``TORCH_HOME`` is not set, it counts as set to the
        default cache folder.
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
        """Return the working directory that the job step should have had.

        Args:
            environ: The rank's variables. srun passes on its own ``PWD``, but a shell on this node
                may have replaced the value since.
            folder: The working directory of this process. It is the result unless it is ``/``,
                ``/tmp`` or the home directory, where a launcher may leave a process.
        """
        if folder == "/":
            return self.cwd or folder
        if self.here(folder) == folder and folder in (_LEFT_BY_THE_LAUNCHER, environ.get("HOME")):
            # A shell between the launcher and this process may have set PWD to the directory in
            # which the launcher left it. Then the working directory of the push is the best guess.
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
            entries: The present entries of ``sys.path``.
            environ: The variables from which Python made ``entries``.
            before: The working directory at Python's start: relative entries of ``PYTHONPATH``
                were resolved there.
            now: The present working directory.
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
        descriptor: The descriptor of the open file.
        wait: How many seconds to try; 0 for a single attempt.
        kind: ``fcntl.LOCK_EX`` for an exclusive lock, ``fcntl.LOCK_SH`` for a shared one.

    Returns:
        Whether the lock is held now.
    """
    end = time.monotonic() + wait
    while True:
        try:
            # flock() cannot wait for a limited time, so try without waiting, again and again.
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.1)


def read(environ: Mapping[str, str]) -> StagedPaths:
    """Read what was staged, from the folder that ``SRUNDDP_STAGED`` names.

    Raises:
        ConfigError: The variable is not set; or the folder is missing, belongs to another user or
            may be changed by other users; or its file is missing or broken.
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
        ConfigError: The folder is a link, belongs to another user, or may be changed by others.
        OSError: The folder does not exist.
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
    """Prevent the removal of a job's folder until this process and all its descendants have ended.

    Args:
        folder: The job's folder on this node.

    Returns:
        The descriptor that holds the lock. Child processes inherit it. It is never 0, 1 or 2, not
        even if one of the standard streams is closed.

    Raises:
        ConfigError: The folder is already being removed.
    """
    with _reading(), open(os.path.join(folder, LOCK), "rb") as file:
        # A lock of flock() belongs to the open file. All processes forked from here share that
        # file, so the lock lasts until the last of them ends. F_DUPFD leaves close-on-exec off, so
        # the descriptor survives an exec as well.
        held = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, 3)
    # The folder may have been removed between open() and flock(). Then the lock is useless, and the
    # file's link count is 0.
    if lock_file(held, kind=fcntl.LOCK_SH) and os.fstat(held).st_nlink:
        return held
    os.close(held)
    raise _wrong(f"{folder} is being removed", "a staged folder that stays during the run")


def enter() -> StagedPaths:
    """Read what was staged and use it from now on; see :func:`read` and :func:`activate`.

    Returns:
        What was staged.

    Raises:
        ConfigError: This node has nothing usable from a push.
    """
    staged = read(os.environ)
    activate(staged)
    return staged


def activate(staged: StagedPaths) -> str:
    """Make this process and its children use the copies: change the working directory, ``sys.path``
    and environment variables.

    Returns:
        The shared path of the working directory that the job step should have had.

    Raises:
        ConfigError: The copy of this working directory cannot be entered.
    """
    before = ""
    # The working directory may have been deleted. The search for the script reports it later.
    with contextlib.suppress(FileNotFoundError):
        before = os.getcwd()
    intended = staged.intended_cwd(os.environ, before)
    folder = staged.here(intended)
    if folder != before:
        with _reading():
            os.chdir(folder)
        # chdir() does not change PWD, which a shell that the script starts would believe.
        os.environ["PWD"] = folder
    # Change sys.path before the variables, because sys.path was made from the present PYTHONPATH.
    sys.path[:] = staged.search_path(sys.path, os.environ, before, folder)
    os.environ.update(staged.variables(os.environ))
    return intended


def refuse_inside_copy(staged: StagedPaths, folder: str, file: Path, option: str) -> Path:
    """Resolve a path that an option names for output. Refuse a path in a copy, because copies are
    removed.

    Args:
        staged: What was staged on this node.
        folder: The working directory.
        file: The path that the option names, absolute or relative to ``folder``.
        option: The option's name, for the message.

    Returns:
        The absolute path.

    Raises:
        ConfigError: The path is in a folder of which this node has only a copy.
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
