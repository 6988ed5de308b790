"""A rank's random states, as plain bytes that a checkpoint may hold."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from srunddp.train.world import World


def gather(world: World) -> list[Tensor]:
    """Of all ranks, on rank 0: bytes, uint8; nothing on the others. All ranks call this.

    The states are torch's of the CPU and of this rank's GPU, Python's, and numpy's where it is in use.
    """
    own = _capture(world.device)
    if world.world_size == 1:
        return [own]
    states: list[Any] | None = [None] * world.world_size if world.rank == 0 else None
    dist.gather_object(own, states)
    return states or []


def restore(states: Sequence[Tensor], world: World, number: int) -> None:
    """Go on with this rank's state; a rank that there was none of begins one of its own."""
    if world.rank >= len(states):
        seed(number + world.rank)
        torch.cuda.manual_seed(number + world.rank)
        return
    _restore(states[world.rank], world.device)


@contextmanager
def preserved_rng(world: World) -> Iterator[None]:
    """Random numbers that are drawn in here do not change those that follow."""
    state = _capture(world.device)
    try:
        yield
    finally:
        _restore(state, world.device)


def seed(number: int) -> None:
    """Seed the random numbers of the CPU."""
    torch.default_generator.manual_seed(number % 2**63)  # not torch.manual_seed, which thinks of all GPUs as well
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)


class IsolatedRng:
    """Random numbers of the CPU in here are one sequence of its own; the rank's is unchanged."""

    def __init__(self, number: int) -> None:
        """``number``: the sequence's seed."""
        self._number = number
        self._inner: tuple[Any, ...] | None = None
        self._outer: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._outer = _get_states()
        if self._inner is None:
            seed(self._number)
        else:
            _set_states(self._inner)

    def __exit__(self, *_: object) -> None:
        self._inner = _get_states()
        _set_states(self._outer)


def _get_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None


def _set_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])


def _restore(captured: Tensor, device: torch.device) -> None:
    state = torch.load(io.BytesIO(captured.numpy().tobytes()), weights_only=True)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if state["numpy"] is not None:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


def _capture(device: torch.device) -> Tensor:
    cpu, python, numpy = _get_states()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    if numpy:
        numpy = (numpy[0], torch.from_numpy(numpy[1].astype("int64")), *numpy[2:])
    state = {"torch": cpu, "cuda": cuda, "python": python, "numpy": numpy}
    written = io.BytesIO()
    torch.save(state, written)
    return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)
