"""The loader that gives this rank its batches, on its device."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from srunddp.config.schema import config_error
from srunddp.train.data import sampler
from srunddp.train.data.fingerprint import Look, hashed
from srunddp.train.data.in_memory import fingerprint_in_memory
from srunddp.train.data.order import Order, Sequential, Shuffled, Weighted, check_order
from srunddp.train.data.reader import collated, start
from srunddp.train.data.same_samples import ANY_EPOCH, SameSamples
from srunddp.train.data.steps import Batch, StepBatches, group_steps
from srunddp.train.data.streams import Stream
from srunddp.train.data.transfer import DeviceTransfer
from srunddp.train.data.workers import default_workers, share, start_method
from srunddp.train.world import World


class DistributedDataLoader:
    """Gives each rank its part of the batches of a data set; also works without a Trainer.

    In an epoch each sample comes exactly once, on one of the ranks, and all ranks get equally many
    batches. All ranks must iterate: the first iteration compares some samples between them. With a
    model in DistributedDataParallel, this loop gives the gradients of the mean loss over all
    samples, or of the weighted mean:

        for epoch in range(loader.state_dict()["epoch"], 10):
            loader.set_epoch(epoch)
            for batch in loader:
                loss = loss_function(model(batch.data[0]), batch.data[1]) * batch.scale
                loss.backward()

    Iterating yields ``Batch`` objects; ``steps()`` yields them grouped into optimizer steps.
    """

    def __init__(
        self,
        data: Dataset[Any],
        world: World,
        *,
        batch_size: int,
        order: Order | None = None,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        weight: Callable[[Any], float | Tensor] | None = None,
        sharded: bool = False,
        drop_last: bool = False,
        equal_batches: bool = False,
        gradient_accumulation_steps: int = 1,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = True,
        pin_memory: bool | None = None,
        multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None,
        channels_last: bool = False,
        signals: Sequence[str] = ("USR1", "USR2"),
        resume_changed_data: bool = False,
        name: str = "data",
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Create the loader; a collective.

        All ranks pass the same arguments, and create several loaders in the same order.

        Args:
            data: A data set with indices, complete on every rank; or an iterable one.
            world: The return value of ``srunddp.init()``.
            batch_size: Samples per rank and batch.
            order: The order of the samples in each epoch; None shuffles them by ``seed``. Not for
                iterable data.
            seed: The seed for the order and for the workers' random numbers.
            collate: Makes a batch from a list of samples; None for torch's ``default_collate``.
            weight: ``weight(batch)`` returns how much the mean loss of a batch counts, a number of
                at least 0, such as the number of its tokens. It is called with the output of
                collate, before the copy to the device. None uses the number of samples.
            sharded: Whether the data set is iterable and splits itself by rank and by worker
                (``get_worker_info()``). If False, all ranks and workers read an iterable data set
                completely, and each keeps its part.
            drop_last: Leave out steps that are not full on every rank.
            equal_batches: Make batches of equal size on all ranks, as a collective on them may
                need. If an epoch's last samples are fewer than the ranks, each makes a batch of
                one, and the remaining ranks get a stand-in, a sample of another rank that does not
                count. Not for sharded data.
            gradient_accumulation_steps: Batches per step.
            num_workers: Loader processes of this rank; None chooses a number by its CPUs.
            prefetch_factor: Batches that each worker reads ahead; None is torch's 2.
            persistent_workers: Keep the workers from one epoch to the next.
            pin_memory: Put batches in page-locked memory; None does so for a GPU.
            multiprocessing_context: How workers start; None chooses a method that is safe with MPI
                and RDMA.
            channels_last: Store tensors of four dimensions with their channels innermost.
            signals: Names, without SIG, of signals that only this rank gets, not its workers.
            resume_changed_data: Continue from a state even if the length or order of the data has
                changed.
            name: The name of the data in messages.
            log: Prints a line for the user, on rank 0; None for the logger ``srunddp``.

        Raises:
            ConfigError: The arguments do not fit together, or differ between ranks.
        """
        _check_at_least_one("batch_size", batch_size)
        _check_at_least_one("gradient_accumulation_steps", gradient_accumulation_steps)
        order, self._length = _order_and_length(data, order, seed, sharded)
        # Ranks can only compare integers: -1 stands for an unknown length.
        length = -1 if self._length is None else self._length
        order_hash = _order_hash(order)
        # Compare now and not at the first batch: ranks with different numbers of batches would call
        # different collectives, and hang until the timeout without a message about the cause.
        sampler.check_agreement(
            world,
            {
                "len(data)": length,
                "batch_size": batch_size,
                "gradient_accumulation_steps": gradient_accumulation_steps,
                "seed": seed,
                # Pass the hash as a string: the error message shows integers that differ, but
                # hashes would tell the user nothing.
                "order": str(order_hash),
            },
        )
        self._same_samples = SameSamples(
            world,
            name,
            log or partial(logging.getLogger("srunddp").warning, "srunddp: %s"),
            is_stream=isinstance(data, IterableDataset),
            in_memory=None if sharded else fingerprint_in_memory(data),
        )
        self._data_identity = {"length": length, "order": order_hash}
        self._resume_changed_data = resume_changed_data
        self._assignment = sampler.ShardAssignment(
            world.rank,
            world.world_size,
            batch_size,
            seed,
            gradient_accumulation_steps,
            drop_last,
            sharded,
            equal_batches,
        )
        # Whether one indexing operation per tensor makes a batch. A subclass of TensorDataset may
        # have its own __getitem__, so it is read sample by sample.
        in_memory = type(data) is TensorDataset and collate is None
        # Tensors that are on a GPU already can be neither pinned nor copied asynchronously.
        is_on_gpu = in_memory and any(
            tensor.is_cuda for tensor in cast(TensorDataset, data).tensors
        )
        copies_to_gpu = world.device.type == "cuda" and not is_on_gpu
        if num_workers is None:
            # Without workers tensors in memory are faster: to index them takes less time than to
            # pass them from one process to another.
            num_workers = 0 if in_memory else default_workers(share(world))
        if pin_memory is None:
            pin_memory = copies_to_gpu
        self._world = world
        self._order = order
        self._signals = signals
        self._requests = sampler.DistributedBatchSampler(self._assignment)
        self._reader = sampler.Reader(data, rows=in_memory)
        # Whether ranks have to compare samples that are read. Tensors in memory are compared above,
        # by their fingerprint.
        self._reads_unknown = world.world_size > 1 and not in_memory
        self._by_epoch = hasattr(data, "set_epoch") or isinstance(data, IterableDataset)
        self._stream: Stream | None = None
        if isinstance(data, IterableDataset):
            self._stream = Stream(data, self._assignment)
        self._sent_to_workers = {"data": data, "collate": collate, "weight": weight}
        make_batch = None if in_memory else collate or default_collate
        self._loader = self._torch_loader(
            partial(collated, collate=make_batch, weight=weight),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory and not is_on_gpu,
            multiprocessing_context=multiprocessing_context,
        )
        # The batches of a sharded data set depend on these numbers: an epoch can be continued only
        # with the same ones.
        self._shard_layout = {
            "world_size": world.world_size,
            "num_workers": num_workers,
            "batch_size": batch_size,
        }
        self._weighted = weight is not None
        self._transfer = DeviceTransfer(
            world.device, channels_last=channels_last, beside=copies_to_gpu
        )
        # Read ahead only with workers. Without workers the rank itself would read the next step
        # before it trains this step. Reading and training draw from one sequence of random numbers,
        # so after a resume in between they would draw different ones.
        self._reads_ahead = copies_to_gpu and num_workers > 0
        # What was yielded so far: the number of the epoch, and in this epoch the samples over all
        # ranks and the batches of this rank.
        self._epoch = 0
        self._samples_seen = 0
        self._batches = 0
        # Whether the next iteration continues after these samples; otherwise it begins the epoch.
        self._resumes = False

    def _torch_loader(
        self,
        collate: Callable[..., sampler.MicroBatch],
        *,
        num_workers: int,
        prefetch_factor: int | None,
        persistent_workers: bool,
        pin_memory: bool,
        multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None,
    ) -> DataLoader[Any]:
        """Create torch's loader, whose items are micro-batches of this rank."""
        method = None
        if num_workers:
            backend = dist.get_backend() if dist.is_initialized() else "gloo"
            method = start_method(multiprocessing_context, backend)
        if self._stream:
            # The stream yields micro-batches, which torch must not batch again.
            dataset: Dataset[Any] = self._stream
            batch_size = None
            batch_sampler = None
        else:
            dataset = self._reader
            # With a batch sampler the DataLoader accepts no other batch_size than 1.
            batch_size = 1
            batch_sampler = cast(Any, self._requests)
        return DataLoader(
            dataset,
            batch_size=batch_size,
            batch_sampler=batch_sampler,
            collate_fn=collate,
            # Each iter() of a DataLoader draws a base seed. If it drew from the rank's own random
            # numbers, a resumed run, which calls iter() at another time, would continue with other
            # random numbers.
            generator=torch.Generator(),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers and num_workers > 0,
            pin_memory=pin_memory,
            multiprocessing_context=method,
        )

    @property
    def num_workers(self) -> int:
        """The number of loader processes of this rank; 0 if the rank itself reads."""
        return self._loader.num_workers

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        The iteration begins at the start of the epoch, or at the position that
        ``load_state_dict()`` has set, if that is within this epoch. Without a call of this method,
        an iteration after a finished epoch reads the next one, and an unfinished epoch begins
        again.

        Args:
            epoch: The number of the epoch, by which the samples are shuffled.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._samples_seen = 0
            self._batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, in whole steps; the same on all ranks.

        It has ``epoch``, and the ``samples_seen`` in it over all ranks; the ``length`` of the data,
        a hash of its ``order``, and the fingerprints of some of its ``samples``. For a sharded data
        set it also has the ``batches`` per rank in the epoch, and what these depend on:
        ``world_size``, ``num_workers`` and ``batch_size``.
        """
        place = {
            "epoch": self._epoch,
            "samples_seen": self._samples_seen,
            **self._data_identity,
            "samples": self._same_samples.state_dict(),
        }
        if self._assignment.sharded:
            return {**place, "batches": self._batches, **self._shard_layout}
        return place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue from a state.

        For a data set with indices the number of ranks may have changed. If samples have changed,
        rank 0 prints a line.

        Args:
            state: The return value of ``state_dict()``.

        Raises:
            ConfigError: The length or order of the data has changed, so that samples would be
                missed or seen twice; or a sharded data set was read in part with another number of
                ranks or workers.
        """
        for name, here in self._data_identity.items():
            if not self._resume_changed_data and state.get(name, here) != here:
                if name == "length":
                    numbers = f" was {state[name]} samples and is {here}"
                else:
                    numbers = " has changed"
                raise config_error(
                    f"the {name} of the training data{numbers} since the checkpoint",
                    "the same data in the same order: else samples are missed or seen twice",
                    (
                        "restore the data and the seed, or go on nevertheless with"
                        " resume_changed_data=true"
                    ),
                )
        if self._assignment.sharded and state["samples_seen"]:
            for name, here in self._shard_layout.items():
                if state.get(name) != here:
                    raise config_error(
                        f"{name} was {state.get(name)} in the epoch that is to go on, and is"
                        f" {here}",
                        "the same for a data set that is sharded",
                        f"start with {name}={state.get(name)}, or call set_epoch() to begin another"
                        " epoch",
                    )
        if not self._resume_changed_data:
            self._same_samples.load_state_dict(state.get("samples", {}))
        self._epoch = state["epoch"]
        self._samples_seen = state["samples_seen"]
        self._batches = state.get("batches", 0)
        self._resumes = True

    def steps_left(self, samples_seen: int) -> int | None:
        """Return the number of steps until the end of an epoch; None if it is not known.

        Args:
            samples_seen: The samples of the epoch that were seen so far, over all ranks.
        """
        left = self._samples_left(samples_seen)
        if left is None:
            return None
        return math.ceil(left / self._full)

    @property
    def _full(self) -> int:
        """The samples of a full step, over all ranks."""
        return self._assignment.gradient_accumulation_steps * self._assignment.global_batch_size

    def _samples_left(self, seen: int) -> int | None:
        if self._length is None:
            return None
        # With resume_changed_data there may be less data than at the checkpoint.
        left = max(0, self._length - seen)
        if self._assignment.drop_last:
            return left - left % self._full
        return left

    def __len__(self) -> int:
        """Return the number of batches of the next iteration, which may continue an epoch.

        Raises:
            TypeError: The data set has no length, or is sharded.
        """
        left = self._samples_left(self._samples_seen if self._resumes else 0)
        if left is None:
            raise TypeError(
                "the number of batches is not known: the data set is sharded, or has no length"
            )
        return math.ceil(left / self._assignment.global_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch; ``state_dict()`` counts whole steps."""
        for step in self._read():
            *others, last = step.batches
            yield from others
            # Count before yielding the last batch: the caller's loop may save a checkpoint after
            # its step, which must include the whole step.
            self._count(step)
            yield last

    def steps(self) -> Iterator[StepBatches]:
        """Yield the remaining batches of the epoch, grouped into optimizer steps."""
        for step in self._read():
            self._count(step)
            yield step

    def _read(self) -> Iterator[StepBatches]:
        if not self._resumes:
            self._samples_seen = 0
            self._batches = 0
        self._resumes = False
        steps = group_steps(self._parts(), self._assignment, weighted=self._weighted)
        sent: Iterator[StepBatches] = map(self._send, steps)
        if self._reads_ahead:
            sent = _one_ahead(sent)
        for step in sent:
            # Wait for the event of this step: if the next step was read ahead, the GPU need not
            # wait for the copy of the next step.
            self._transfer.arrived(step.batches, step.copied)
            yield step
        self.set_epoch(self._epoch + 1)

    def _parts(self) -> Iterator[sampler.MicroBatch]:
        if self._assignment.sharded:
            # A sharded stream cannot begin in the middle: it is read again from its start. Skip the
            # batches that were yielded before.
            begin = self._batches
            return itertools.islice(self._start(begin, Look.NONE), begin, None)
        begin = self._samples_seen
        # checked() is a collective: this condition has the same value on all ranks.
        if self._same_samples.is_done or not (self._stream or self._reads_unknown):
            return self._start(begin, Look.NONE)
        return self._same_samples.checked(
            partial(self._start, begin), self._epoch if self._by_epoch else ANY_EPOCH
        )

    def _start(self, begin: int, look: Look) -> Iterator[sampler.MicroBatch]:
        if self._stream:
            self._stream.begin(self._epoch, begin, look)
        elif self._order is not None:
            self._requests.begin(self._order.indices(self._epoch), self._epoch, begin, look)
            # Set the epoch for a rank without workers, and for workers that are forked now.
            # Persistent workers set it when they read their first samples of the epoch.
            self._reader.begin(self._epoch)
        return start(self._loader, self._signals, self._sent_to_workers)

    def _send(self, step: StepBatches) -> StepBatches:
        batches, copied = self._transfer.send(step.batches)
        if batches is step.batches:
            return step
        return step._replace(batches=batches, copied=copied)

    def _count(self, step: StepBatches) -> None:
        self._samples_seen += step.samples
        self._batches += len(step.batches)


def _one_ahead(steps: Iterator[StepBatches]) -> Iterator[StepBatches]:
    """Yield the same steps, but request the next step before yielding each one.

    So the copy of the next step to the device runs while the caller computes the present step.
    """
    upcoming = next(steps, None)
    while upcoming is not None:
        present = upcoming
        upcoming = next(steps, None)
        yield present


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise config_error(f"{name} is {value}", "at least 1", "correct it")


def _order_and_length(
    data: Dataset[Any], order: Order | None, seed: int, sharded: bool
) -> tuple[Order | None, int | None]:
    """Return the order of the samples and the number of samples per epoch.

    The order is None for iterable data, and the number is None if it is not known.

    Raises:
        ConfigError: Data of this kind cannot have an order, or the order does not fit the data.
    """
    length = sampler.length_of(data)
    if isinstance(data, IterableDataset):
        if order is not None:
            raise config_error(
                "an order, and data that is iterable",
                "data with indices",
                "let it yield in that order",
            )
        # The length of a sharded data set is not known: a rank knows at best the length of its own
        # shard.
        if sharded:
            return None, None
        return None, length
    if sharded or length is None:
        raise config_error(
            "sharded=True, and data with indices",
            "an IterableDataset that splits itself",
            "leave it out: the samples are dealt to the ranks",
        )
    if order is None:
        return Shuffled(length, seed), length
    check_order(order, length)
    if isinstance(order, Weighted):
        order = order.with_seed(seed)
    return order, len(order)


def _order_hash(order: Order | None) -> int:
    """Return a number that is the same for the same samples in the same order."""
    if order is None or isinstance(order, Sequential | Shuffled):
        # Hash only the fields of these orders: a permutation of 10^9 samples would take 8 GB.
        return hashed(repr(order))
    return hashed(order.indices(1).numpy().tobytes())
