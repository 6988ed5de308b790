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

from srunddp.bootstrap.process_group.world import wait_for_gloo_threads
from srunddp.errors import ConfigError
from srunddp.train.config import DataLoaderConfig
from srunddp.train.data.order import Order
from srunddp.train.data.sampler import DistributedBatchSampler, MicroBatch, Reader, ShardAssignment, TensorRows
from srunddp.train.data.streams import Stream, check_same_start
from srunddp.train.data.workers import start_method
from srunddp.train.preemption.signals import ignore_in_worker, signals_blocked

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
        dataloader: DataLoaderConfig,
        *,
        sharded: bool,
        collate: Collate | None,
        weight: Weight | None,
        signals: Sequence[str],
    ) -> None:
        """No worker is started yet.

        Args:
            data, sharded, collate, weight, signals: as for DistributedDataLoader.
            order: of its samples; None where it is iterable.
            assignment: of its samples to the ranks.
            loading: how; ``num_workers`` and ``pin_memory`` None are 0 and False.
        """
        workers = dataloader.num_workers or 0
        self._order, self._assignment, self._sharded, self._signals = order, assignment, sharded, signals
        self._sent = {"data": data, "collate": collate, "weight": weight}
        backend = dist.get_backend() if dist.is_initialized() else "gloo"
        self._method = start_method(dataloader.multiprocessing_context, backend)
        self._forks = workers > 0 and self._method == "fork"
        self._requests = DistributedBatchSampler(assignment)
        self._stream: Stream | None = None
        if isinstance(data, IterableDataset):
            self._stream = Stream(data, assignment, sharded=sharded, drop_last=dataloader.drop_last)
        rows = in_rows(data, collate)
        self._reader = TensorRows(cast(TensorDataset, data)) if rows else Reader(data)
        to_batch = _as_it_is if rows else collate or default_collate
        self._loader: DataLoader[Any] = DataLoader(
            self._stream or self._reader,
            batch_size=None if self._stream else 1,
            batch_sampler=None if self._stream else cast(Any, self._requests),
            collate_fn=partial(_collated, collate=to_batch, weight=weight),
            num_workers=workers,
            prefetch_factor=dataloader.prefetch_factor if workers else None,
            persistent_workers=dataloader.persistent_workers and workers > 0,
            pin_memory=bool(dataloader.pin_memory),
            multiprocessing_context=self._method if workers else None,
            worker_init_fn=partial(ignore_in_worker, signals=signals) if workers else None,
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
        if self._sharded:
            return itertools.islice(parts, start, None)
        return check_same_start(parts) if self._stream and self._assignment.world_size > 1 else parts

    def _start(self) -> Iterator[MicroBatch]:
        if self._forks:
            # A fork amid a thread's beginning or end, as Gloo's do in Python after a collective, may leave the child
            # waiting for ever for a lock of the interpreter's that nobody holds.
            wait_for_gloo_threads()
            self._forks = not self._loader.persistent_workers
        try:
            with signals_blocked(self._signals, self._method), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # below, it is said what and how to mend it
                return iter(self._loader)
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
    batch, own = collate(part.samples), part.own
    value = float(own) if weight is None or not own else _number(weight(batch))
    return MicroBatch(batch, own, part.total, value, part.digest)


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
