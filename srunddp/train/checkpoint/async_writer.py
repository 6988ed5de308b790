"""Writes checkpoints in the background, one at a time."""

import copy
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from srunddp.telemetry import event
from srunddp.train.checkpoint.directory import CheckpointDirectory, disk_hint
from srunddp.train.checkpoint.file import CheckpointError

# The niceness of the thread that writes: if no core is free, training keeps about nine tenths of
# its core, and the thread gets the rest.
_NICENESS = 10
# Seconds that training waits for the previous checkpoint before it skips the next one, so that a
# short run, whose epochs take less time than the disk, keeps all of its checkpoints.
_PATIENCE = 1.0
_THREAD = "checkpoint"


class AsyncCheckpointer:
    """Writes the checkpoints of a directory in a separate thread, so that training waits only for
    the copy.

    An error of the disk does not end training. At exit Python waits until the thread has written
    its checkpoint.
    """

    def __init__(self, directory: CheckpointDirectory, log: Callable[[str], None]) -> None:
        """Wait for the thread of an earlier run of this process, if there is one.

        Args:
            directory: Where the checkpoints are written.
            log: Called in the caller's thread with the reason if checkpoints are not written.
        """
        self._directory = directory
        self._log = log
        self._snapshot = Snapshot()
        # An earlier run in this process, as in a notebook, may have failed while its thread still
        # writes. Two threads would remove each other's temporary files.
        for thread in threading.enumerate():
            if thread.name == _THREAD:
                thread.join()
        self._thread: threading.Thread | None = None
        # The step of the checkpoint that was begun last.
        self._step = 0
        # Whether a later checkpoint was skipped because that of self._step is still being written.
        self._left_out = False
        # The error that ended the thread: set in the thread, and read only after the thread is
        # joined.
        self._error: BaseException | None = None
        self._failed: CheckpointError | None = None
        self._written: list[int] = []

    def write(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy the state and begin to write it, unless the previous checkpoint is still being
        written.

        It waits at most one second for the previous checkpoint. If a checkpoint was skipped because
        of the same previous one before, it does not wait again.

        Args:
            step: The step after which the state was taken.
            state: Tensors and plain values, which may change once this returns.

        Raises:
            CheckpointError: The previous checkpoint contained something that cannot be loaded
                again, or another run has begun in this directory.
        """
        if not self.join(0.0 if self._left_out else _PATIENCE):
            if not self._left_out:
                self._log(
                    f"checkpoints are skipped from step {step} on, until that of step {self._step}"
                    " is written"
                )
            self._left_out = True
            return
        copied = self._snapshot.take(dict(state))
        self._step = step
        self._left_out = False
        self._error = None
        # Not a daemon: at exit Python would end it in the middle of torch's C++ code, which aborts
        # the process.
        self._thread = threading.Thread(
            target=self._add, args=(step, copied), name=_THREAD, daemon=False
        )
        self._thread.start()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until no checkpoint is being written, and log a disk error of the last one.

        Args:
            timeout: Seconds to wait at most; None for no limit.

        Returns:
            True if no checkpoint is being written any more; False if the timeout has passed.

        Raises:
            CheckpointError: As for :meth:`write`.
        """
        if self._thread is None:
            return True
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._thread = None
        self._failed = None
        if self._error is None:
            self._written.append(self._step)
        elif isinstance(self._error, OSError):
            self._failed = self._failure(self._error)
            self._log(str(self._failed))
        else:
            # The error is not one of the disk: the state contains something that cannot be loaded,
            # another run has begun in the folder, or this code is wrong. The next checkpoint would
            # fail too.
            raise self._error
        return True

    def wait(self) -> bool:
        """Wait until no checkpoint is being written.

        Returns:
            Whether the last checkpoint was written; False if it was skipped.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        self.join()
        if self._failed is not None and not self._left_out:
            raise self._failed
        return not self._left_out

    def poll(self) -> list[int]:
        """Return the steps whose checkpoints have been written since the last call."""
        self.join(0.0)
        written = self._written
        self._written = []
        return written

    def _add(self, step: int, state: dict[str, Any]) -> None:
        # On Linux each thread has its own niceness, set by its thread id. Only root may lower it,
        # so the call fails if the rank was started with a higher niceness.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        began = time.monotonic()
        try:
            self._directory.add(step, state)
        except BaseException as error:  # join() raises it in the caller's thread
            self._error = error
        else:
            event("checkpoint_written", time.monotonic() - began)

    def _failure(self, error: OSError) -> CheckpointError:
        last = self._directory.last_whole()
        return CheckpointError(
            f"the checkpoint of step {self._step} could not be written: {error}",
            expected=(
                f"a file in {self._directory.folder}; the last complete one is"
                f" {last.name if last else 'none'}"
            ),
            hint=disk_hint(error),
        )


def map_tensors(value: Any, tensor: Callable[[Tensor], Any], other: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples in which each value is mapped.

    Args:
        value: The nested structure, or a single value; it is not changed.
        tensor: Maps a tensor.
        other: Maps any other value.
    """
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, dict):
        # copy() keeps the dict's type, and the attribute _metadata of a module's state_dict, from
        # which load_state_dict() reads the versions of modules.
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = map_tensors(item, tensor, other)
        return copied
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, tensor, other) for item in value)
    return other(value)


def emptied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of the same types whose tensors have no elements.

    Pickling it costs almost nothing, and shows whether the state can be saved.

    Args:
        state: The state as it would be saved; it is not changed.
    """

    def empty(tensor: Tensor) -> Tensor:
        if _is_plain(tensor):
            return torch.empty(0, dtype=tensor.dtype)
        return tensor.detach().to("cpu", copy=True)

    result: dict[str, Any] = map_tensors(dict(state), empty, lambda value: value)
    return result


class Snapshot:
    """Copies states into the same memory each time; a copy is valid until the next one is taken."""

    def __init__(self) -> None:
        # The copies, by memory and view of the original tensors. Training changes most tensors in
        # place, so the next state has them in the same memory, and their buffers are reused.
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        self._before = self._copies

    @torch.no_grad()
    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy nested dicts, lists and tuples, with tensors of any device, and wait for the copies.

        One tensor under two names is one tensor in the copy. Different views of one memory are
        copied separately, so a small view does not pull a large buffer into the file.

        Args:
            state: The state, which must not change before this returns.
        """
        # A buffer whose tensor is no longer in the state is not taken from _before, and is freed
        # when _before is cleared below.
        self._before = self._copies
        self._copies = {}
        taken: dict[str, Any] = map_tensors(state, self._copy, copy.deepcopy)
        self._before = {}
        # The copies are only queued so far. Until they are done, training must not change the
        # tensors and the writer must not read the buffers.
        for gpu in {device for device, *_ in self._copies if device.type == "cuda"}:
            torch.cuda.current_stream(gpu).synchronize()
        return taken

    def _copy(self, tensor: Tensor) -> Tensor:
        if not _is_plain(tensor):
            return tensor.detach().to("cpu", copy=True)
        view = (
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        source = (tensor.device, tensor.untyped_storage().data_ptr(), *view)
        if source not in self._copies:
            buffer = self._before.get(source)
            if buffer is None:
                # Pinned for a GPU: a copy to other memory is neither asynchronous nor fast.
                buffer = torch.empty_like(
                    tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False
                )
            self._copies[source] = buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        return self._copies[source]


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
    )
