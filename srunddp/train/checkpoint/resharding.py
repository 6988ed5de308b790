"""What a checkpoint has to do with shards: a run's own may be in shards, and so may the one that it goes on from."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from srunddp.errors import ConfigError
from srunddp.train.checkpoint import sharded
from srunddp.train.checkpoint.directory import CheckpointDirectory
from srunddp.train.model.fsdp import sharded_as
from srunddp.train.state import TrainingState
from srunddp.train.world import World
from srunddp.util.hostlist import ranges

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_VISIBLE_WITHIN = 5.0  # seconds


class Resharder:
    """Of one run.

    Attributes:
        shards: the model is in shards, so that each rank writes its own, and all call :meth:`add`.
    """

    def __init__(self, world: World, directory: CheckpointDirectory, state: TrainingState) -> None:
        self._world, self._directory, self._state = world, directory, state
        self.shards = any(isinstance(parameter, DTensor) for parameter in state.model.parameters())
        self._group = self._new_group() if self.shards else None

    def check_shared(self) -> None:
        """Make sure that all ranks see the checkpoints' folder, which is there on rank 0; all ranks call this.

        Raises:
            ConfigError: some do not.
        """
        if not self.shards:
            return
        probe = self._of_rank_zero(self._directory.folder / f"{token_hex(4)}.tmp")
        if self._world.rank == 0:
            probe.touch()
        dist.barrier(group=self._group)
        visible: list[bool] = [False] * self._world.world_size
        dist.all_gather_object(visible, _appears(probe), group=self._group)
        if self._world.rank == 0:
            probe.unlink(missing_ok=True)
        if blind := [rank for rank, sees in enumerate(visible) if not sees]:
            raise ConfigError(
                f"what rank 0 writes to {probe.parent} is not seen by rank {ranges(blind)}",
                expected="with parallel=fsdp an output_dir that all nodes share, as each rank writes its shards there",
                hint="put output_dir on a shared file system",
            )

    def add(self, step: int, state: dict[str, Any]) -> None:
        """Write this rank's shards, and on rank 0 then the checkpoint.

        Raises:
            CheckpointError, OSError: as :meth:`CheckpointDirectory.add`; where a rank could not write or read back,
                on all.
        """
        folder = self._of_rank_zero(self._directory.new_folder(step))
        if self._world.rank == 0:
            with suppress(OSError):  # the others wait already; it is done again, and told, by CheckpointDirectory.add
                self._directory.remove_leftovers(but=folder)
        plain, tensors = sharded.split(state)
        # Of what all ranks have, such as buffers, torch would take any rank's.
        own = {key: each for key, each in tensors.items() if isinstance(each, DTensor) or self._world.rank == 0}
        from srunddp.train.checkpoint import dcp

        names = dcp.write(folder, own, self._group)
        files = self._read_back(folder, names)
        if self._world.rank == 0:
            self._directory.add(step, plain | sharded.manifest(folder, files), folder)

    def _read_back(self, folder: Path, names: list[str]) -> dict[str, str]:
        """The SHA-256 of all files; each rank reads some of them."""
        found: list[Any] = [None] * self._world.world_size
        try:
            mine = names[self._world.rank :: self._world.world_size]
            own: Any = {name: sharded.file_digest(folder / name) for name in mine}
        except OSError as error:
            own = error
        dist.all_gather_object(found, own, group=self._group)
        for rank, each in enumerate(found):
            if isinstance(each, OSError):
                raise OSError(each.errno, f"rank {rank}: {each.strerror}", each.filename)
        return {name: digest for each in found for name, digest in each.items()}

    def reshard(self, found: Mapping[str, Any], path: Path | None) -> Mapping[str, Any]:
        """A checkpoint's state as this run's model and optimizer take it; all ranks call this.

        Args:
            path: the checkpoint's file, on rank 0.

        Raises:
            KeyError, IndexError, ValueError: it is of another model.
            CheckpointError: its shards cannot be read here.
        """
        if sharded.has_shards(found):
            self._group = self._group or self._new_group()
            folder = self._of_rank_zero(sharded.folder_of(path or "", found))
            from srunddp.train.checkpoint import dcp

            return dcp.read(found, folder, partial(_place, _OwnTensors(self._state)), self._group)
        if not self.shards:
            return found
        plain, tensors = sharded.split(found)
        own = _OwnTensors(self._state)
        return sharded.join(plain, {key: sharded_as(own[key], tensor) for key, tensor in tensors.items()})

    def _new_group(self) -> Any:
        # Of its own, and on the CPU: checkpoints are written beside training, which shares gradients meanwhile.
        return dist.new_group(backend="gloo") if self._world.world_size > 1 else None

    def _of_rank_zero(self, folder: Path) -> Path:
        """Rank 0's."""
        names = [str(folder.absolute())]  # ranks may have different working directories
        if self._group is not None:
            dist.broadcast_object_list(names, src=0, group=self._group)
        return Path(names[0])


def _appears(path: Path) -> bool:
    """A network file system may remember for some seconds that it was not there."""
    end = time.monotonic() + _VISIBLE_WITHIN
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class _OwnTensors:
    """This run's tensors of the model, and of the optimizer the parameters that its values belong to."""

    def __init__(self, state: TrainingState) -> None:
        self._model = state.model.state_dict()
        self._parameters = [each for group in state.optimizer.param_groups for each in group["params"]]

    def __getitem__(self, key: str) -> Tensor:
        part, _, name = key.partition("/")
        own: Tensor = self._model[name] if part == "model" else self._parameters[int(name.partition("/")[0])]
        return own.detach()


def _place(own: _OwnTensors, key: str, stored: TensorStorageMetadata) -> Tensor:
    """An empty tensor as this one is to be: in shards where it belongs to a parameter in shards."""
    like, dtype = own[key], stored.properties.dtype
    return torch.empty_like(like, dtype=dtype) if like.shape == stored.size else torch.empty(stored.size, dtype=dtype)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint holds, with its tensors on the CPU, and whole also where they were written in shards.

    Nothing in the files is executed: all but tensors and plain values is refused.

    Raises:
        CheckpointError: it is missing, damaged or cut short, or it holds something else.
    """
    state = sharded.load_whole(path)
    if not sharded.has_shards(state):
        return state
    from srunddp.train.checkpoint.dcp import empty, read  # 60 ms, which a training without shards does without

    return read(state, sharded.folder_of(path, state), empty)
