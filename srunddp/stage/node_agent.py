"""The agent that runs on each node of a job while folders are staged, and then until the job ends.

Its source comes over srun's standard input, because the node may not see srunddp. Besides the
standard library, it has only the modules that :mod:`srunddp.stage.slurm` sends. Requests and
answers are those of :mod:`srunddp.stage.messages`, and all nodes get the same requests. An answer
is one line below 1 KiB, because srun splits longer lines and mixes the pieces of different nodes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shlex
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from srunddp.errors import ConfigError, SrunddpError
from srunddp.stage.archive import unpack
from srunddp.stage.messages import (
    Answer,
    CannotDo,
    Clean,
    Cleaned,
    CopyLookedFor,
    Finish,
    Leave,
    Look,
    Looked,
    LookForCopy,
    StagedPlace,
    StageMessage,
    Unpack,
    Unpacked,
)
from srunddp.stage.paths import LOCK, PLACES, PathMapping, StagedPaths, lock_file
from srunddp.util.atomic_file import replace_file
from srunddp.util.filesystem import mark, same

# Three files in the job's folder exist only to be locked. A push locks `push`, so that only one
# push stages at a time. A push, and all ranks that work in the copies, hold a shared lock of
# `lock`; a process that removes the copies holds an exclusive one. The one task that removes the
# folder at the job's end locks `keeper`.
_PUSH = "push"
_KEEPER = "keeper"
# The file COPY.unpacked is made when the copy COPY is complete, so its time tells which files in
# the copy were written later.
_UNPACKED = ".unpacked"
_WAIT = 10.0  # seconds to wait for ranks, or for another push, to release a folder
_OLD = 600.0  # seconds; an older folder without a keeper is left over from a job that was killed
_LONGEST = 250  # characters of each text of an error: the line has to stay below 1 KiB
# Signals by which Slurm warns all job steps before the job ends, or which come from a terminal.
# They are meant for the ranks, so the agent ignores them.
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

NODE = os.environ.get("SLURMD_NODENAME") or socket.gethostname()


# _Ended is a BaseException, so that no function below `main` takes it for an error and goes on.
class _Ended(BaseException):
    """Ends the agent, because the job ends (SIGTERM) or the push has failed (:class:`Leave`)."""


def main(folder: str) -> None:
    """Answer requests until standard input ends. Then keep the job's folder until the job ends,
    unless the task of an earlier push keeps it.

    Args:
        folder: The path of the job's folder, which may not exist yet.
    """
    # Other users can enter the folder above the copies, such as /tmp, but must not read the copies.
    os.umask(0o077)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    node = _Node(folder)
    try:
        for line in sys.stdin.buffer:
            sys.stdout.buffer.write(_answer(node, StageMessage.decode(line)).encode())
            sys.stdout.buffer.flush()
        node.keep()
    except _Ended:
        # A second SIGTERM must not interrupt the removal.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        node.remove_at_end()


def _end(number: int, frame: object) -> None:
    raise _Ended


def _answer(node: _Node, request: StageMessage | None) -> Answer:
    try:
        match request:
            case Look():
                return node.look(request)
            case LookForCopy():
                return node.look_for_copy(request)
            case Unpack():
                return node.unpack(request)
            case Finish():
                return node.finish(request)
            case Clean():
                return node.clean()
            case Leave():
                raise _Ended
        raise ConfigError(
            "a line that is no request", expected="a request of srunddp stage", hint="stage again"
        )
    except SrunddpError as error:
        return _cannot_do(error.found, error.expected, error.hint)
    except OSError as error:
        return _cannot_do(str(error), "", "")


def _cannot_do(*texts: str) -> CannotDo:
    short = [text.encode("ascii", "backslashreplace").decode()[:_LONGEST] for text in texts]
    return CannotDo(NODE, *short)


class _Node:
    """The job's folder on this node. Each request that has an answer has a method here."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._keeper = -1
        self._held: list[int] = []

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def look(self, request: Look) -> Looked:
        """Make and lock the job's folder, remove the folders that earlier jobs have left, and
        answer which of the requested folders this node sees.
        """
        _make_own(self._folder)
        self._hold()
        _remove_others(self._folder)
        seen = [same(mark(place.path), place.mark) for place in request.places]
        sees = "".join("1" if each else "0" for each in seen)
        return Looked(NODE, sees=sees, python=os.access(request.python, os.X_OK))

    def _hold(self) -> None:
        """Lock three files in the job's folder: ``push``, which only one push of this job may lock
        at a time, ``lock``, which keeps the folder from being removed, and ``keeper``, unless the
        task of an earlier push has locked it.

        Raises:
            ConfigError: Another push of this job is at work, or the folder is being removed.
        """
        held = _touch(self._path(_PUSH))
        if not lock_file(held):
            os.close(held)
            raise ConfigError(
                f"another push of this job uses {self._folder}",
                expected="one",
                hint="wait for its end",
            )
        used = _touch(self._path(LOCK))
        self._held = [held, used]
        if not lock_file(used, _WAIT, fcntl.LOCK_SH):
            raise ConfigError(
                f"{self._folder} is being removed", expected="one that stays", hint="try it again"
            )
        keeper = _touch(self._path(_KEEPER))
        if lock_file(keeper):
            self._keeper = keeper
        else:
            os.close(keeper)

    def look_for_copy(self, request: LookForCopy) -> CopyLookedFor:
        """Answer whether this node has the copy from an earlier push, and how many bytes are
        free.
        """
        # Unpacking ends with a rename, so a copy with this name is complete.
        found = os.path.exists(self._path(request.name))
        return CopyLookedFor(NODE, found=found, free=shutil.disk_usage(self._folder).free)

    def unpack(self, request: Unpack) -> Unpacked:
        """Unpack the archive, if this node was sent one, and remove the archive."""
        archive = self._path(request.name + ".tar")
        folder = self._path(request.name)
        # Every node gets this request, but only nodes without a copy were sent the archive.
        if not os.path.lexists(archive):
            return Unpacked(NODE, seconds=None)
        began = time.monotonic()
        try:
            unpack(archive, folder, sha256=request.sha256, links=request.links)
            os.close(_touch(folder + _UNPACKED))
        finally:
            os.unlink(archive)
        return Unpacked(NODE, seconds=time.monotonic() - began)

    def finish(self, request: Finish) -> Answer:
        """Write down where each staged folder is on this node, and write the program that srun
        starts for each rank. Then release the locks of `push` and `lock`.
        """
        here = {place.path: self._mapping(place) for place in request.places}
        if os.path.exists(self._path(PLACES)):
            before = StagedPaths.load(self._folder).places
        else:
            before = ()
        # A push names only its own folders. Folders of an earlier push of the job stay known.
        earlier = (each for each in before if each.path not in here)
        staged = StagedPaths(self._folder, (*here.values(), *earlier), request.cwd)
        written = {"places": [vars(place) for place in staged.places], "cwd": request.cwd}
        replace_file(Path(self._path(PLACES)), json.dumps(written).encode())
        launcher = Path(self._path("srunddp.new"))
        replace_file(launcher, _launcher(staged, request.start).encode(errors="surrogateescape"))
        launcher.chmod(0o700)
        # Ranks may be starting the program that an earlier push wrote. So the new program takes
        # its name only once it is executable.
        launcher.rename(self._path("srunddp"))
        self._let_go()
        return Answer(NODE)

    def _mapping(self, place: StagedPlace) -> PathMapping:
        if NODE in place.nodes:
            here = self._path(place.name)
        else:
            here = place.path
        return PathMapping(place.role, place.path, here)

    def clean(self) -> Cleaned:
        """Remove the job's folder, except files that were written in its copies, and wait for the
        keeper to end.
        """
        if not os.path.isdir(self._folder):
            return Cleaned(NODE, kept=None)
        # Open the keeper's file before `_remove` deletes its name. The keeper's lock is on the open
        # file, not on the name.
        keeper = _touch(self._path(_KEEPER))
        kept = _remove(self._folder, _WAIT)
        # The keeper ends when the name of its file is gone, and then this call gets the lock.
        lock_file(keeper, _WAIT)
        return Cleaned(NODE, kept=kept)

    def keep(self) -> None:
        """As the keeper, wait for `stage clean`, or for SIGTERM, which Slurm sends to the job steps
        at the end of a job before it kills them. Other tasks return at once.
        """
        self._let_go()
        while self._keeps():
            time.sleep(0.5)

    def remove_at_end(self) -> None:
        """As the keeper, remove the folder once no rank uses it. Other tasks remove nothing."""
        # `_remove` opens the lock file again. flock() treats that as a different open file, and
        # would wait forever for the shared lock that this process holds.
        self._let_go()
        if self._keeps():
            _remove(self._folder, math.inf)

    def _keeps(self) -> bool:
        # `stage clean` removes the keeper's file, which tells the keeper to end.
        return self._keeper >= 0 and os.path.exists(self._path(_KEEPER))

    def _let_go(self) -> None:
        for descriptor in self._held:
            with contextlib.suppress(OSError):  # SIGTERM may have interrupted an earlier call
                os.close(descriptor)
        self._held = []


def _make_own(folder: str) -> None:
    """Make a folder that only this user can change or replace.

    Raises:
        ConfigError: Other users may rename what is in the folder above, or have access to the
            folder itself.
    """
    above = os.path.dirname(folder)
    base = os.stat(above)
    # In a folder that others may write to, only the sticky bit keeps them from renaming the job's
    # folder.
    if base.st_mode & 0o022 and not base.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"{above} may be changed by others and is not sticky",
            expected="a folder such as /tmp",
            hint="name another with --dir",
        )
    # Make the folder first and check it afterwards: another user could make it between a check and
    # mkdir().
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.geteuid()
        or stat.S_IMODE(found.st_mode) & 0o077
    ):
        raise ConfigError(
            f"{folder} exists, with owner {found.st_uid} and mode {stat.filemode(found.st_mode)}",
            expected="no such folder, or one that only you may use",
            hint="remove it, or name another folder with --dir",
        )


def _touch(path: str) -> int:
    """Open a file for a lock, and return its descriptor. The file is created if it is missing; a
    link is refused.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _launcher(staged: StagedPaths, start: Sequence[str]) -> str:
    """Return the text of the shell script that srun starts for each rank. The script runs srunddp
    of the staged environment. If no environment was staged, it runs ``start``, an interpreter and a
    program.
    """
    env = next((place.here for place in staged.places if place.role == "env"), None)
    lines = ["#!/bin/sh", f"export SRUNDDP_STAGED={shlex.quote(staged.folder)}"]
    words = list(map(staged.here, start))
    if env is not None:
        if os.path.exists(f"{env}/pyvenv.cfg"):
            variable = "VIRTUAL_ENV"
        else:
            variable = "CONDA_PREFIX"
        lines += [
            f"export {variable}={shlex.quote(env)}",
            f'PATH={shlex.quote(env + "/bin")}:"$PATH"',
        ]
        # bin/srunddp alone will not do, because its first line may name the interpreter of the
        # shared environment.
        words = [f"{env}/bin/python", f"{env}/bin/srunddp"]
    return "\n".join([*lines, f'exec {shlex.join(words)} "$@"', ""])


def _remove(folder: str, wait: float) -> int:
    """Remove a job's folder once no rank uses it.

    Args:
        folder: The job's folder.
        wait: How many seconds to wait for the ranks that use it; infinity for no limit.

    Returns:
        How many files stay because they were written in a copy. If there are any, the folder stays
        too.

    Raises:
        ConfigError: Ranks still use the folder.
    """
    held = _touch(os.path.join(folder, LOCK))
    try:
        if not lock_file(held, wait):
            raise ConfigError(
                f"{folder} is in use",
                expected="ranks that have ended",
                hint="end them; else it is removed when the job ends",
            )
        kept = 0
        for entry in list(os.scandir(folder)):
            # A folder whose name begins with a dot is left over from an unpacking that was killed.
            # No rank has ever used it, so none of its files has to be kept.
            if entry.is_dir(follow_symlinks=False) and entry.name[0] != ".":
                kept += _remove_copy(entry.path)
            elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(_UNPACKED):
                # This removes the lock file too. A rank that has opened the lock file before, and
                # locks it afterwards, sees that the file's link count is 0.
                os.unlink(entry)
        if not kept:
            shutil.rmtree(folder)
        return kept
    finally:
        os.close(held)


def _remove_copy(folder: str) -> int:
    """Remove the unpacked files of a copy. Files that were written after the copy was complete
    stay, and the copy's folder gets a new name.

    Returns:
        How many files stay.
    """
    folder, mark = _set_aside(folder)
    # Without the .unpacked file nothing shows which files are newer, so all but bytecode stay.
    whole = os.stat(mark).st_mtime_ns if os.path.exists(mark) else 0
    kept = 0
    for here, folders, files in os.walk(folder, topdown=False):
        # os.walk() lists a link to a folder among the folders, but does not enter it. So remove
        # such a link like a file.
        links = [name for name in folders if os.path.islink(os.path.join(here, name))]
        for name in (*files, *links):
            if not _remove_unless_newer(os.path.join(here, name), whole):
                kept += 1
        with contextlib.suppress(OSError):
            os.rmdir(here)
    if not kept:
        Path(mark).unlink(missing_ok=True)
    return kept


def _set_aside(folder: str) -> tuple[str, str]:
    """Rename a copy and its ``.unpacked`` file, so that no push considers the copy complete. A copy
    that was renamed before keeps its name.

    Returns:
        The present path of the copy, and that of the ``.unpacked`` file, which may be missing.
    """
    if ".kept-" in os.path.basename(folder):
        return folder, folder + _UNPACKED
    number = 1
    while os.path.lexists(f"{folder}.kept-{number}"):
        number += 1
    new = f"{folder}.kept-{number}"
    # Rename the .unpacked file first. If this process is killed before it renames the copy, the
    # next removal gives the copy the name that belongs to the .unpacked file.
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder + _UNPACKED, new + _UNPACKED)
    os.rename(folder, new)
    return new, new + _UNPACKED


def _remove_unless_newer(path: str, whole: int) -> bool:
    """Remove a file of a copy unless it has changed since the copy was complete. Bytecode
    (``.pyc``) is always removed.

    The time of the last status change decides, because programs such as cp -p can set all other
    times.

    Args:
        path: The path of the file.
        whole: When the copy was complete, in nanoseconds since 1970; 0 if that is not known.

    Returns:
        Whether the file was removed.
    """
    with contextlib.suppress(OSError):
        if os.lstat(path).st_ctime_ns <= whole or path.endswith(".pyc"):
            os.unlink(path)
            return True
    return False


def _remove_others(folder: str) -> None:
    """Remove the folders that this user's other jobs have left beside ``folder``, the folder of
    this job. A folder stays if it is younger than ``_OLD`` seconds, or if a keeper or a rank uses
    it.
    """
    own = Path(folder)
    for other in own.parent.glob(f"{own.name.rpartition('-')[0]}-[0-9]*"):
        with contextlib.suppress(OSError, ConfigError):
            found = other.lstat()
            if (
                other != own
                and found.st_uid == os.geteuid()
                and time.time() - found.st_mtime > _OLD
            ):
                keeper = _touch(str(other / _KEEPER))
                try:
                    if lock_file(keeper):
                        _remove(str(other), 0.0)
                finally:
                    os.close(keeper)
