"""What runs on each node of a job while its folders are staged, and until the job ends.

It comes over srun's standard input, as the node may see nothing of srunddp: besides the standard library only what
:mod:`srunddp.site.staging.step` sends is there. Requests are lines of JSON, the same for all nodes; answers are lines
below 1 KiB, since srun cuts longer ones in pieces and mixes them with those of other nodes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterable
from typing import Any

from srunddp.errors import ConfigError, SrunddpError
from srunddp.site.staging.removal import LOCK, UNPACKED, left, lock, remove, remove_if_over, touch
from srunddp.site.staging.unpack import unpack

PLACES, LAUNCHER = "places.json", "srunddp"
_KEEPER = "keeper"
_RECENT = 600.0  # seconds: what was written within them may be written still
_WAIT = 10.0
_LONGEST = 230

NODE = os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class _Ended(BaseException):
    """The job ends, with SIGTERM, or the push that staged has failed."""


def main() -> None:
    """Answer requests until there are no more; then keep the folder until the job ends, unless another push does."""
    signal.signal(signal.SIGTERM, _end)
    node: _Node | None = None
    try:
        for line in sys.stdin.buffer:
            request = json.loads(line)
            node = node or _Node(request["folder"], request["store"])
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
    except SrunddpError as error:
        return {"error": [text[:_LONGEST] for text in (error.found, error.expected, error.cure)]}
    except OSError as error:
        return {"error": [str(error)[:_LONGEST], "", ""]}
    return answer


class _Node:
    """The job's folder on this node.

    Args:
        folder: of the job; store: where copies are unpacked, the same folder or one that outlives the job.
    """

    def __init__(self, folder: str, store: str) -> None:
        self._folder, self._store = folder, store
        self._keeper = -1

    def look(self, request: dict[str, Any]) -> dict[str, Any]:
        """Which of these places the node sees as they are where they are packed."""
        for folder in (self._folder, self._store):
            _own(folder)
        if request["alive"] is not None:
            for folder in left(self._folder):
                remove_if_over(folder, request["alive"])
        os.close(touch(os.path.join(self._folder, LOCK)))
        self._take_keeper()
        sees = [mark(place["path"]) == place["mark"] for place in request["places"]]
        return {"sees": sees, "python": os.access(request["python"], os.X_OK)}

    def has(self, request: dict[str, Any]) -> dict[str, Any]:
        """Which of these copies are here already, from an earlier push."""
        copies = [os.path.join(self._store, name) for name in request["names"]]
        return {"has": [os.path.isdir(copy) and os.path.exists(copy + UNPACKED) for copy in copies]}

    def room(self, _: dict[str, Any]) -> dict[str, Any]:
        """The bytes that are free for copies."""
        found = os.statvfs(self._store)
        return {"free": found.f_bavail * found.f_frsize}

    def unpack(self, request: dict[str, Any]) -> dict[str, Any]:
        """Unpack what was sent, if it was sent to this node."""
        archive = os.path.join(self._folder, request["name"] + ".tar")
        folder = os.path.join(self._store, request["name"])
        if not os.path.lexists(archive):
            return {"seconds": None}
        began = time.monotonic()
        try:
            if not os.path.isdir(folder):
                unpack(archive, folder, **request["packed"])
                os.close(touch(folder + UNPACKED))
        finally:
            os.unlink(archive)
        return {"seconds": time.monotonic() - began}

    def finish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Say where everything is on this node, to the ranks that are to start."""
        places = [
            {"role": place["role"], "path": place["path"], "here": self._here(place)} for place in request["places"]
        ]
        _write(os.path.join(self._folder, PLACES), json.dumps({"places": places, "cwd": request["cwd"]}), 0o600)
        _write(os.path.join(self._folder, LAUNCHER), self._launcher(places, request), 0o700)
        return {}

    def _here(self, place: dict[str, Any]) -> str:
        return os.path.join(self._store, place["name"]) if NODE in place["nodes"] else str(place["path"])

    def _launcher(self, places: list[dict[str, Any]], request: dict[str, Any]) -> str:
        python, program = (_moved(request[name], places) for name in ("python", "srunddp"))
        lines = ["#!/bin/sh", f"export SRUNDDP_STAGED={_quoted(self._folder)}"]
        for place in places:
            if place["role"] == "env":
                lines.append(f"export {request['variable']}={_quoted(place['here'])}")
                lines.append(f'PATH={_quoted(place["here"] + "/bin")}:"$PATH"')
        return "\n".join([*lines, f'exec {_quoted(python)} {_quoted(program)} "$@"', ""])

    def clean(self, _: dict[str, Any]) -> dict[str, Any]:
        """Remove the job's folder, but for what was written in its copies, and see the end of the one that keeps it."""
        if not os.path.isdir(self._folder):
            return {"kept": 0}
        keeper = touch(os.path.join(self._folder, _KEEPER))
        kept = remove(self._folder, _WAIT)
        lock(keeper, _WAIT)
        return {"kept": kept}

    def _take_keeper(self) -> None:
        """An earlier push of this job may keep the folder already."""
        descriptor = touch(os.path.join(self._folder, _KEEPER))
        if lock(descriptor, 0.0):
            self._keeper = descriptor
        else:
            os.close(descriptor)

    def keep(self) -> None:
        """Wait for a `stage clean`, or for SIGTERM: steps get it at the end of a job, before all is killed."""
        while self._keeps():
            time.sleep(0.2)

    def leave(self) -> None:
        """Remove the folder once no rank uses it, unless another push keeps it."""
        if self._keeps():
            remove(self._folder, wait=math.inf)

    def _keeps(self) -> bool:
        return self._keeper >= 0 and os.path.exists(os.path.join(self._folder, _KEEPER))


def _own(folder: str) -> None:
    """Make a folder that is ours alone.

    Raises:
        ConfigError: somebody else has made one of that name.
    """
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                f"{folder} is there, of user {found.st_uid} and mode {stat.filemode(found.st_mode)}",
                expected="none, or a folder of our own",
                cure="remove it, or name another folder with --dir",
            ) from None


def _write(path: str, text: str, mode: int) -> None:
    with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode), "w") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
    os.replace(path + ".new", path)


def _moved(path: str, places: Iterable[dict[str, Any]]) -> str:
    for place in places:
        if path.startswith(place["path"] + "/"):
            return str(place["here"]) + path[len(place["path"]) :]
    return path


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def mark(path: str) -> str:
    """Equal on two nodes that see the same folder: its entries, with the sizes of files that nobody is writing now."""
    try:
        with os.scandir(path) as entries:
            lines = sorted(map(_line, entries))
    except OSError:
        return ""
    return hashlib.sha256("\0".join(lines).encode(errors="surrogateescape")).hexdigest()


def _line(entry: os.DirEntry[str]) -> str:
    found = entry.stat(follow_symlinks=False)
    still = stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > _RECENT
    return f"{entry.name} {found.st_size if still else ''}"
