"""Saves and restores a rank's random states, as bytes for a checkpoint; and draws random numbers
from other sequences than the one that the script has seeded.
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
    """The states of a process's generators; numpy and cuda are None if they are not in use.

    Attributes:
        cpu: The state of torch's generator for the CPU.
        python: The result of ``random.getstate()``.
        numpy: The result of ``numpy.random.get_state()``.
        cuda: The state of torch's generator for this rank's GPU.
    """

    cpu: Tensor
    python: Any
    numpy: Any
    cuda: Tensor | None


def gather(world: World) -> list[Tensor]:
    """Gather the random states of all ranks on rank 0; a collective.

    These are the states of torch's generators for the CPU and for the rank's GPU, of Python's, and
    of numpy's if the script has imported numpy.

    Args:
        world: The ranks, all of which call this.

    Returns:
        On rank 0 the states by rank, as bytes (uint8); empty on other ranks.
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
    """Restore this rank's random state; a rank without a saved one is seeded anew.

    Args:
        states: The return value of :func:`gather` on rank 0, of any number of ranks.
        world: The ranks that train now.
        number: A seed; each rank without a saved state adds its rank to it.
    """
    if world.rank >= len(states):
        seed(number + world.rank)
        torch.cuda.manual_seed(number + world.rank)
        return
    _set_states(_from_bytes(states[world.rank]), world.device)


def _as_bytes(states: _States) -> Tensor:
    cpu, python, numpy, cuda = states
    # Turn numpy's array into a tensor: torch.load(weights_only=True), which loads a checkpoint,
    # refuses numpy's arrays. torch does little with uint32, so use int64, which holds every uint32.
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
    """Restore the random states after the block, so that numbers drawn in it do not change later
    ones.

    Args:
        world: The ranks; the generator of this rank's device is preserved too.
    """
    states = _get_states(world.device)
    try:
        yield
    finally:
        _set_states(states, world.device)


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Draw random numbers with this seed within the block, also on the GPU in use.

    Afterwards the process's own sequence continues.

    Args:
        number: The seed, any integer from 0.
    """
    # In a forked loader worker CUDA is not initialised, and must not be.
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
    """Seed the generators of the CPU: torch's, Python's, and numpy's if numpy is imported.

    Args:
        number: Any integer from 0.
    """
    # Do not call torch.manual_seed, which also seeds every GPU: a caller that wants to seed a GPU
    # does so itself.
    torch.default_generator.manual_seed(number % 2**63)
    random.seed(number)
    # numpy takes seeds of 32 bits. Do not import it: a script that has not imported numpy draws
    # none of its random numbers.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)


class StepRng:
    """The random numbers of training steps, with a separate sequence on each rank.

    A script seeds all ranks alike, so that they begin with the same weights. With one sequence, all
    ranks would also have the same dropout masks, and the same augmentation if a rank reads without
    workers. Random numbers outside of steps, such as the weights of a new head in a callback, come
    from the script's sequence and stay the same on all ranks.

    With a single rank there is only the script's sequence.
    """

    def __init__(self, world: World) -> None:
        """Create the object; the rank's sequence is seeded at the first step, so that the script
        can set its seeds until then.

        Args:
            world: The ranks.
        """
        self._world = world
        # The state of the sequence that is not in use now, the rank's or the script's; None until
        # the first step.
        self._other: _States | None = None
        self._in_steps = False

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Draw from this rank's sequence within the block, which makes training steps."""
        if self._world.world_size == 1:
            yield
            return
        if self._other is None:
            self._begin()
        with self._swapped():
            yield

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Draw from the script's sequence within the block, which is not part of a training step.

        Callbacks, evaluations and the writing of checkpoints are such blocks. Outside of
        :meth:`steps` this does nothing.
        """
        if not self._in_steps:
            yield
            return
        with self._swapped():
            yield

    def gather(self) -> list[Tensor]:
        """Gather the sequences of all ranks on rank 0, as :func:`gather` does; call it outside of
        steps.
        """
        if self._other is None:
            return []
        return _gather(self._world, self._other)

    def restore(self, states: Sequence[Tensor]) -> None:
        """Restore this rank's sequence; a rank without a saved one begins a new one.

        Args:
            states: The return value of :meth:`gather` on rank 0, of any number of ranks; empty if
                there were no steps.
        """
        if self._world.rank < len(states):
            self._other = _from_bytes(states[self._world.rank])
        elif states:
            self._begin()

    def _begin(self) -> None:
        """Seed this rank's sequence from the state of the script's own sequence and the rank.

        Each generator is seeded from its own state: a script may have seeded only some of them.
        """
        rank = self._world.rank
        # Do not seed from config.seed: two runs whose scripts use different seeds should differ
        # here too.
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
    """A context in which random numbers of the CPU come from a separate sequence; after it the
    rank's own sequence continues, and at the next entry the separate one.

    numpy's global generator makes two normal numbers at a time and keeps one for the next call.
    With numpy 1.24 or newer, entering and leaving the context drop the number that it keeps.
    """

    def __init__(self, number: int) -> None:
        """Seed the sequence; the rank's own sequence does not change.

        Args:
            number: The seed.
        """
        outer = _get_states()
        seed(number)
        # The states that are not in use: within the context those of the rank's own sequence,
        # otherwise those of the separate sequence.
        self._torch, self._python, self._numpy, _ = _get_states()
        _set_states(outer)
        numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        self._exchange = (numpy.get_state, numpy.set_state) if numpy else None
        # Since numpy 1.24 the generator itself can be exchanged. To get and set its state of 624
        # words instead would take 400 µs per micro-batch.
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
    """Drop the normal number that numpy keeps for the next call, as an :class:`IsolatedRng` does at
    its end; with numpy older than 1.24 do nothing.
    """
    # Setting a bit generator, even the one in use, makes numpy forget the number.
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
