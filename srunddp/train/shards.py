"""Checkpoints whose tensors lie beside them in shards, as torch.distributed.checkpoint writes and reads them.

The file ``step-00000120.pt`` is as any other, but that it holds no tensors of the model and the optimizer: it names the
folder that has them, and the SHA-256 of each file in there. It is written last, and so tells that all are there.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from srunddp.train.checkpoint import CheckpointError, load_file, sync_folder, verify

SUFFIX = ".shards"
_TOLD = "shards"  # where the file tells of its folder
_CURE = "use another checkpoint"
Target = Callable[[str, TensorStorageMetadata], Tensor]
"""``target(key, stored)``: the tensor to read ``key`` into."""


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


def write(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
    """Write each rank's shards into a new folder; all ranks of the group call this.

    Raises:
        OSError: a rank could not write its own.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    try:
        save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"rank {rank}: {cause.strerror}", str(folder)) from error
        raise RuntimeError(f"rank {rank} could not write its shards: {cause!r}") from error


def told(folder: Path) -> dict[str, Any]:
    """What a checkpoint's file tells of its folder, which is on the disk when this returns.

    Raises:
        OSError: they cannot be read here.
    """
    sync_folder(folder)
    sync_folder(folder.parent)
    return {_TOLD: {"folder": folder.name, "files": {path.name: _digest(path) for path in sorted(folder.iterdir())}}}


def load_whole(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a checkpoint's file; its shards, if it has any, were read and are whole.

    Raises:
        CheckpointError: one of them is missing or damaged.
    """
    state = load_file(path)
    if has_shards(state):
        _check(folder_of(path, state), state[_TOLD]["files"])
    return state


def verify_whole(path: str | os.PathLike[str]) -> None:
    """The same without loading it.

    Raises:
        CheckpointError: one of them is missing or damaged.
    """
    verify(path)
    state = _without_tensors(path)
    if has_shards(state):
        _check(folder_of(path, state), state[_TOLD]["files"])


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint holds, with its tensors on the CPU, and whole also where they were written in shards.

    Nothing in the files is executed: all but tensors and plain values is refused.

    Raises:
        CheckpointError: it is missing, damaged or cut short, or it holds something else.
    """
    state = load_whole(path)
    return read(state, folder_of(path, state), _empty) if has_shards(state) else state


def has_shards(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's tensors lie in a folder beside it."""
    return _TOLD in state


def tells_of(path: Path, folder: Path) -> bool:
    """Whether this is the checkpoint of these shards; it is taken for that where it cannot be read."""
    if not path.exists():
        return False
    try:
        state = _without_tensors(path)
    except Exception:  # torch's are many
        return True
    return has_shards(state) and state[_TOLD]["folder"] == folder.name


def _without_tensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """They are read when they are used."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return state


def folder_of(path: str | os.PathLike[str], state: Mapping[str, Any]) -> Path:
    """Where they lie."""
    return Path(path).resolve().parent / str(state.get(_TOLD, {}).get("folder", ""))


def read(state: Mapping[str, Any], folder: Path, target: Target, group: Any = None) -> dict[str, Any]:
    """A checkpoint's state with its tensors; with a group all its ranks call this, and each reads what it needs.

    Raises:
        CheckpointError: they cannot be read.
    """
    try:
        stored = _Reader(folder).read_metadata().state_dict_metadata
        tensors = {key: target(key, cast(TensorStorageMetadata, each)) for key, each in stored.items()}
        with warnings.catch_warnings():  # that it is a single process, which was asked for
            warnings.simplefilter("ignore", UserWarning)
            load(dict(tensors), storage_reader=_Reader(folder), process_group=group, no_dist=group is None)
    except (OSError, pickle.UnpicklingError, CheckpointException) as error:
        raise _broken(folder, " ".join(str(error).split())[-300:]) from error
    return join({name: value for name, value in state.items() if name != _TOLD}, tensors)


def _empty(key: str, stored: TensorStorageMetadata) -> Tensor:
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _check(folder: Path, files: Mapping[str, Any]) -> None:
    for name, digest in files.items():
        try:
            if _digest(folder / name) != digest:
                raise _broken(folder / name, "its SHA-256 is not that of its content")
        except OSError as error:
            raise _broken(folder / name, f"it cannot be read: {error.strerror}") from error


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it would be read from memory
        return hashlib.file_digest(file, "sha256").hexdigest()


def _broken(path: Path, found: str) -> CheckpointError:
    return CheckpointError(found, expected="shards as srunddp wrote them", cure=_CURE, where=str(path))


class _Reader(FileSystemReader):
    """Reads the metadata, a pickle, without executing what is in it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(self.path / ".metadata", "rb") as file:  # type: ignore[operator]
            metadata = cast(Metadata, _Unpickler(file).load())
        metadata.storage_meta = None
        return metadata


class _Unpickler(pickle.Unpickler):
    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _CLASSES = (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING", "_StorageInfo"),
    )
    _OTHERS = (("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"))

    def find_class(self, module: str, name: str) -> Any:
        known = (module in self._MODULES and name in self._CLASSES) or (module, name) in self._OTHERS
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is refused")
