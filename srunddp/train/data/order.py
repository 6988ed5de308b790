"""The order of an epoch's samples over all ranks: the same on all ranks, different in
each epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from srunddp.errors import ConfigError, Scope


@runtime_checkable
class Order(Protocol):
    """Says which samples an epoch has, and in which order."""

    def __len__(self) -> int:
        """Return the number of samples per epoch."""

    def indices(self, epoch: int) -> Tensor:
        """Return the indices of an epoch's samples, the same on every rank.

        Args:
            epoch: The number of the epoch; a Trainer counts from 1.

        Returns:
            A tensor of shape (len,), int64, on the CPU.
        """


@dataclass(frozen=True)
class Sequential:
    """All samples, in the order of their indices."""

    length: int

    def __len__(self) -> int:
        return self.length

    def indices(self, epoch: int) -> Tensor:
        """Return 0, 1, 2 and so on, int64 of shape (length,); the same in each epoch."""
        return torch.arange(self.length)


@dataclass(frozen=True)
class Shuffled:
    """All samples, in the order in which :class:`torch.utils.data.DistributedSampler` shuffles them
    before it pads.
    """

    length: int
    seed: int = 0

    def __len__(self) -> int:
        return self.length

    def indices(self, epoch: int) -> Tensor:
        """Return the permutation of an epoch, int64 of shape (length,), different for
        each epoch.
        """
        return torch.randperm(self.length, generator=_generator(self.seed, epoch))


class Weighted:
    """Samples drawn with probabilities proportional to their weights, for classes of very different
    size.

    Unlike ``torch.utils.data.WeightedRandomSampler``, this has no limit of 2**24 samples.
    """

    def __init__(
        self,
        weights: Tensor | Sequence[float],
        num_samples: int | None = None,
        *,
        seed: int | None = None,
        replacement: bool = True,
    ) -> None:
        """Check the weights; nothing is drawn yet.

        Args:
            weights: One per sample of the data set, with any sum; a sample of weight 0 is never
                drawn.
            num_samples: The number of draws per epoch; None for as many as there are weights.
            seed: The seed of the draws; None for that of the loader, which is ``Config.seed`` in a
                Trainer.
            replacement: Whether a sample may be drawn again in the same epoch. If not, samples of
                greater weight tend to come earlier.

        Raises:
            ConfigError: Such draws are not possible.
        """
        self._weights = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
        self._seed = seed
        self._replacement = replacement
        _check_weights(self._weights)
        if num_samples is None:
            self._num_samples = len(self._weights)
        else:
            self._num_samples = num_samples
        _check_draws(self._num_samples, None if replacement else int(self._weights.count_nonzero()))

    @classmethod
    def balanced(
        cls,
        targets: Tensor | Sequence[int],
        num_samples: int | None = None,
        *,
        seed: int | None = None,
        replacement: bool = True,
    ) -> Weighted:
        """Draw all classes equally often: a sample's weight is 1 / the size of its class.

        Args:
            targets: The class of each sample, of shape (samples,).
            num_samples: The number of draws per epoch; None for as many as there are targets.
            seed: The seed of the draws; None for that of the loader.
            replacement: Whether a sample may be drawn again in the same epoch.

        Raises:
            ConfigError: Such draws are not possible.
        """
        classes = torch.as_tensor(targets, device="cpu")
        _, inverse, counts = torch.unique(classes, return_inverse=True, return_counts=True)
        return cls(1 / counts.double()[inverse], num_samples, seed=seed, replacement=replacement)

    def __len__(self) -> int:
        return self._num_samples

    def with_seed(self, seed: int) -> Weighted:
        """Return this order with a seed; unchanged if it has its own seed.

        Args:
            seed: The seed of the loader.
        """
        if self._seed is not None:
            return self
        seeded = copy(self)
        seeded._seed = seed
        return seeded

    def indices(self, epoch: int) -> Tensor:
        """Return the indices drawn for an epoch, int64 of shape (len,), on the CPU."""
        generator = _generator(self._seed or 0, epoch)
        if self._replacement:
            return self._independent(generator)
        # Draw a time for each sample from an exponential distribution whose rate is its weight: the
        # order of the times is that of draws without replacement (Efraimidis and Spirakis 2006).
        # torch.multinomial has a limit of 2**24 samples.
        uniform = torch.rand(len(self._weights), dtype=torch.float64, generator=generator)
        times = -torch.log1p(-uniform) / self._weights
        # A weight of 0 gives an infinite time, but NaN, which argsort could put anywhere, if the
        # draw is 0 too. So set the time.
        times.masked_fill_(self._weights == 0, torch.inf)
        return times.argsort(stable=True)[: self._num_samples]

    def _independent(self, generator: torch.Generator) -> Tensor:
        ends = self._weights.cumsum(0)
        draws = torch.rand(self._num_samples, dtype=torch.float64, generator=generator) * ends[-1]
        found = torch.searchsorted(ends, draws, right=True)
        # A draw just below 1 may be rounded up to the sum of all weights, which is in no sample's
        # interval: take the last sample that has a weight.
        return found.clamp_(max=int(self._weights.nonzero()[-1]))


def check_order(order: Order, samples: int) -> None:
    """Check that the first epoch of an order has as many samples as its length says, and only
    indices of the data set.

    Args:
        order: The user's order.
        samples: The number of samples in the data set.

    Raises:
        ConfigError: The number or an index is wrong.
    """
    objection = _objection(order, samples)
    if objection is None:
        return
    raise ConfigError(
        objection,
        expected=(
            f"__len__ and indices(), int64 of that length, from 0 to {samples - 1} for {samples}"
            " samples"
        ),
        hint="make the order of this data set",
        scope=Scope.JOB,
    )


def _objection(order: Order, samples: int) -> str | None:
    """Return a phrase that says what is wrong with an order; None if nothing is wrong."""
    if not isinstance(order, Order):
        return f"an order that is a {type(order).__name__}"
    indices = order.indices(1)
    length = len(order)
    if indices.dtype != torch.int64 or indices.shape != (length,) or length == 0:
        shape = tuple(indices.shape)
        return f"the order's indices: {indices.dtype} of shape {shape}, and its length {length}"
    least = int(indices.min())
    most = int(indices.max())
    if least < 0 or most >= samples:
        return f"the order's indices: from {least} to {most}"
    return None


def _generator(seed: int, epoch: int) -> torch.Generator:
    # Seed by the sum of seed and epoch, as DistributedSampler does, so that a script that used
    # DistributedSampler before keeps its order.
    return torch.Generator().manual_seed(seed + epoch)


def _check_weights(weights: Tensor) -> None:
    found: str | None = None
    wrong = ~(weights.isfinite() & (weights >= 0))
    if weights.dim() != 1 or len(weights) == 0:
        found = f"weights of shape {tuple(weights.shape)}"
    elif bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        found = f"weight {weights[first].item()} of sample {first}"
    # Check the sum too, by which draws are scaled: that of finite weights may be infinite.
    elif not 0 < float(weights.sum()) < torch.inf:
        found = f"weights with the sum {float(weights.sum())}"
    if found:
        raise ConfigError(
            found,
            expected="a finite number of at least 0 per sample, and one above 0",
            hint="check how the weights are computed",
        )


def _check_draws(num_samples: int, most: int | None) -> None:
    """Check that this many samples can be drawn.

    Args:
        num_samples: The number of draws per epoch.
        most: How many different samples can be drawn; None if samples may be drawn again.

    Raises:
        ConfigError: There are not enough samples.
    """
    if num_samples < 1 or (most is not None and num_samples > most):
        if most is None:
            limit = ""
        else:
            limit = f", and without replacement at most the {most} samples with a weight above 0"
        raise ConfigError(
            f"num_samples is {num_samples}", expected=f"at least 1{limit}", hint="correct it"
        )
