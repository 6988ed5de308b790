"""Checkpoints whose tensors lie beside them in shards, as torch.distributed.checkpoint writes and reads them.

The file ``step-00000120.pt`` is as any other, but that it holds no tensors of the model and the optimizer: it names the
folder that has them, and the SHA-256 of each file in there. It is written last, and so tells that all are there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from srunddp.bootstrap.environment import cpus
from srunddp.train.checkpoint.file import CheckpointError, load_file, sync_folder, verify

SUFFIX = ".shards"
MANIFEST_KEY = "shards"  # where the file tells of its folder
_HINT = "use another checkpoint"


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A training state without the tensors of its model and optimizer, and these by ``model/NAME`` and
    ``optimizer/INDEX/NAME``."""
    optimizer = state["optimizer"]
    model, tensors = _parted(state["model"], "model/")
    plain: dict[int, Any] = {}
    for index, values in optimizer["state"].items():
        plain[index], found = _parted(values, f"optimizer/{index}/")
        tensors |= found
    return {**state, "model": model, "optimizer": {**optimizer, "state": plain}}, tensors


def join(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What :func:`split` has parted."""
    model = dict(state["model"])
    optimizer = {index: dict(values) for index, values in state["optimizer"]["state"].items()}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        if part == "model":
            model[name] = tensor
        else:
            index, _, name = name.partition("/")
            optimizer[int(index)][name] = tensor
    return {**state, "model": model, "optimizer": {**state["optimizer"], "state": optimizer}}


def _parted(values: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = {prefix + name: value for name, value in values.items() if isinstance(value, Tensor)}
    return {name: value for name, value in values.items() if not isinstance(value, Tensor)}, tensors


def manifest(folder: Path, files: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint's file tells of its folder, which is on the disk when this returns.

    Args:
        files: the SHA-256 of each.

    Raises:
        OSError: the disk's.
    """
    sync_folder(folder)
    sync_folder(folder.parent)
    return {MANIFEST_KEY: {"folder": folder.name, "files": dict(files)}}


def load_whole(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a checkpoint's file; its shards, if it has any, were read and are whole.

    Raises:
        CheckpointError: one of them is missing or damaged.
    """
    state = load_file(path)
    if has_shards(state):
        _check(folder_of(path, state), state[MANIFEST_KEY]["files"])
    return state


def verify_whole(path: str | os.PathLike[str]) -> None:
    """The same without loading it.

    Raises:
        CheckpointError: one of them is missing or damaged.
    """
    verify(path)
    state = _without_tensors(path)
    if has_shards(state):
        _check(folder_of(path, state), state[MANIFEST_KEY]["files"])


def has_shards(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's tensors lie in a folder beside it."""
    return MANIFEST_KEY in state


def references(path: Path, folder: Path) -> bool:
    """Whether this is the checkpoint of these shards; it is taken for that where it cannot be read."""
    if not path.exists():
        return False
    try:
        state = _without_tensors(path)
    except Exception:  # torch's are many
        return True
    return has_shards(state) and state[MANIFEST_KEY]["folder"] == folder.name


def _without_tensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """They are read when they are used."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return state


def folder_of(path: str | os.PathLike[str], state: Mapping[str, Any]) -> Path:
    """Where they lie."""
    return Path(path).resolve().parent / str(state.get(MANIFEST_KEY, {}).get("folder", ""))


def _check(folder: Path, files: Mapping[str, str]) -> None:
    """Several at once: those of a large model are as large as all of its ranks' memory."""
    with ThreadPoolExecutor(max(1, cpus.usable())) as readers:
        list(readers.map(lambda file: _check_file(folder, *file), sorted(files.items())))


def _check_file(folder: Path, name: str, digest: str) -> None:
    try:
        if file_digest(folder / name) != digest:
            raise broken(folder / name, "its SHA-256 is not that of its content")
    except OSError as error:
        raise broken(folder / name, f"it cannot be read: {error.strerror}") from error


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, read back from the disk."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it would be read from memory
        return hashlib.file_digest(file, "sha256").hexdigest()


def broken(path: Path, found: str) -> CheckpointError:
    """The error of a shard that is not as it was written."""
    return CheckpointError(found, expected="shards as srunddp wrote them", hint=_HINT, where=str(path))
