"""The way of batches from the host's memory to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class DeviceTransfer:
    """Copies batches of any structure to a device, on a stream of its own where that is a GPU.

    Moved are tensors in mappings, tuples and lists, and whatever has a ``to(device)``; all else stays as it is.
    """

    def __init__(self, device: torch.device, *, channels_last: bool = False, beside: bool = False) -> None:
        """``channels_last``: of tensors of four dimensions; ``beside``: copy while the device computes."""
        self._device = device
        self._format = torch.channels_last if channels_last else torch.preserve_format
        self._is_there = device.type == "cpu" and not channels_last
        self._stream = torch.cuda.Stream(device) if beside else None  # type: ignore[no-untyped-call]

    def send(self, batches: list[Any]) -> tuple[list[Any], torch.cuda.Event | None]:
        """The batches on the device, and what to hand to :meth:`arrived` before they are used."""
        if self._stream is None:
            return batches if self._is_there else [self._moved(batch, None) for batch in batches], None
        computing = torch.cuda.current_stream(self._device)
        # On a stream of its own the copies overlap what the device still computes of the step before.
        with torch.cuda.stream(self._stream):
            return [self._moved(batch, computing) for batch in batches], self._stream.record_event()

    def arrived(self, batches: list[Any], copied: torch.cuda.Event | None) -> None:
        """What the device computes from now on waits until the batches are there."""
        if copied is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(copied)
            _record(batches, computing)

    def _moved(self, tree: Any, computing: torch.cuda.Stream | None) -> Any:
        def move(tensor: Tensor) -> Tensor:
            layout = self._format if tensor.dim() == 4 else torch.preserve_format
            return tensor.to(self._device, non_blocking=True, memory_format=layout)

        def move_object(value: Any) -> Any:
            if computing is None or isinstance(value, Mapping):
                return value.to(self._device)
            with torch.cuda.stream(computing):  # its tensors cannot be found to be recorded
                return value.to(self._device)

        return _mapped(tree, move, move_object)


def _record(tree: Any, computing: torch.cuda.Stream) -> None:
    """Else the tensors' memory could be given away while this stream still reads it."""
    if isinstance(tree, Tensor) and tree.is_cuda:
        tree.record_stream(computing)
    elif isinstance(tree, Mapping | tuple | list):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            _record(value, computing)


def _mapped(tree: Any, of_tensor: Callable[[Tensor], Any], of_object: Callable[[Any], Any]) -> Any:
    """The same structure of what the functions return for its tensors, and for what else has a ``to``."""
    if isinstance(tree, Tensor):
        return of_tensor(tree)
    if hasattr(tree, "to"):  # BatchEncoding, PackedSequence, a graph
        return of_object(tree)
    if isinstance(tree, Mapping):
        return {name: _mapped(value, of_tensor, of_object) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_mapped(value, of_tensor, of_object) for value in tree]
        return tree._make(parts) if hasattr(tree, "_make") else type(tree)(parts)
    return tree
