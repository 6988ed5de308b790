"""The way of batches from the host's memory to the device."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class DeviceTransfer:
    """Copies batches of any structure to a device, on a stream of its own where that is a GPU.

    Moved are tensors in mappings, tuples and lists, and whatever has a ``to(device)``; all else
    stays as it is.
    """

    def __init__(
        self, device: torch.device, *, channels_last: bool = False, beside: bool = False
    ) -> None:
        """Copy nothing yet.

        Args:
            device: To which batches are copied.
            channels_last: Tensors of four dimensions come with their channels innermost.
            beside: Copy while the device computes; for a GPU.
        """
        self._device = device
        if channels_last:
            self._format = torch.channels_last
        else:
            self._format = torch.preserve_format
        self._is_there = device.type == "cpu" and not channels_last
        self._stream: torch.cuda.Stream | None = None
        if beside:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batches: list[Any]) -> tuple[list[Any], torch.cuda.Event | None]:
        """Begin to copy batches to the device.

        Args:
            batches: In the host's memory.

        Returns:
            The batches on the device, and the event that comes when they are there, for
            :meth:`arrived` before they are used. The same list where nothing is to be copied.
        """
        if self._stream is None:
            if not self._is_there:
                batches = [self._moved(batch, None) for batch in batches]
            return batches, None
        computing = torch.cuda.current_stream(self._device)
        # On a stream of its own the copies overlap what the device still computes of the step
        # before.
        with torch.cuda.stream(self._stream):
            moved = [self._moved(batch, computing) for batch in batches]
            return moved, self._stream.record_event()

    def arrived(self, batches: list[Any], copied: torch.cuda.Event | None) -> None:
        """Have what the device computes from now on wait until the batches are there.

        Args:
            batches: From :meth:`send`.
            copied: From there, too.
        """
        if copied is not None:
            computing = torch.cuda.current_stream(self._device)
            # Queued on the GPU, which waits for the copy; the host does not.
            computing.wait_event(copied)
            _record(batches, computing)

    def _moved(self, tree: Any, computing: torch.cuda.Stream | None) -> Any:
        """Return the same structure on the device.

        Args:
            tree: Tensors in any structure.
            computing: The stream on which it will be used, where it is copied on another; else
                None.
        """
        if isinstance(tree, Tensor):
            layout = self._format if tree.dim() == 4 else torch.preserve_format
            return tree.to(self._device, non_blocking=True, memory_format=layout)
        # Classes that move themselves: BatchEncoding, PackedSequence, a graph.
        if hasattr(tree, "to"):
            if computing is None or isinstance(tree, Mapping):
                return tree.to(self._device)
            # Copied on the stream that uses it, without an overlap: its tensors cannot be found, so
            # that record_stream() cannot be called on them.
            with torch.cuda.stream(computing):
                return tree.to(self._device)
        if isinstance(tree, Mapping):
            return {name: self._moved(value, computing) for name, value in tree.items()}
        if isinstance(tree, tuple | list):
            parts = [self._moved(value, computing) for value in tree]
            # A named tuple's constructor takes its fields one by one.
            if hasattr(tree, "_make"):
                return tree._make(parts)
            return type(tree)(parts)
        return tree


def _record(tree: Any, computing: torch.cuda.Stream) -> None:
    """Tell torch's allocator that a stream uses these tensors, which were made on another one.

    Else it could give their memory away, once Python has dropped them, while this stream still
    reads it.
    """
    if isinstance(tree, Tensor) and tree.is_cuda:
        tree.record_stream(computing)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            _record(value, computing)
    elif isinstance(tree, tuple | list):
        for value in tree:
            _record(value, computing)
