"""Copies batches from the host's memory to the device."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class DeviceTransfer:
    """Copies batches of any structure to a device; to a GPU, on a separate CUDA stream if asked
    for.

    It moves tensors in mappings, tuples and lists, and objects with a ``to(device)``; anything else
    stays as it is.
    """

    def __init__(
        self, device: torch.device, *, channels_last: bool = False, beside: bool = False
    ) -> None:
        """Create a transfer, which copies nothing yet.

        Args:
            device: The device to copy to.
            channels_last: Store tensors of four dimensions with their channels innermost.
            beside: Whether to copy on a separate CUDA stream, while the GPU computes; only for a
                GPU.
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
            batches: The batches, in the host's memory.

        Returns:
            The batches on the device, and a CUDA event that is recorded once they are there, or
            None; pass both to :meth:`arrived` before using the batches. If nothing has to be
            copied, the batches are the same list.
        """
        if self._stream is None:
            if not self._is_there:
                batches = [self._moved(batch, None) for batch in batches]
            return batches, None
        computing = torch.cuda.current_stream(self._device)
        # Copy on the separate stream, so that the copies overlap with the computation of the
        # previous step.
        with torch.cuda.stream(self._stream):
            moved = [self._moved(batch, computing) for batch in batches]
            return moved, self._stream.record_event()

    def arrived(self, batches: list[Any], copied: torch.cuda.Event | None) -> None:
        """Let the GPU's later work wait until the batches are on it; the host does not wait.

        Args:
            batches: The batches that :meth:`send` returned.
            copied: The event that :meth:`send` returned; None if there is nothing to wait for.
        """
        if copied is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(copied)
            _record(batches, computing)

    def _moved(self, tree: Any, computing: torch.cuda.Stream | None) -> Any:
        """Return the same structure on the device.

        Args:
            tree: Tensors in any structure.
            computing: The stream that will use the tensors, if another stream copies them; None if
                there is only one stream.
        """
        if isinstance(tree, Tensor):
            layout = self._format if tree.dim() == 4 else torch.preserve_format
            return tree.to(self._device, non_blocking=True, memory_format=layout)
        # Classes that move themselves: BatchEncoding, PackedSequence, a graph.
        if hasattr(tree, "to"):
            if computing is None or isinstance(tree, Mapping):
                return tree.to(self._device)
            # Copy this object on the stream that uses it, without overlap: its tensors cannot be
            # found, so record_stream() could not be called on them.
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
    """Tell torch's allocator that a stream uses these tensors, which were made on another stream.

    Otherwise, once Python has dropped the tensors, the allocator could reuse their memory while the
    stream still reads it.
    """
    if isinstance(tree, Tensor) and tree.is_cuda:
        tree.record_stream(computing)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            _record(value, computing)
    elif isinstance(tree, tuple | list):
        for value in tree:
            _record(value, computing)
