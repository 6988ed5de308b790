"""Brings folders to the nodes of a job that do not see them, once a node, says where they are, and removes them."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from srunddp.stage.items import Item, absolute, require_whole
from srunddp.stage.pack import ArchiveInfo, fingerprint, pack
from srunddp.stage.remote_step import RemoteStep
from srunddp.stage.slurm import Job, StagingError, alive, send
from srunddp.util.hostlist import fold

Say = Callable[[str], None]
Answers = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _Copy:
    """One item, and where copies of it are.

    Attributes:
        name: of a copy in a node's folder; empty where no node takes one.
        nodes: that take a copy; lacking: those of them that have none yet.
    """

    item: Item
    name: str
    nodes: tuple[str, ...]
    lacking: tuple[str, ...] = ()


def push(job: Job, items: Sequence[Item], program: str, timeout: float, say: Say, *, everywhere: bool = False) -> str:
    """Stage items on all nodes of the job that do not see them.

    Args:
        program: srunddp's, for the case that no environment is among the items.
        timeout: seconds that a node may take for each step.
        say: takes lines for the user.
        everywhere: also where they are seen, but for the project: what ranks write in it is to be in one place.

    Returns:
        The path of the program that starts srunddp on each node, for srun.

    Raises:
        StagingError: a node cannot take the copies, or one of Slurm's commands fails.
        ConfigError: an item cannot be packed.
    """
    env = next((item.path for item in items if item.role == "env"), None)
    python = os.path.join(env, "bin", "python") if env else sys.executable
    interpreter, words = os.path.realpath(python), {"python": python, "srunddp": os.path.abspath(program)}
    with RemoteStep(job, interpreter, timeout) as step:
        copies = _copies(step, items, interpreter, everywhere)
        for copy in copies:
            _tell(copy, job, say)
            if copy.lacking:
                _stage(step, copy, timeout, say)
        step.ask(do="finish", places=[_place(copy) for copy in copies], cwd=absolute("."), **words)
    return os.path.join(job.folder, "srunddp")


def _copies(step: RemoteStep, items: Sequence[Item], interpreter: str, everywhere: bool) -> list[_Copy]:
    places = [{"path": item.path, "mark": item.mark} for item in items]
    found = step.ask(do="look", places=places, alive=alive(), python=interpreter)
    _check_interpreter(items, found, interpreter)
    copies = []
    for index, item in enumerate(items):
        anyway = everywhere and item.role != "project"
        nodes = tuple(sorted(node for node in found if anyway or found[node]["sees"][index] == "0"))
        if nodes:
            require_whole(item)
        name = f"{item.role}-{fingerprint(item.path, leave_out=item.apart)[:12]}" if nodes else ""
        copies.append(_Copy(item, name, nodes))
    there = step.ask(do="has", names=[copy.name for copy in copies])
    return [
        _Copy(copy.item, copy.name, copy.nodes, tuple(node for node in copy.nodes if there[node]["has"][index] == "0"))
        for index, copy in enumerate(copies)
    ]


def _check_interpreter(items: Sequence[Item], found: Answers, interpreter: str) -> None:
    """An environment of venv's has no Python of its own, and one of conda's has."""
    without = sorted(node for node in found if not found[node]["python"])
    if without and not any(interpreter.startswith(item.path + "/") for item in items):
        raise StagingError(
            f"{fold(without)}: no {interpreter}",
            expected="the Python that the environment was made with",
            hint="install it there, or make the environment with one that all nodes have",
        )


def _stage(step: RemoteStep, copy: _Copy, timeout: float, say: Say) -> None:
    times = [time.monotonic()]
    with _packing_folder() as folder:
        archive = os.path.join(folder, copy.name + ".tar")
        packed = pack(copy.item.path, archive, leave_out=copy.item.apart)
        times.append(time.monotonic())
        _check_room(step, copy, packed)
        send(step.job, archive, copy.lacking, timeout)
        times.append(time.monotonic())
    unpacking = _unpack(step, copy, packed)
    for node in copy.lacking:
        say(f"{node} staged -> {os.path.join(step.job.folder, copy.name)}")
    say(
        f"{copy.item.role}: {packed.files} files, {packed.size >> 20} MiB, packed in {times[1] - times[0]:.1f} s, "
        f"sent in {times[2] - times[1]:.1f} s, unpacked in {unpacking:.1f} s"
    )


def _unpack(step: RemoteStep, copy: _Copy, packed: ArchiveInfo) -> float:
    """How long the slowest node took, in seconds."""
    wanted = {"sha256": packed.sha256, "size": packed.size, "files": packed.files, "links": packed.links}
    done = step.ask(do="unpack", name=copy.name, packed=wanted)
    if without := [node for node in copy.lacking if done[node]["seconds"] is None]:
        found = f"{fold(without)}: nothing has come to {step.job.folder}"
        raise StagingError(found, expected="the archive", hint="name a disk of each node's own with --dir")
    return max(float(done[node]["seconds"]) for node in copy.lacking)


def _packing_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="sdd-pack-")
    except OSError as error:
        found = f"no archive can be packed in {tempfile.gettempdir()}: {error.strerror}"
        raise StagingError(found, expected="room for it", hint="set TMPDIR to a folder with room") from None


def _check_room(step: RemoteStep, copy: _Copy, packed: ArchiveInfo) -> None:
    """Before anything is sent, the archive and its content have to fit."""
    needed = packed.archive_size + packed.size
    free = {node: answer["free"] for node, answer in step.ask(do="room").items() if node in copy.lacking}
    if short := sorted(node for node in free if free[node] < needed):
        verb, least = "has" if len(short) == 1 else "have", min(free[node] for node in short)
        raise StagingError(
            f"{fold(short)} {verb} {least >> 20} MiB free in {step.job.base}",
            expected=f"{needed >> 20} MiB for {copy.item.path} and its archive",
            hint="clear it, name another folder with --dir, or leave files out with --exclude",
        )


def _tell(copy: _Copy, job: Job, say: Say) -> None:
    if there := [node for node in copy.nodes if node not in copy.lacking]:
        say(f"{fold(there)} staged before -> {os.path.join(job.folder, copy.name)}")
    if not copy.nodes:
        say(f"all nodes see {copy.item.path}")


def _place(copy: _Copy) -> dict[str, Any]:
    return {"role": copy.item.role, "path": copy.item.path, "name": copy.name, "nodes": copy.nodes}


def clean(job: Job, timeout: float, say: Say) -> None:
    """Remove the job's folder from all nodes, but for files that were written there.

    Args:
        timeout: seconds that a node may take; say: takes a line for each node where files stay.

    Raises:
        StagingError: ranks still use it, or a node does not answer.
    """
    with RemoteStep(job, sys.executable, timeout) as step:
        answers = step.ask(do="clean")
        if all(answer["kept"] is None for answer in answers.values()):
            say(f"nothing was staged for job {job.number} in {job.base}")
        for node in sorted(answers):
            if kept := answers[node]["kept"]:
                files = "1 file" if kept == 1 else f"{kept} files"
                say(f"{node} keeps {files} written in a copy: {job.folder}")
        step.wait()
