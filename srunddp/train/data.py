"""Batches of this rank, on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from srunddp.errors import ConfigError
from srunddp.train.config import Config, LoadingConfig
from srunddp.train.order import Order, Sequential, Shuffled
from srunddp.train.preemption import shield_worker, shielded
from srunddp.train.reading import Reader, Rows, Stream
from srunddp.train.shares import Deal, Requests
from srunddp.train.workers import default_workers, start_method
from srunddp.train.world import World


@dataclass(frozen=True)
class Batch:
    """One rank's part of a micro-batch, on the device.

    Attributes:
        inputs, targets: of this rank's samples.
        own: samples that count: all, or none where another rank's stands in; count: the same over all ranks.
    """

    inputs: Any
    targets: Any
    own: int
    count: int


@dataclass(frozen=True)
class _Sent:
    """A step's batches on their way to the device, and when they are there."""

    batches: list[Batch]
    copied: torch.cuda.Event | None


class Feed:
    """One data set, read again each epoch by the same workers."""

    def __init__(
        self,
        data: Dataset[Any],
        order: Order | None,
        world: World,
        loading: LoadingConfig,
        *,
        deal: Deal,
        num_workers: int,
        accumulation: int = 1,
        signals: Sequence[str] = (),
        collate: Callable[[Any], Any] | None = None,
        channels_last: bool = False,
    ) -> None:
        """Args:
        order: of the samples of an epoch; None where the data set is iterable.
        deal: of the samples to the ranks; num_workers: reading processes; accumulation: micro-batches per step.
        signals: that are for this rank alone, not for its workers.
        collate: makes a batch of a list of samples; None for torch's.
        """
        self._signals = signals
        self._method = start_method(loading, dist.get_backend() if dist.is_initialized() else "gloo")
        self._order = order
        self._accumulation, self._step = accumulation, accumulation * deal.together
        self._drop_last = loading.drop_last
        self._requests = Requests(deal)
        self._stream = Stream(data, deal) if isinstance(data, IterableDataset) else None
        self._device = world.device
        self._format = torch.channels_last if channels_last else torch.preserve_format
        self._side = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # With workers only: else what reading draws at random would depend on how far ahead it is.
        self._ahead = self._side is not None and num_workers > 0
        self._loader = self._make_loader(data, loading, num_workers, collate)

    def _make_loader(
        self, data: Dataset[Any], loading: LoadingConfig, num_workers: int, collate: Callable[[Any], Any] | None
    ) -> DataLoader[Any]:
        in_rows = type(data) is TensorDataset and collate is None  # a class derived from it may read otherwise
        indexed = Rows(cast(TensorDataset, data)) if in_rows else Reader(data)
        pin = self._side is not None if loading.pin_memory is None else loading.pin_memory
        return DataLoader(
            indexed if self._stream is None else self._stream,
            batch_size=None if self._stream else 1,
            batch_sampler=None if self._stream else cast(Any, self._requests),
            collate_fn=_Collate(_as_it_is if in_rows else collate or default_collate),
            num_workers=num_workers,
            prefetch_factor=loading.prefetch_factor if num_workers else None,
            persistent_workers=loading.persistent_workers and num_workers > 0,
            pin_memory=pin,
            multiprocessing_context=self._method if num_workers else None,
            worker_init_fn=partial(shield_worker, signals=self._signals) if num_workers else None,
            # Of its own: torch would draw from the rank's, at moments that a resumed run does not share.
            generator=torch.Generator(),
        )

    @property
    def samples(self) -> int | None:
        """Of an epoch, over all ranks; None where that is not known."""
        return None if self._order is None else len(self._order)

    def steps_left(self, start: int) -> int | None:
        """Steps from the sample ``start`` to the end of an epoch; None where that is not known."""
        if self.samples is None:
            return None
        left = self.samples - start
        return left // self._step if self._drop_last else -(-left // self._step)

    def steps(self, epoch: int = 0, start: int = 0) -> Iterator[list[Batch]]:
        """The micro-batches of each step of an epoch, from the sample ``start`` of its order on."""
        if self._stream:
            self._stream.begin(epoch, start)
        elif self._order is not None:
            self._requests.begin(self._order.indices(epoch), epoch, start)
        with shielded(self._signals, self._method):
            batches = iter(self._loader)
        sent = map(self._send, self._grouped(batches))
        return map(self._arrived, _one_ahead(sent) if self._ahead else sent)

    def _grouped(self, loader: Iterator[Any]) -> Iterator[list[Any]]:
        step, count = [], 0
        for part in loader:
            step.append(part)
            count += part[-1]
            if len(step) == self._accumulation:
                if count == self._step or not self._drop_last:
                    yield step
                step, count = [], 0
        if step and not self._drop_last:
            yield step

    def _send(self, step: list[tuple[Any, int, int]]) -> _Sent:
        if self._side is None:
            return _Sent([_batch(_pair(data), own, count) for data, own, count in step], None)
        # On a stream of its own the copies overlap what the device still computes of the step before.
        with torch.cuda.stream(self._side):
            batches = [_batch(self._move(_pair(data)), own, count) for data, own, count in step]
            return _Sent(batches, self._side.record_event())

    def _arrived(self, sent: _Sent) -> list[Batch]:
        if sent.copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(sent.copied)
            for batch in sent.batches:
                # Else the memory could be given away while this stream still reads it.
                _each_tensor((batch.inputs, batch.targets), lambda tensor: tensor.record_stream(current))
        return sent.batches

    def _move(self, tree: Any) -> Any:
        def move(tensor: Tensor) -> Tensor:
            layout = self._format if tensor.dim() == 4 else torch.preserve_format
            return tensor.to(self._device, non_blocking=True, memory_format=layout)

        return _each_tensor(tree, move)


class _Collate:
    """Makes a batch of a part's samples; a class, so that a spawned worker can be given it."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, part: Any) -> tuple[Any, int, int]:
        return self._collate(part.samples), part.own, part.count


def _as_it_is(batch: Any) -> Any:
    return batch


def _one_ahead(steps: Iterator[_Sent]) -> Iterator[_Sent]:
    """Send the next step to the device before this one is computed."""
    upcoming = next(steps, None)
    while upcoming is not None:
        present, upcoming = upcoming, next(steps, None)
        yield present


def _batch(pair: Sequence[Any], own: int, count: int) -> Batch:
    return Batch(pair[0], pair[1], own, count)


def _pair(data: Any) -> tuple[Any, Any]:
    if isinstance(data, list | tuple) and len(data) == 2:
        return data[0], data[1]
    parts = data if isinstance(data, list | tuple) else [data]
    raise ConfigError(
        f"a batch of {[type(part).__name__ for part in parts]}",
        expected="two parts, inputs and targets",
        cure="let the data set's __getitem__, or collate, return such a pair",
    )


def _each_tensor(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: _each_tensor(value, function) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        return [_each_tensor(value, function) for value in tree]
    return tree


def feeds(
    world: World,
    config: Config,
    train_data: Dataset[Any],
    test_data: Dataset[Any] | None,
    order: Order | None,
    collate: Callable[[Any], Any] | None,
    cpus: int,
) -> tuple[Feed, Feed | None]:
    """Of the training and of the test data; ``cpus`` are those of this rank."""

    def feed(data: Dataset[Any], order: Order | None, accumulation: int, loading: LoadingConfig) -> Feed:
        return Feed(
            data,
            order,
            world,
            loading,
            deal=Deal.of(world, config.batch_size, config.seed),
            num_workers=default_workers(loading, cpus, isinstance(data, TensorDataset)),
            accumulation=accumulation,
            signals=config.preemption.signals,
            collate=collate,
            channels_last=config.ddp.channels_last,
        )

    def default_order(data: Dataset[Any], kind: Callable[[int], Order]) -> Order | None:
        return None if isinstance(data, IterableDataset) else kind(len(cast(Sized, data)))

    shuffled = order or default_order(train_data, lambda length: Shuffled(length, config.seed))
    train = feed(train_data, shuffled, config.accumulation, config.loading)
    if test_data is None:
        return train, None
    return train, feed(test_data, default_order(test_data, Sequential), 1, replace(config.loading, drop_last=False))
