"""Writes checkpoints beside training, one at a time."""

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

# Where no core is free, training has nine tenths of its own, and the writer is not starved.
_NICENESS = 10
# Seconds that training waits for the checkpoint before: a short run, whose epochs take less than
# the disk, keeps all of its checkpoints.
_PATIENCE = 1.0
_THREAD = "checkpoint"


class AsyncCheckpointer:
    """Writes the checkpoints of a directory in a thread of its own, so that training waits for the
    copy alone.

    What the disk refuses does not end training. Python's end waits for the thread.
    """

    def __init__(self, directory: CheckpointDirectory, log: Callable[[str], None]) -> None:
        """Wait for the thread of an earlier run of this process, if there is one.

        Args:
            directory: In which checkpoints are written.
            log: Called in the caller's thread with why checkpoints were not written.
        """
        self._directory = directory
        self._log = log
        self._snapshot = Snapshot()
        # A run in this process may have failed while its thread still writes, as in a notebook. Two
        # at once would remove each other's temporary files.
        for thread in threading.enumerate():
            if thread.name == _THREAD:
                thread.join()
        self._thread: threading.Thread | None = None
        # Of the checkpoint that was begun last.
        self._step = 0
        # Whether a later one was left out, as that one is still being written.
        self._left_out = False
        # What has ended the thread. Set there, and read here only once the thread is joined.
        self._error: BaseException | None = None
        self._failed: CheckpointError | None = None
        self._written: list[int] = []

    def write(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy the state and begin to write it, unless the checkpoint before is still being
        written.

        For that it waits a second, and only once while that one is written.

        Args:
            step: After which the state was taken.
            state: Tensors and plain values, which may change once this returns.

        Raises:
            CheckpointError: the one before held something that cannot be loaded again, or another
                run has begun here.
        """
        if not self.join(0.0 if self._left_out else _PATIENCE):
            if not self._left_out:
                self._log(
                    f"checkpoints are left out from step {step} on, until that of step {self._step}"
                    " is written"
                )
            self._left_out = True
            return
        copied = self._snapshot.take(dict(state))
        self._step = step
        self._left_out = False
        self._error = None
        # No daemon: Python would end it amid torch's C++, which aborts the process.
        self._thread = threading.Thread(
            target=self._add, args=(step, copied), name=_THREAD, daemon=False
        )
        self._thread.start()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being written any more.

        Args:
            timeout: Seconds; None for no limit.

        Returns:
            Whether nothing is.

        Raises:
            CheckpointError: as :meth:`write`.
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
            # No disk's fault: the state holds what cannot be loaded, another run has begun here, or
            # this code is wrong. None of them gets better by going on.
            raise self._error
        return True

    def wait(self) -> bool:
        """Wait until nothing is being written.

        Returns:
            Whether the last checkpoint was written, rather than left out.

        Raises:
            CheckpointError: It could not be written.
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
        # On Linux each thread has a niceness of its own, by its number. Only root may lower one:
        # where the rank was started with more than this, the call is refused.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        began = time.monotonic()
        try:
            self._directory.add(step, state)
        except BaseException as error:  # raised where the caller is
            self._error = error
        else:
            event("checkpoint_written", time.monotonic() - began)

    def _failure(self, error: OSError) -> CheckpointError:
        last = self._directory.last_whole()
        return CheckpointError(
            f"the checkpoint of step {self._step} could not be written: {error}",
            expected=(
                f"a file in {self._directory.folder}; the last whole one is"
                f" {last.name if last else 'none'}"
            ),
            hint=disk_hint(error),
        )


def map_tensors(value: Any, tensor: Callable[[Tensor], Any], other: Callable[[Any], Any]) -> Any:
    """Return the same nest of dicts, lists and tuples with other values.

    Args:
        value: The nest.
        tensor: Makes the value in place of a tensor.
        other: Makes the value in place of anything else.
    """
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, dict):
        # A copy keeps the dict's type, and the attribute _metadata of a module's state_dict, by
        # which load_state_dict() knows the versions of modules.
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = map_tensors(item, tensor, other)
        return copied
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, tensor, other) for item in value)
    return other(value)


def emptied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of the same types whose tensors have no elements.

    It can be pickled at no cost, to see whether the state can be saved.

    Args:
        state: As it would be saved; it is not changed.
    """

    def empty(tensor: Tensor) -> Tensor:
        if _is_plain(tensor):
            return torch.empty(0, dtype=tensor.dtype)
        return tensor.detach().to("cpu", copy=True)

    result: dict[str, Any] = map_tensors(dict(state), empty, lambda value: value)
    return result


class Snapshot:
    """Copies states, into the same memory each time: a copy holds until the next is taken."""

    def __init__(self) -> None:
        # By memory and view of the tensor that was copied. Training changes most tensors in place,
        # so that the next state has them in the same memory, and their buffers are used again.
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        self._before = self._copies

    @torch.no_grad()
    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy a nest of dicts, lists and tuples, with its tensors of all devices, and wait until
        all is there.

        What is one tensor under two names is one in the copy. Different views of one memory are
        copied each for itself: a small view does not drag a large buffer into the file.

        Args:
            state: It must not change before this returns.
        """
        # Buffers that this copy does not use again, as their tensors are gone, are freed with
        # _before.
        self._before = self._copies
        self._copies = {}
        taken: dict[str, Any] = map_tensors(state, self._copy, copy.deepcopy)
        self._before = {}
        # The copies were only queued. Until they are done training must not change the tensors, nor
        # the writer read the buffers.
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
                # Pinned for a GPU: else the copy would neither run beside others nor at full speed.
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
