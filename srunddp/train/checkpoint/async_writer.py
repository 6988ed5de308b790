"""Writes checkpoints beside training, one at a time."""

from __future__ import annotations

import copy
import errno
import os
import threading
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from srunddp.telemetry import event
from srunddp.train.checkpoint.directory import CheckpointDirectory
from srunddp.train.checkpoint.file import CheckpointError

_NICENESS = 10  # where no core is free, training has nine tenths of its own, and the writer is not starved
_HINTS = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EFBIG: "raise the limit on the size of files",
    errno.ENOENT: "make the folder again",
}
_OTHER_HINT = "check the file system, and that you may write there"
_THREAD = "checkpoint"
T = TypeVar("T")


class AsyncCheckpointer:
    """Writes the checkpoints of a directory in a thread of its own, so that training waits for the copy alone.

    What the disk refuses does not end training: see :meth:`poll`. Python's end waits for the thread.
    """

    def __init__(self, directory: CheckpointDirectory) -> None:
        self._directory = directory
        self._snapshot = Snapshot()
        # Of a run in this process that has failed: two at once would remove each other's temporary files.
        for thread in threading.enumerate():
            if thread.name == _THREAD:
                thread.join()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failed: CheckpointError | None = None
        self._problems: list[str] = []
        self._written: list[int] = []

    def write(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy the state and begin to write it; first wait for the checkpoint before to be done.

        Raises:
            CheckpointError: the checkpoint before held something that cannot be loaded again.
        """
        self._join()
        copied = self._snapshot.take(dict(state))
        # No daemon: Python would end it amid torch's C++, which aborts the process.
        self._thread = threading.Thread(target=self._add, args=(step, copied), name=_THREAD, daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        self._join()
        if self._failed is not None:
            raise self._failed

    def poll(self) -> tuple[list[str], list[int]]:
        """Since the last call: why checkpoints could not be written, and the steps of those that were."""
        return _drain(self._problems), _drain(self._written)

    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _add(self, step: int, state: dict[str, Any]) -> None:
        with suppress(OSError):  # the rank may be that nice already
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        began = time.monotonic()
        try:
            self._directory.add(step, state)
        except OSError as error:
            self._failed = self._failure(step, error)
            self._problems.append(str(self._failed))
        except BaseException as error:  # the caller's mistake, and ours: raised where the caller is
            self._error = error
        else:
            self._failed = None
            self._written.append(step)
            event("checkpoint_written", time.monotonic() - began)

    def _failure(self, step: int, error: OSError) -> CheckpointError:
        last = self._directory.last_whole()
        return CheckpointError(
            f"the checkpoint of step {step} could not be written: {error}",
            expected=f"a file in {self._directory.folder}; the last whole one is {last.name if last else 'none'}",
            hint=_HINTS.get(error.errno or 0, _OTHER_HINT),
        )


def _drain(list_: list[T]) -> list[T]:
    """All that is in a list to which another thread may add, and no longer then."""
    return [list_.pop(0) for _ in range(len(list_))]


class Snapshot:
    """Copies states, into the same memory each time: a copy holds until the next is taken."""

    def __init__(self) -> None:
        self._free: defaultdict[Hashable, list[Tensor]] = defaultdict(list)  # by layout
        self._used: defaultdict[Hashable, list[Tensor]] = defaultdict(list)
        self._copies: dict[Hashable, Tensor] = {}  # by source
        self._gpus: set[torch.device] = set()

    @torch.no_grad()
    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy a nest of dicts, lists and tuples, with its tensors of all devices, and wait until all is there.

        What is one tensor under two names is one in the copy. Different views of one memory are copied each for itself:
        a small view does not drag a large buffer into the file.
        """
        self._free, self._used = self._used, defaultdict(list)
        taken: dict[str, Any] = self._copy(state)
        for gpu in self._gpus:
            torch.cuda.current_stream(gpu).synchronize()
        self._free, self._copies, self._gpus = defaultdict(list), {}, set()
        return taken

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_once(value)
        if isinstance(value, dict):
            copied = copy.copy(value)  # keeps its type, and the _metadata of a module's state_dict
            for key, item in value.items():
                copied[key] = self._copy(item)
            return copied
        if type(value) in (list, tuple):
            return type(value)(map(self._copy, value))
        return copy.deepcopy(value)

    def _copy_once(self, tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.detach().to("cpu", copy=True)
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        source = (tensor.device, tensor.untyped_storage().data_ptr(), *view)
        if source not in self._copies:
            self._copies[source] = self._buffer(tensor).copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                self._gpus.add(tensor.device)
        return self._copies[source]

    def _buffer(self, tensor: Tensor) -> Tensor:
        layout = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cuda)
        if self._free[layout]:
            buffer = self._free[layout].pop()
        else:
            # Pinned for a GPU: else the copy would neither run beside others nor at full speed.
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        self._used[layout].append(buffer)
        return buffer
