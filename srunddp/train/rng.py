"""A rank's random states, as plain bytes that a checkpoint may hold; and further sequences of
random numbers beside the one that the script has seeded.
"""

import hashlib
import importlib
import io
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from srunddp.train.world import World

_CPU = torch.device("cpu")


class _States(NamedTuple):
    """Where the generators of a process stand; numpy and cuda are None where they are not in use.

    Attributes:
        cpu: torch's of the CPU.
        python: As ``random.getstate()`` gives it.
        numpy: As ``numpy.random.get_state()`` gives it.
        cuda: torch's of this rank's GPU.
    """

    cpu: Tensor
    python: Any
    numpy: Any
    cuda: Tensor | None


def gather(world: World) -> list[Tensor]:
    """Return the random states of all ranks, on rank 0; a collective.

    They are torch's of the CPU and of this rank's GPU, Python's, and numpy's where it is in use.

    Args:
        world: All of its ranks call this.

    Returns:
        By rank, as bytes (uint8); nothing on the other ranks.
    """
    return _gather(world, _get_states(world.device))


def _gather(world: World, own_states: _States) -> list[Tensor]:
    own = _as_bytes(own_states)
    if world.world_size == 1:
        return [own]
    states: list[Any] | None
    if world.rank == 0:
        states = [None] * world.world_size
    else:
        states = None
    dist.gather_object(own, states)
    return states or []


def restore(states: Sequence[Tensor], world: World, number: int) -> None:
    """Go on with this rank's state; a rank that there was none of begins one of its own.

    Args:
        states: From :func:`gather`, of any number of ranks.
        world: The ranks now.
        number: The seed of those that begin, to which each adds its rank.
    """
    if world.rank >= len(states):
        seed(number + world.rank)
        torch.cuda.manual_seed(number + world.rank)
        return
    _set_states(_from_bytes(states[world.rank]), world.device)


def _as_bytes(states: _States) -> Tensor:
    cpu, python, numpy, cuda = states
    # A checkpoint is loaded by torch.load(weights_only=True), which refuses numpy's arrays. torch
    # has no arithmetic on uint32, but int64 holds it.
    if numpy:
        numpy = (numpy[0], torch.from_numpy(numpy[1].astype("int64")), *numpy[2:])
    written = io.BytesIO()
    torch.save((cpu, python, numpy, cuda), written)
    return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)


def _from_bytes(states: Tensor) -> _States:
    loaded = _States(*torch.load(io.BytesIO(states.numpy().tobytes()), weights_only=True))
    if loaded.numpy is None:
        return loaded
    kind, key, *rest = loaded.numpy
    return loaded._replace(numpy=(kind, key.numpy().astype("uint32"), *rest))


@contextmanager
def preserved_rng(world: World) -> Iterator[None]:
    """Let random numbers that are drawn within not change those that follow.

    Args:
        world: Whose device's generator is kept, too.
    """
    states = _get_states(world.device)
    try:
        yield
    finally:
        _set_states(states, world.device)


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Draw random numbers of this seed within, on the GPU in use as well.

    The process's own go on afterwards.

    Args:
        number: The seed, any whole number from 0.
    """
    # In a loader worker that was forked CUDA is not initialised, and must not be.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = _CPU
    states = _get_states(device)
    seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    try:
        yield
    finally:
        _set_states(states, device)


def seed(number: int) -> None:
    """Seed the random numbers of the CPU: torch's, Python's, and numpy's where it is in use.

    Args:
        number: Any whole number from 0.
    """
    # Not torch.manual_seed, which would also seed every GPU; callers that want that do it.
    torch.default_generator.manual_seed(number % 2**63)
    random.seed(number)
    # numpy takes seeds of 32 bits. Not imported here, as a script without it draws no such numbers.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)


class StepRng:
    """The random numbers of training steps, a sequence of its own on each rank.

    A script seeds all ranks alike, so that they begin with the same weights. They would also have
    the same dropout masks, and the same augmentation where the rank itself reads. What is drawn
    outside of steps, such as a new head's weights in a callback, goes on alike on all ranks.

    One rank alone has but one sequence.
    """

    def __init__(self, world: World) -> None:
        """Begin at the first step: a script may seed itself until then.

        Args:
            world: The ranks.
        """
        self._world = world
        # The sequence that nobody draws from now; None until the first step.
        self._other: _States | None = None
        self._in_steps = False

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Have what is drawn within, in training steps, come from this rank's sequence."""
        if self._world.world_size == 1:
            yield
            return
        if self._other is None:
            self._begin()
        with self._swapped():
            yield

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Have what is drawn within, amid steps but in none, come from the script's own numbers.

        Such as in a callback.
        """
        if not self._in_steps:
            yield
            return
        with self._swapped():
            yield

    def gather(self) -> list[Tensor]:
        """Return the sequences of all ranks on rank 0, as :func:`gather` does; outside of steps."""
        if self._other is None:
            return []
        return _gather(self._world, self._other)

    def restore(self, states: Sequence[Tensor]) -> None:
        """Go on with this rank's sequence; a rank that there was none of begins one of its own.

        Args:
            states: From :meth:`gather`, of any number of ranks; empty where there were no steps.
        """
        if self._world.rank < len(states):
            self._other = _from_bytes(states[self._world.rank])
        elif states:
            self._begin()

    def _begin(self) -> None:
        """Seed this rank's sequence by where the script's own stands, and the rank.

        Each generator goes by its own state: a script may have seeded some of them only.
        """
        rank = self._world.rank
        # Not by config.seed: two runs whose scripts seed themselves differently shall differ here,
        # too.
        now = _get_states(self._world.device)
        torch_seed = _seed_of(now.cpu.numpy().tobytes(), rank)
        torch.default_generator.manual_seed(torch_seed)
        if self._world.device.type == "cuda":
            torch.cuda.manual_seed(torch_seed)
        random.seed(_seed_of(repr(now.python).encode(), rank))
        if now.numpy:
            numpy_random: Any = importlib.import_module("numpy.random")
            numpy_random.seed(_seed_of(now.numpy[1].tobytes(), rank) % 2**32)
        self._other = _get_states(self._world.device)
        _set_states(now, self._world.device)

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        assert self._other is not None
        now = _get_states(self._world.device)
        _set_states(self._other, self._world.device)
        self._other = now
        self._in_steps = not self._in_steps


class IsolatedRng:
    """Random numbers of the CPU in here are one sequence of its own; the rank's go on after it.

    numpy's global generator draws two normal numbers at a time. One that it holds back is lost
    here.
    """

    def __init__(self, number: int) -> None:
        """Seed the sequence, and leave the rank's own numbers as they are.

        Args:
            number: The seed.
        """
        outer = _get_states()
        seed(number)
        # The states that are not in use: ours outside of the context, the rank's own within.
        self._torch, self._python, self._numpy, _ = _get_states()
        _set_states(outer)
        numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        self._exchange = (numpy.get_state, numpy.set_state) if numpy else None
        # From numpy 1.24 on the generator itself can be exchanged. To get and set its state, of 624
        # words, would take 400 us for each micro-batch.
        if hasattr(numpy, "set_bit_generator"):
            self._numpy = numpy.MT19937(number % 2**32)
            self._exchange = numpy.get_bit_generator, numpy.set_bit_generator

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        ours = self._torch, self._python
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        torch.set_rng_state(ours[0])
        random.setstate(ours[1])
        if self._exchange:
            get, exchange = self._exchange
            own = self._numpy
            self._numpy = get()
            exchange(own)


def _seed_of(state: bytes, rank: int) -> int:
    digest = hashlib.blake2b(state, digest_size=7, salt=rank.to_bytes(8, "big")).digest()
    return int.from_bytes(digest, "big")


def forget_normal() -> None:
    """Lose the normal number that numpy holds back, as the end of an :class:`IsolatedRng` does."""
    # To set a bit generator, even the one that is in use, has numpy forget it.
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    if hasattr(numpy, "set_bit_generator"):
        numpy.set_bit_generator(numpy.get_bit_generator())


def _get_states(device: torch.device = _CPU) -> _States:
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return _States(
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_state() if numpy else None,
        cuda,
    )


def _set_states(states: _States, device: torch.device = _CPU) -> None:
    cpu, python, numpy, cuda = states
    torch.set_rng_state(cpu)
    random.setstate(python)
    if numpy:
        importlib.import_module("numpy.random").set_state(numpy)
    if cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(cuda, device)
