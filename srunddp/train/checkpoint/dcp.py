"""Shards on the disk, by torch.distributed.checkpoint."""

from __future__ import annotations

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

from srunddp.train.checkpoint.sharded import MANIFEST_KEY, broken, join

_METADATA = ".metadata"
Target = Callable[[str, TensorStorageMetadata], Tensor]
"""``target(key, stored)``: the tensor to read ``key`` into."""


def write(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> list[str]:
    """Write each rank's shards into a new folder; all ranks of the group call this.

    Returns:
        The names of all ranks' files.

    Raises:
        OSError: a rank could not write its own.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    try:
        metadata = save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"rank {rank}: {cause.strerror}", str(folder)) from error
        raise RuntimeError(f"rank {rank} could not write its shards: {cause!r}") from error
    return [_METADATA, *sorted({each.relative_path for each in metadata.storage_data.values()})]


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
        raise broken(folder, " ".join(str(error).split())[-300:]) from error
    return join({name: value for name, value in state.items() if name != MANIFEST_KEY}, tensors)


def empty(key: str, stored: TensorStorageMetadata) -> Tensor:
    """A target on the CPU for the whole tensor."""
    return torch.empty(stored.size, dtype=stored.properties.dtype)


class _Reader(FileSystemReader):
    """Reads the metadata, a pickle, without executing what is in it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(self.path / _METADATA, "rb") as file:  # type: ignore[operator]
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
