"""A copy of a state in the host's memory, so that training may go on while it is written."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor


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
