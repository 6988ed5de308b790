"""What runs on each node of a job while its folders are staged, and until the job ends.

It comes over srun's standard input, as the node may see nothing of srunddp: besides the standard library only what
:mod:`srunddp.stage.slurm` sends is there. Requests are lines of JSON, the same for all nodes; answers are lines
below 1 KiB, since srun cuts longer ones in pieces and mixes them with those of other nodes.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srunddp.errors import ConfigError, SrunddpError
from srunddp.stage.archive import unpack
from srunddp.stage.paths import PathMapping, StagedPaths
from srunddp.stage.removal import KEEPER, LOCK, SPOILT, UNPACKED, lock, remove, remove_others, touch
from srunddp.util.atomic_file import replace_file
from srunddp.util.filesystem import mark, same

PLACES = "places.json"
_PUSH = "push"
_WAIT = 10.0
_LONGEST = 250
# Sent to all steps as a warning of the end, or by a terminal: the ranks' own affair.
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

NODE = os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class _Ended(BaseException):
    """The job ends, with SIGTERM, or the push that staged has failed."""


def main() -> None:
    """Answer requests until there are no more; then keep the folder until the job ends, unless another push does."""
    os.umask(0o077)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    node: _Node | None = None
    try:
        for line in sys.stdin.buffer:
            request = json.loads(line)
            node = node or _Node(request["folder"])
            if request["do"] == "leave":
                raise _Ended
            print(json.dumps({"node": NODE, **_answer(node, request)}), flush=True)
        if node:
            node.keep()
    except _Ended:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if node:
            node.leave()


def _end(number: int, frame: object) -> None:
    raise _Ended


def _answer(node: _Node, request: dict[str, Any]) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = getattr(node, request["do"])(request)
        return answer
    except SrunddpError as error:
        texts = [error.found, error.expected, error.hint]
    except OSError as error:
        texts = [str(error), "", ""]
    return {"error": [text.encode("ascii", "backslashreplace").decode()[:_LONGEST] for text in texts]}


class _Node:
    """The job's folder on this node."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._keeper = -1
        self._held: list[int] = []

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def look(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the job's folder, and say which of these places the node sees as they are where they are packed."""
        _make_own(self._folder)
        self._hold()
        if request["alive"] is not None:
            remove_others(self._folder, request["alive"])
        sees = [same(mark(place["path"]), place["mark"]) for place in request["places"]]
        return {"sees": "".join("01"[each] for each in sees), "python": os.access(request["python"], os.X_OK)}

    def _hold(self) -> None:
        """Be the one push in this job, and the one that keeps the folder, if no earlier push of this job does."""
        held = touch(self._path(_PUSH))
        if not lock(held, 0.0):
            os.close(held)
            raise ConfigError(f"another push of this job uses {self._folder}", expected="one", hint="wait for its end")
        used = touch(self._path(LOCK))
        self._held = [held, used]
        if not lock(used, _WAIT, fcntl.LOCK_SH):
            raise ConfigError(f"{self._folder} is being removed", expected="one that stays", hint="try it again")
        keeper = touch(self._path(KEEPER))
        if lock(keeper, 0.0):
            self._keeper = keeper
        else:
            os.close(keeper)

    def has(self, request: dict[str, Any]) -> dict[str, Any]:
        """Which of these copies are here already, from an earlier push; and the bytes that are free for more."""
        has = "".join("01"[os.path.exists(self._path(name) + UNPACKED)] for name in request["names"])
        return {"has": has, "free": shutil.disk_usage(self._folder).free}

    def unpack(self, request: dict[str, Any]) -> dict[str, Any]:
        """Unpack what was sent, if it was sent to this node."""
        archive, folder = self._path(request["name"] + ".tar"), self._path(request["name"])
        if not os.path.lexists(archive):
            return {"seconds": None}
        began = time.monotonic()
        try:
            _set_aside(folder)
            unpack(archive, folder, sha256=request["sha256"], links=request["links"])
            os.close(touch(folder + UNPACKED))
        finally:
            os.unlink(archive)
        return {"seconds": time.monotonic() - began}

    def finish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Say where everything is on this node, to the ranks that are to start."""
        file, new = Path(self._path(PLACES)), Path(self._path("srunddp.new"))
        before = json.loads(file.read_bytes())["places"] if file.exists() else []
        named = {place["path"] for place in request["places"]}
        places = [self._place(place) for place in request["places"]]
        places += [place for place in before if place["path"] not in named]
        replace_file(file, json.dumps({"places": places, "cwd": request["cwd"]}).encode())
        replace_file(new, _launcher(self._folder, places, request).encode(errors="surrogateescape"))
        new.chmod(0o700)
        new.rename(self._path("srunddp"))
        self._let_go()
        return {}

    def _place(self, place: dict[str, Any]) -> dict[str, str]:
        here = self._path(place["name"]) if NODE in place["nodes"] else place["path"]
        return {"role": place["role"], "path": place["path"], "here": here}

    def clean(self, _: dict[str, Any]) -> dict[str, Any]:
        """Remove the job's folder, but for what was written in its copies, and see the end of the one that keeps it."""
        if not os.path.isdir(self._folder):
            return {"kept": None}
        keeper = touch(self._path(KEEPER))
        kept = remove(self._folder, _WAIT)
        lock(keeper, _WAIT)
        return {"kept": kept}

    def keep(self) -> None:
        """Wait for a `stage clean`, or for SIGTERM: steps get it at the end of a job, before all is killed."""
        self._let_go()
        while self._keeps():
            time.sleep(0.5)

    def leave(self) -> None:
        """Remove the folder once no rank uses it, unless another push keeps it."""
        self._let_go()
        if self._keeps():
            remove(self._folder, wait=math.inf)

    def _keeps(self) -> bool:
        return self._keeper >= 0 and os.path.exists(self._path(KEEPER))

    def _let_go(self) -> None:
        for descriptor in self._held:
            with contextlib.suppress(OSError):  # SIGTERM may have come in the middle of this
                os.close(descriptor)
        self._held = []


def _make_own(folder: str) -> None:
    """Make a folder that is this user's alone.

    Raises:
        ConfigError: somebody else has made one of that name, or could put another in its place.
    """
    above = os.path.dirname(folder)
    base = os.stat(above)
    if base.st_mode & 0o022 and not base.st_mode & stat.S_ISVTX:
        wrong = f"{above} may be changed by others and is not sticky"
        raise ConfigError(wrong, expected="a folder such as /tmp", hint="name another with --dir")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        wrong = f"{folder} is there, of user {found.st_uid} and mode {stat.filemode(found.st_mode)}"
        hint = "remove it, or name another folder with --dir"
        raise ConfigError(wrong, expected="none, or a folder of our own", hint=hint)


def _set_aside(folder: str) -> None:
    """What was written in a copy by an earlier start of this job stays, under another name."""
    new = next(name for number in itertools.count(1) if not os.path.lexists(name := f"{folder}.kept-{number}"))
    for end in ("", SPOILT):
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder + end, new + end)


def _launcher(folder: str, places: list[dict[str, str]], start: Mapping[str, Any]) -> str:
    """A shell script that becomes srunddp.

    Args:
        folder: the job's; start: the interpreter ``python`` and the program ``srunddp`` where nothing is a copy.
    """
    env = next((place["here"] for place in places if place["role"] == "env"), None)
    lines = ["#!/bin/sh", f"export SRUNDDP_STAGED={shlex.quote(folder)}"]
    if env is None:
        staged = StagedPaths(folder, tuple(PathMapping(**place) for place in places))
        words = [staged.here(start[name]) for name in ("python", "srunddp")]
    else:
        variable = "VIRTUAL_ENV" if os.path.exists(f"{env}/pyvenv.cfg") else "CONDA_PREFIX"
        lines += [f"export {variable}={shlex.quote(env)}", f'PATH={shlex.quote(env + "/bin")}:"$PATH"']
        words = [f"{env}/bin/python", f"{env}/bin/srunddp"]
    return "\n".join([*lines, f'exec {shlex.join(words)} "$@"', ""])
