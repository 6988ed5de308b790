"""Micro-batches of this rank in the host's memory, read by itself or by torch's worker processes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from srunddp.bootstrap.process_group.world import wait_for_gloo_threads
from srunddp.errors import ConfigError
from srunddp.train.config import LoadingConfig
from srunddp.train.data.order import Order
from srunddp.train.data.sampler import DistributedBatchSampler, MicroBatch, Reader, ShardAssignment, TensorRows
from srunddp.train.data.streams import Stream, check_same_start
from srunddp.train.data.workers import start_method
from srunddp.train.preemption.signals import ignore_in_worker, signals_blocked

Collate = Callable[[list[Any]], Any]
Weight = Callable[[Any], float | Tensor]  # of what collate made


@dataclass(frozen=True)
class Source:
    """What is read.

    Attributes:
        data: the data set; sharded: it is iterable, and splits itself by rank and worker.
        order: of its samples; None where it is iterable.
        collate: makes a batch of a list of samples; None for torch's way.
        weight: of what collate made; None for its samples.
    """

    data: Dataset[Any]
    order: Order | None
    sharded: bool
    collate: Collate | None
    weight: Weight | None

    @property
    def in_rows(self) -> bool:
        """Tensors in memory, whose batches are one indexing of each; a class derived from TensorDataset may do more."""
        return type(self.data) is TensorDataset and self.collate is None

    @property
    def on_gpu(self) -> bool:
        """Its batches are there already, and can be neither pinned nor copied beside."""
        return self.in_rows and any(tensor.is_cuda for tensor in cast(TensorDataset, self.data).tensors)


class BatchReader:
    """Reads the micro-batches of an epoch, again each epoch by the same workers."""

    def __init__(
        self, source: Source, assignment: ShardAssignment, loading: LoadingConfig, signals: Sequence[str]
    ) -> None:
        """No worker is started yet.

        Args:
            source: what is read.
            assignment: of its samples to the ranks.
            loading: how; ``num_workers`` and ``pin_memory`` None are 0 and False.
            signals: that are for this rank alone, not for its workers.
        """
        num_workers = loading.num_workers or 0
        self._source, self._assignment, self._signals = source, assignment, signals
        self._method = start_method(
            loading.multiprocessing_context, dist.get_backend() if dist.is_initialized() else "gloo"
        )
        self._forks = num_workers > 0 and self._method == "fork"
        self._requests = DistributedBatchSampler(assignment)
        self._stream: Stream | None = None
        if isinstance(source.data, IterableDataset):
            self._stream = Stream(source.data, assignment, sharded=source.sharded, drop_last=loading.drop_last)
        self._reader = TensorRows(cast(TensorDataset, source.data)) if source.in_rows else Reader(source.data)
        collate = _as_it_is if source.in_rows else source.collate or default_collate
        self._loader: DataLoader[Any] = DataLoader(
            self._stream or self._reader,
            batch_size=None if self._stream else 1,
            batch_sampler=None if self._stream else cast(Any, self._requests),
            collate_fn=partial(_collated, collate=collate, weight=source.weight),
            num_workers=num_workers,
            prefetch_factor=loading.prefetch_factor if num_workers else None,
            persistent_workers=loading.persistent_workers and num_workers > 0,
            pin_memory=bool(loading.pin_memory),
            multiprocessing_context=self._method if num_workers else None,
            worker_init_fn=partial(ignore_in_worker, signals=signals) if num_workers else None,
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
        elif self._source.order is not None:
            self._requests.begin(self._source.order.indices(epoch), epoch, start)
            self._reader.begin(epoch)
        parts = self._start()
        if self._source.sharded:
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
        for name in ("data", "collate", "weight"):
            value = getattr(self._source, name)
            try:
                ForkingPickler.dumps(value)
            except Exception as error:
                kind = getattr(value, "__qualname__", type(value).__qualname__)
                raise ConfigError(
                    f"{name}, {kind}, cannot be sent to loader workers by pickle: {error}",
                    expected=f"what pickle takes, as workers start by {self._method}",
                    hint="define it at the top level of a module, or set multiprocessing_context=fork or num_workers=0",
                ) from error


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
