"""Batches of this rank, on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from srunddp.bootstrap.process_group.world import wait_for_gloo_threads
from srunddp.errors import ConfigError
from srunddp.train.config import Config, LoadingConfig
from srunddp.train.data.order import Order, Sequential, Shuffled
from srunddp.train.data.sampler import (
    DistributedBatchSampler,
    Reader,
    ShardAssignment,
    ShardedIterable,
    TensorRows,
    length_of,
)
from srunddp.train.data.workers import default_workers, start_method
from srunddp.train.preemption.signals import ignore_in_worker, signals_blocked
from srunddp.train.world import World


class Batch(NamedTuple):
    """One rank's part of a micro-batch, on the device.

    Attributes:
        inputs, targets: of this rank's samples.
        own: samples that count: all, or none where another rank's stands in; total: the same over all ranks.
    """

    inputs: Any
    targets: Any
    own: int
    total: int


class StepBatches(NamedTuple):
    """The micro-batches of one optimizer step.

    Attributes:
        batches: of this rank; total: their samples over all ranks.
        copied: when they are on the device; None where they are now.
    """

    batches: list[Batch]
    total: int
    copied: torch.cuda.Event | None


class DeviceLoader:
    """One data set, read again each epoch by the same workers."""

    def __init__(
        self,
        data: Dataset[Any],
        order: Order | None,
        world: World,
        loading: LoadingConfig,
        *,
        assignment: ShardAssignment,
        num_workers: int,
        accumulation: int = 1,
        signals: Sequence[str] = (),
        collate: Callable[[Any], Any] | None = None,
        channels_last: bool = False,
    ) -> None:
        """Args:
        order: of the samples of an epoch; None where the data set is iterable.
        assignment: of the samples to the ranks; num_workers: reading processes; accumulation: micro-batches per step.
        signals: that are for this rank alone, not for its workers.
        collate: makes a batch of a list of samples; None for torch's.
        """
        self._signals = signals
        self._method = start_method(loading, dist.get_backend() if dist.is_initialized() else "gloo")
        self._order = order
        self._length = length_of(data) if order is None else len(order)
        self._accumulation, self._step = accumulation, accumulation * assignment.global_batch_size
        self._drop_last = loading.drop_last
        self._requests = DistributedBatchSampler(assignment)
        self._stream = ShardedIterable(data, assignment) if isinstance(data, IterableDataset) else None
        self._device = world.device
        self._format = torch.channels_last if channels_last else torch.preserve_format
        self._on_host = world.device.type == "cpu" and not channels_last
        self._rows = type(data) is TensorDataset and collate is None  # a class derived from it may read otherwise
        # What is on a GPU already can be neither pinned nor copied beside.
        there = self._rows and any(tensor.is_cuda for tensor in cast(TensorDataset, data).tensors)
        beside = world.device.type == "cuda" and not there
        self._side = torch.cuda.Stream(world.device) if beside else None  # type: ignore[no-untyped-call]
        self._pin = beside if loading.pin_memory is None else loading.pin_memory and not there
        # With workers only: else what reading draws at random would depend on how far ahead it is.
        self._ahead = self._side is not None and num_workers > 0
        self._forks = num_workers > 0 and self._method == "fork"
        self._loader = self._make_loader(data, loading, num_workers, collate)

    def _make_loader(
        self, data: Dataset[Any], loading: LoadingConfig, num_workers: int, collate: Callable[[Any], Any] | None
    ) -> DataLoader[Any]:
        indexed = TensorRows(cast(TensorDataset, data)) if self._rows else Reader(data)
        return DataLoader(
            indexed if self._stream is None else self._stream,
            batch_size=None if self._stream else 1,
            batch_sampler=None if self._stream else cast(Any, self._requests),
            collate_fn=partial(_collated, collate=_as_it_is if self._rows else collate or default_collate),
            num_workers=num_workers,
            prefetch_factor=loading.prefetch_factor if num_workers else None,
            persistent_workers=loading.persistent_workers and num_workers > 0,
            pin_memory=self._pin,
            multiprocessing_context=self._method if num_workers else None,
            worker_init_fn=partial(ignore_in_worker, signals=self._signals) if num_workers else None,
            # Of its own: torch would draw from the rank's, at moments that a resumed run does not share.
            generator=torch.Generator(),
        )

    def steps_left(self, start: int) -> int | None:
        """Steps from the sample ``start`` to the end of an epoch; None where that is not known."""
        if self._length is None:
            return None
        left = max(0, self._length - start)  # the data may have become less since the checkpoint
        return left // self._step if self._drop_last else -(-left // self._step)

    def steps(self, epoch: int = 0, start: int = 0) -> Iterator[StepBatches]:
        """The steps of an epoch, from the sample ``start`` of its order on."""
        if self._stream:
            self._stream.begin(epoch, start)
        elif self._order is not None:
            self._requests.begin(self._order.indices(epoch), epoch, start)
        if self._forks:
            # A fork amid a thread's beginning or end, as Gloo's do in Python after a collective, may leave the child
            # waiting for ever for a lock of the interpreter's that nobody holds.
            wait_for_gloo_threads()
            self._forks = not self._loader.persistent_workers
        with signals_blocked(self._signals, self._method):
            loader = iter(self._loader)
        sent = (self._send(parts, total) for parts, total in self._grouped(loader))
        if self._side is None:
            return sent
        return map(self._arrived, _one_ahead(sent) if self._ahead else sent)

    def _grouped(self, loader: Iterator[Any]) -> Iterator[tuple[list[Any], int]]:
        parts, total = [], 0
        for part in loader:
            parts.append(part)
            total += part[-1]
            if len(parts) == self._accumulation:
                if total == self._step or not self._drop_last:
                    yield parts, total
                parts, total = [], 0
        if parts and not self._drop_last:
            yield parts, total

    def _send(self, parts: list[Any], total: int) -> StepBatches:
        if self._side is None:
            return StepBatches([_batch(self._moved(data), own, of_all) for data, own, of_all in parts], total, None)
        # On a stream of its own the copies overlap what the device still computes of the step before.
        with torch.cuda.stream(self._side):
            batches = [_batch(self._moved(data), own, of_all) for data, own, of_all in parts]
            return StepBatches(batches, total, self._side.record_event())

    def _arrived(self, step: StepBatches) -> StepBatches:
        if step.copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(step.copied)
            for batch in step.batches:
                # Else the memory could be given away while this stream still reads it.
                _each_tensor((batch.inputs, batch.targets), lambda tensor: tensor.record_stream(current))
        return step

    def _moved(self, tree: Any) -> Any:
        if self._on_host:
            return tree

        def move(tensor: Tensor) -> Tensor:
            layout = self._format if tensor.dim() == 4 else torch.preserve_format
            return tensor.to(self._device, non_blocking=True, memory_format=layout)

        return _each_tensor(tree, move)


def _collated(part: Any, collate: Callable[[Any], Any]) -> tuple[Any, int, int]:
    return collate(part.samples), part.own, part.total


def _as_it_is(batch: Any) -> Any:
    return batch


def _one_ahead(steps: Iterator[StepBatches]) -> Iterator[StepBatches]:
    """Send the next step to the device before this one is computed."""
    upcoming = next(steps, None)
    while upcoming is not None:
        present, upcoming = upcoming, next(steps, None)
        yield present


def _batch(data: Any, own: int, total: int) -> Batch:
    if isinstance(data, list | tuple) and len(data) == 2:
        return Batch(data[0], data[1], own, total)
    parts = data if isinstance(data, list | tuple) else [data]
    raise ConfigError(
        f"a batch of {[type(part).__name__ for part in parts]}",
        expected="two parts, inputs and targets",
        hint="let the data set's __getitem__, or collate, return such a pair",
    )


def _each_tensor(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if hasattr(tree, "to"):
        raise ConfigError(
            f"a {type(tree).__name__} in a batch for a GPU",
            expected="tensors in tuples, lists and dicts",
            hint="let collate take it apart, and the model put it together",
        )
    if isinstance(tree, Mapping):
        return {name: _each_tensor(value, function) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_each_tensor(value, function) for value in tree]
        return tree._make(parts) if hasattr(tree, "_make") else type(tree)(parts)
    return tree


def make_loaders(
    world: World,
    config: Config,
    train_data: Dataset[Any],
    test_data: Dataset[Any] | None,
    order: Order | None,
    collate: Callable[[Any], Any] | None,
    cpus: int,
) -> tuple[DeviceLoader, DeviceLoader | None]:
    """Of the training and of the test data; ``cpus`` are those of this rank."""

    def make(data: Dataset[Any], order: Order | None, accumulation: int, loading: LoadingConfig) -> DeviceLoader:
        return DeviceLoader(
            data,
            order,
            world,
            loading,
            assignment=ShardAssignment(world.rank, world.world_size, config.batch_size, config.seed),
            num_workers=default_workers(loading, cpus, isinstance(data, TensorDataset)),
            accumulation=accumulation,
            signals=config.preemption.signals,
            collate=collate,
            channels_last=config.ddp.channels_last,
        )

    def default_order(data: Dataset[Any], kind: Callable[[int], Order]) -> Order | None:
        return None if isinstance(data, IterableDataset) else kind(len(cast(Sized, data)))

    if order is None:
        order = default_order(train_data, lambda length: Shuffled(length, config.seed))
    train = make(train_data, order, config.accumulation, config.loading)
    if test_data is None:
        return train, None
    return train, make(test_data, default_order(test_data, Sequential), 1, replace(config.loading, drop_last=False))
