"""What runs on each node of a job while its folders are staged, and until the job ends.

It comes over srun's standard input, as the node may see nothing of srunddp: besides the standard
library only what :mod:`srunddp.stage.slurm` sends is there. Requests and answers are those of
:mod:`srunddp.stage.messages`. All nodes get the same request. An answer is a line below 1 KiB,
since srun cuts longer ones in pieces and mixes them with those of other nodes.
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

# Three files in the job's folder are there to be locked. `push`: by the one push that stages at a
# time. `lock`: shared by a push and all ranks that work in the copies, and exclusive for whoever
# removes them. `keeper`: by the one task that removes the folder at the job's end.
_PUSH = "push"
_KEEPER = "keeper"
_UNPACKED = ".unpacked"  # beside a copy that is whole, of the time when it was
_WAIT = 10.0  # seconds for ranks, and for another push, to let go of a folder
_OLD = 600.0  # seconds, after which a folder that nobody keeps is left by a job that was killed
_LONGEST = 250  # letters of each text of an error: the line is to stay below 1 KiB
# Sent to all steps as a warning of the end, or by a terminal: the ranks' own affair.
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

NODE = os.environ.get("SLURMD_NODENAME") or socket.gethostname()


# A BaseException, because the handlers of errors on the way to `main` have to let it pass.
class _Ended(BaseException):
    """The job ends, with SIGTERM, or the push that staged has failed."""


def main(folder: str) -> None:
    """Answer requests until there are no more; then keep the folder until the job ends, unless
    another push does.
    """
    # The copies are in a folder such as /tmp, and nobody else is to read them.
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
        raise ConfigError("this is no request", expected="one of srunddp stage", hint="stage again")
    except SrunddpError as error:
        return _cannot_do(error.found, error.expected, error.hint)
    except OSError as error:
        return _cannot_do(str(error), "", "")


def _cannot_do(*texts: str) -> CannotDo:
    short = [text.encode("ascii", "backslashreplace").decode()[:_LONGEST] for text in texts]
    return CannotDo(NODE, *short)


class _Node:
    """The job's folder on this node; a method for each request that has an answer."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._keeper = -1
        self._held: list[int] = []

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def look(self, request: Look) -> Looked:
        """Make the job's folder, and say which places the node sees as they are where they are
        packed.
        """
        _make_own(self._folder)
        self._hold()
        _remove_others(self._folder)
        seen = [same(mark(place.path), place.mark) for place in request.places]
        sees = "".join("1" if each else "0" for each in seen)
        return Looked(NODE, sees=sees, python=os.access(request.python, os.X_OK))

    def _hold(self) -> None:
        """Be the one push in this job, and the one that keeps the folder, if no earlier push of
        this job does.
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
        """Say whether this copy is here already, from an earlier push."""
        # Unpacking ends with a rename: a copy that has its name is whole.
        found = os.path.exists(self._path(request.name))
        return CopyLookedFor(NODE, found=found, free=shutil.disk_usage(self._folder).free)

    def unpack(self, request: Unpack) -> Unpacked:
        """Unpack what was sent, if it was sent to this node."""
        archive = self._path(request.name + ".tar")
        folder = self._path(request.name)
        # Every node gets the request, and only those without a copy were sent the archive.
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
        """Write down where everything is on this node."""
        here = {place.path: self._mapping(place) for place in request.places}
        if os.path.exists(self._path(PLACES)):
            before = StagedPaths.load(self._folder).places
        else:
            before = ()
        # A push names only its own folders; what an earlier one of the job has staged stays known.
        earlier = (each for each in before if each.path not in here)
        staged = StagedPaths(self._folder, (*here.values(), *earlier), request.cwd)
        written = {"places": [vars(place) for place in staged.places], "cwd": request.cwd}
        replace_file(Path(self._path(PLACES)), json.dumps(written).encode())
        launcher = Path(self._path("srunddp.new"))
        replace_file(launcher, _launcher(staged, request.start).encode(errors="surrogateescape"))
        launcher.chmod(0o700)
        # Ranks may meanwhile start by that of an earlier push: this one takes the name only once it
        # can be executed.
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
        """Remove the job's folder, but for what was written in its copies, and see the end of the
        one that keeps it.
        """
        if not os.path.isdir(self._folder):
            return Cleaned(NODE, kept=None)
        # Opened before its name is removed: the lock is still on the open file.
        keeper = _touch(self._path(_KEEPER))
        kept = _remove(self._folder, _WAIT)
        # It is free once the keeper has ended.
        lock_file(keeper, _WAIT)
        return Cleaned(NODE, kept=kept)

    def keep(self) -> None:
        """Wait for a `stage clean`, or for SIGTERM: steps get it at the end of a job, before all is
        killed.
        """
        self._let_go()
        while self._keeps():
            time.sleep(0.5)

    def remove_at_end(self) -> None:
        """Remove the folder once no rank uses it, unless another push keeps it."""
        # `_remove` opens the lock anew, which is another open file to flock(): it would wait for
        # the shared lock of this process for ever.
        self._let_go()
        if self._keeps():
            _remove(self._folder, math.inf)

    def _keeps(self) -> bool:
        # `stage clean` removes the name, and so tells the keeper to end.
        return self._keeper >= 0 and os.path.exists(self._path(_KEEPER))

    def _let_go(self) -> None:
        for descriptor in self._held:
            with contextlib.suppress(OSError):  # SIGTERM may have come in the middle of this
                os.close(descriptor)
        self._held = []


def _make_own(folder: str) -> None:
    """Make a folder that is this user's alone; nobody else may have made it, or be able to put
    another in its place.
    """
    above = os.path.dirname(folder)
    base = os.stat(above)
    # In a folder that others may write to, only the sticky bit keeps them from renaming ours.
    if base.st_mode & 0o022 and not base.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"{above} may be changed by others and is not sticky",
            expected="a folder such as /tmp",
            hint="name another with --dir",
        )
    # Made first and looked at afterwards: after a look, somebody else could still make it.
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.geteuid()
        or stat.S_IMODE(found.st_mode) & 0o077
    ):
        raise ConfigError(
            f"{folder} is there, of user {found.st_uid} and mode {stat.filemode(found.st_mode)}",
            expected="none, or a folder of our own",
            hint="remove it, or name another folder with --dir",
        )


def _touch(path: str) -> int:
    """Open a file of our own, which is made if it is not there."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _launcher(staged: StagedPaths, start: Sequence[str]) -> str:
    """Write a shell script that becomes srunddp: that of the staged environment, or else ``start``,
    which is interpreter and program.
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
        # Not bin/srunddp alone, whose first line may name the interpreter of the shared
        # environment.
        words = [f"{env}/bin/python", f"{env}/bin/srunddp"]
    return "\n".join([*lines, f'exec {shlex.join(words)} "$@"', ""])


def _remove(folder: str, wait: float) -> int:
    """Remove a job's folder once no rank uses it.

    Args:
        folder: to remove.
        wait: seconds for the ranks in it to end.

    Returns:
        How many files stay, because they were written in a copy; then the folder stays, too.

    Raises:
        ConfigError: ranks still use it.
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
            # A copy whose unpacking was killed has a dot before its name: nobody has seen it.
            if entry.is_dir(follow_symlinks=False) and entry.name[0] != ".":
                kept += _remove_copy(entry.path)
            elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(_UNPACKED):
                # The lock, too. A rank that opened it before and locks it afterwards sees by its
                # count of links that it has no name any more.
                os.unlink(entry)
        if not kept:
            shutil.rmtree(folder)
        return kept
    finally:
        os.close(held)


def _remove_copy(folder: str) -> int:
    """Remove what was unpacked, but for files that are newer than the copy, which stay in a folder
    of another name.

    Returns:
        How many files stay.
    """
    folder, mark = _set_aside(folder)
    # Without the mark nothing tells which files are newer, and all stay.
    whole = os.stat(mark).st_mtime_ns if os.path.exists(mark) else 0
    kept = 0
    for here, folders, files in os.walk(folder, topdown=False):
        # os.walk() lists links to folders with the folders, and does not enter them.
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
    """Rename a copy and its mark, so that nobody takes it for whole; return their new names."""
    if ".kept-" in os.path.basename(folder):
        return folder, folder + _UNPACKED
    number = 1
    while os.path.lexists(f"{folder}.kept-{number}"):
        number += 1
    new = f"{folder}.kept-{number}"
    # The mark first: after a kill between the two, the next removal finds it under the new name.
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder + _UNPACKED, new + _UNPACKED)
    os.rename(folder, new)
    return new, new + _UNPACKED


def _remove_unless_newer(path: str, whole: int) -> bool:
    """Remove a file that has not been written since its copy was whole.

    Programs such as cp -p can set any time of a file but that of its last change of status.

    Args:
        path: The file.
        whole: When the copy was whole, in nanoseconds since 1970.

    Returns:
        Whether it was removed.
    """
    with contextlib.suppress(OSError):
        if os.lstat(path).st_ctime_ns <= whole or path.endswith(".pyc"):
            os.unlink(path)
            return True
    return False


def _remove_others(folder: str) -> None:
    """Remove what this user's earlier jobs have left beside a folder, unless a task keeps it or a
    rank is in it.
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
