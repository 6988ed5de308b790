"""Worlds of any size, forked from one process that has imported torch: each start of Python would import it again."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process would: 2 s of CPU in each rank

from tests.train.local_world import joined

_FAILED = 1


def world_of(size: int, folder: Path, action: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``action(world, *args)`` returns on each rank of a new world; all ranks must end well."""
    ranks = start(size, folder, action, *args)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    assert codes == [0] * size, codes
    return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(size)]


def start(size: int, folder: Path, action: Callable[..., Any], *args: Any) -> list[int]:
    """Fork the ranks of a new world; their process ids."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meeting").unlink(missing_ok=True)
    sys.stdout.flush()
    ranks = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _become(rank, size, folder, action, args)
        ranks.append(pid)
    return ranks


def _become(rank: int, size: int, folder: Path, action: Callable[..., Any], args: tuple[Any, ...]) -> None:
    code = _FAILED
    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MEETING_FILE": str(folder / "meeting")}
        with joined() as world:
            torch.save(action(world, *args), folder / f"result{rank}.pt")
        for thread in threading.enumerate():  # as Python's end does, which we leave out: one may write a checkpoint
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else _FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
