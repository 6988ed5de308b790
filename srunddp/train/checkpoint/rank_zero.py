"""What rank 0 tells the other ranks: through the store, without a collective's time limit; and a file's bytes."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from mmap import MAP_SHARED
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from srunddp.bootstrap.process_group.world import await_message
from srunddp.errors import PeerError
from srunddp.telemetry import heartbeat
from srunddp.train.checkpoint.file import load_open, write_all
from srunddp.train.world import World
from srunddp.util.kernel_file import memory_file

_LOOK_EVERY = 0.05  # seconds
_PIECE = 1 << 22  # bytes of a broadcast
_turns = itertools.count()  # the same on all ranks
T = TypeVar("T")


def on_rank_zero(world: World, action: Callable[[], T]) -> T:
    """Call ``action`` on rank 0 alone; all ranks call this, and neither a time limit nor ``--stall-timeout`` counts.

    Returns:
        What it returned there, on all ranks: what JSON has.

    Raises:
        PeerError: it has failed; on rank 0 its own error.
    """
    heartbeat(last=True)
    if world.world_size == 1:
        return action()
    store, key = _get_default_store(), f"srunddp/rank_zero/{next(_turns)}"
    if world.rank:
        answer: dict[str, Any] = json.loads(await_message(store, key))
        if "error" in answer:
            raise PeerError(f"rank 0 failed: {answer['error']}", code=answer["code"])
        result: T = answer["result"]
        return result
    try:
        result = action()
    except BaseException as error:
        said = str(error) or type(error).__name__
        store.set(key, json.dumps({"error": said, "code": getattr(error, "exit_code", 1)}))
        raise
    store.set(key, json.dumps({"result": result}))
    return result


def any_rank(world: World, flag: bool) -> bool:
    """Whether ``flag`` is set on one of the ranks; all call this, each when it likes."""
    if world.world_size == 1:
        return flag
    store, key = _get_default_store(), f"srunddp/any_rank/{next(_turns)}"
    store.add(f"{key}/set", int(flag))
    store.add(f"{key}/ranks", 1)

    def asked() -> bool:
        while store.add(f"{key}/ranks", 0) < world.world_size:
            time.sleep(_LOOK_EVERY)
        return bool(store.add(f"{key}/set", 0))

    return on_rank_zero(world, asked)


def send_checkpoint(world: World, path: Path, size: int, *, lacking: bool) -> dict[str, Any] | None:
    """Send a checkpoint from rank 0 to the ranks that lack it; all ranks call this.

    The bytes are kept once: the tensors lie in them.

    Args:
        path: of the file, on rank 0; size: its bytes.
        lacking: whether this rank wants it.

    Returns:
        Its content, where it was wanted.

    Raises:
        CheckpointError: what came is not what was sent.
    """
    piece = bytearray(_PIECE)
    tensor = torch.frombuffer(piece, dtype=torch.uint8)
    with open(path if world.rank == 0 else "/dev/null", "rb") as file, open(memory_file(), "rb+", buffering=0) as kept:
        for start in range(0, size, _PIECE):
            file.readinto(piece)
            moved = tensor.to(world.device)
            dist.broadcast(moved, src=0)
            if lacking:
                tensor.copy_(moved)
                write_all(kept, memoryview(piece)[: size - start])
        return load_open(kept, path, MAP_SHARED) if lacking else None
