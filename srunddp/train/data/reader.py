"""Micro-batches of this rank in the host's memory, read by itself or by torch's worker processes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from srunddp.errors import ConfigError
from srunddp.train.data.order import Order
from srunddp.train.data.sampler import DistributedBatchSampler, MicroBatch, Reader, ShardAssignment
from srunddp.train.data.streams import Stream, check_same_start
from srunddp.train.data.workers import start_method
from srunddp.train.preemption.signals import iterate
from srunddp.train.world import World

Collate = Callable[[list[Any]], Any]
Weight: TypeAlias = Callable[[Any], float | Tensor]
"""``weight(batch)``: by how much the mean loss of a batch counts; of what collate made, on the host."""


class BatchReader:
    """Reads the micro-batches of an epoch, again each epoch by the same workers."""

    def __init__(
        self,
        data: Dataset[Any],
        order: Order | None,
        assignment: ShardAssignment,
        *,
        world: World,
        collate: Collate | None,
        weight: Weight | None,
        signals: Sequence[str],
        num_workers: int,
        prefetch_factor: int | None,
        persistent_workers: bool,
        pin_memory: bool,
        multiprocessing_context: str | None,
    ) -> None:
        """No worker is started yet. The other arguments are those of DistributedDataLoader.

        Args:
            order: of its samples; None where it is iterable.
            assignment: of its samples to the ranks.
        """
        self._order, self._assignment, self._world, self._signals = order, assignment, world, signals
        self._sent = {"data": data, "collate": collate, "weight": weight}
        backend = dist.get_backend() if dist.is_initialized() else "gloo"
        self._method = start_method(multiprocessing_context, backend)
        self._requests = DistributedBatchSampler(assignment)
        rows = in_rows(data, collate)
        self._reader = Reader(data, rows=rows)
        self._stream = Stream(data, assignment) if isinstance(data, IterableDataset) else None
        to_batch = _as_it_is if rows else collate or default_collate
        self._loader: DataLoader[Any] = DataLoader(
            self._stream or self._reader,
            batch_size=None if self._stream else 1,
            batch_sampler=None if self._stream else cast(Any, self._requests),
            collate_fn=partial(_collated, collate=to_batch, weight=weight),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers and num_workers > 0,
            pin_memory=pin_memory,
            multiprocessing_context=self._method if num_workers else None,
            # Of its own: torch would draw from the rank's, at moments that a resumed run does not share.
            generator=torch.Generator(),
        )

    def read(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        """Those of an epoch that are left; the workers start at once.

        Args:
            epoch: which decides the order and what is drawn at random.
            start: samples of all ranks that are passed over; of a sharded data set, this rank's micro-batches.
        """
        if self._stream:
            self._stream.begin(epoch, start)
        elif self._order is not None:
            self._requests.begin(self._order.indices(epoch), epoch, start)
            self._reader.begin(epoch)
        parts = self._start()
        if self._assignment.sharded:
            return itertools.islice(parts, start, None)
        return check_same_start(parts, self._world) if self._stream else parts

    def _start(self) -> Iterator[MicroBatch]:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # below, it is said what and how to mend it
                return iterate(self._loader, self._signals)
        except Exception:
            if self._method != "fork":
                self._check_pickled()
            raise

    def _check_pickled(self) -> None:
        """Workers that are not forked are sent what they use.

        Raises:
            ConfigError: this cannot be sent.
        """
        for name, value in self._sent.items():
            try:
                ForkingPickler.dumps(value)
            except Exception as error:
                kind = getattr(value, "__qualname__", type(value).__qualname__)
                raise ConfigError(
                    f"{name}, {kind}, cannot be sent to loader workers by pickle: {error}",
                    expected=f"what pickle takes, as workers start by {self._method}",
                    hint="define it at the top level of a module, or set multiprocessing_context=fork or num_workers=0",
                ) from error


def in_rows(data: Dataset[Any], collate: Collate | None) -> bool:
    """Tensors in memory, whose batches are one indexing of each; a class derived from TensorDataset may do more."""
    return type(data) is TensorDataset and collate is None


def _collated(part: MicroBatch, collate: Collate, weight: Weight | None) -> MicroBatch:
    if part.samples is None:
        return part
    batch = collate(part.samples)
    value = float(part.own) if weight is None or not part.own else _number(weight(batch))
    return part._replace(samples=batch, weight=value)


def _number(value: Any) -> float | str:
    """Of a weight, or what was found instead; raised here, an error would reach the rank as a worker's traceback."""
    if isinstance(value, Tensor) and value.dim():
        return f"a tensor of shape {tuple(value.shape)}"
    try:
        return float(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"


def _as_it_is(batch: Any) -> Any:
    return batch
