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
        """``channels_last``: of tensors of four dimensions; ``beside``: copy while the device
        computes.
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
        """The batches on the device, and what to hand to :meth:`arrived` before they are used."""
        if self._stream is None:
            if not self._is_there:
                batches = [self._moved(batch, None) for batch in batches]
            return batches, None
        computing = torch.cuda.current_stream(self._device)
        # On a stream of its own the copies overlap what the device still computes of the step
        # before.
        with torch.cuda.stream(self._stream):
            return [self._moved(batch, computing) for batch in batches], self._stream.record_event()

    def arrived(self, batches: list[Any], copied: torch.cuda.Event | None) -> None:
        """What the device computes from now on waits until the batches are there."""
        if copied is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(copied)
            _record(batches, computing)

    def _moved(self, tree: Any, computing: torch.cuda.Stream | None) -> Any:
        """The same structure on the device; ``computing``: the stream to be used on, where the copy
        is on another.
        """
        if isinstance(tree, Tensor):
            layout = self._format if tree.dim() == 4 else torch.preserve_format
            return tree.to(self._device, non_blocking=True, memory_format=layout)
        if hasattr(tree, "to"):  # BatchEncoding, PackedSequence, a graph
            if computing is None or isinstance(tree, Mapping):
                return tree.to(self._device)
            with torch.cuda.stream(computing):  # its tensors cannot be found to be recorded
                return tree.to(self._device)
        if isinstance(tree, Mapping):
            return {name: self._moved(value, computing) for name, value in tree.items()}
        if isinstance(tree, tuple | list):
            parts = [self._moved(value, computing) for value in tree]
            if hasattr(tree, "_make"):
                return tree._make(parts)
            return type(tree)(parts)
        return tree


def _record(tree: Any, computing: torch.cuda.Stream) -> None:
    """Else the tensors' memory could be given away while this stream still reads it."""
    if isinstance(tree, Tensor) and tree.is_cuda:
        tree.record_stream(computing)
    elif isinstance(tree, Mapping | tuple | list):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            _record(value, computing)
