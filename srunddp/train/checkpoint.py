"""Checkpoint files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Replace ``path`` by ``state``; a kill or a power cut at any moment leaves the old file or the new.

    One rank alone may call this. ``state`` holds tensors and plain values only: see :func:`load_checkpoint`.

    Raises:
        OSError: the folder is missing, not writable, or the disk is full; the old file is untouched.
    """
    # In the same folder, since a rename is atomic within one file system only; and of a fixed name, so
    # that the next save overwrites what a killed one left, rather than filling the disk.
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What :func:`save_checkpoint` wrote, with its tensors on the CPU.

    On the CPU, since a GPU number saved by rank 0 would fill that GPU from every rank. Nothing in the file
    is executed: torch refuses all but tensors and plain values.

    Raises:
        FileNotFoundError: there is no such file.
        pickle.UnpicklingError: it holds something else than tensors and plain values.
        RuntimeError: it is damaged.
    """
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _sync_folder(folder: Path) -> None:
    """The rename itself reaches the disk only with the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
