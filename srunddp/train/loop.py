"""The order of a step and of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from srunddp.observe.marks import heartbeat
from srunddp.train.checkpoint import save_checkpoint
from srunddp.train.checks import (
    check_fit,
    check_group,
    check_loss_function,
    check_metrics,
    check_optimizer,
)
from srunddp.train.data import LoaderOptions, ShardSampler, batches, make_loader
from srunddp.train.metrics import LossFunction, Metric, Sums
from srunddp.train.progress import EpochRecord, print_epoch
from srunddp.train.replica import replicate, share_buffers
from srunddp.train.world import World


class Trainer:
    """Trains one model on all ranks of a world.

    Attributes:
        model: the model itself, on ``world.device``; never the DistributedDataParallel wrap.
        optimizer: as it was given.
        epoch: how many epochs are done.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_function: LossFunction,
        *,
        world: World,
        metrics: Mapping[str, Metric] | None = None,
        checkpoint_dir: Path | str | None = None,
    ) -> None:
        """Move the model to the device and give all ranks rank 0's parameters.

        Args:
            model: called as ``model(inputs)``; outputs have the samples in their first dimension.
            optimizer: built from ``model.parameters()``, which stay the same objects.
            loss_function: ``loss_function(outputs, targets)``, the mean over a batch.
            world: from :func:`srunddp.init`.
            metrics: by name, ``metric(outputs, targets)``: a value per sample, or their sum.
            checkpoint_dir: rank 0 writes ``checkpoint.pt`` there after each epoch; None writes nothing.

        Raises:
            ValueError: these do not fit together; the message says what to do.
            OSError: the checkpoint folder cannot be made.
        """
        self._metrics = dict(metrics or {})
        check_group(world)
        check_optimizer(optimizer, model)
        check_loss_function(loss_function)
        check_metrics(self._metrics)
        if isinstance(loss_function, nn.Module):
            loss_function.to(world.device)
        self.model = model.to(world.device)
        self.optimizer = optimizer
        self.epoch = 0
        self._loss_function = loss_function
        self._world = world
        self._replica = replicate(model, world)
        self._checkpoint_dir = Path(checkpoint_dir) if checkpoint_dir is not None else None
        if self._checkpoint_dir is not None and world.rank == 0:
            # Now, so that a folder which cannot be written is known before the first epoch, not after it.
            self._checkpoint_dir.mkdir(parents=True, exist_ok=True)

    def fit(
        self,
        train_data: Dataset[Any],
        test_data: Dataset[Any] | None = None,
        epochs: int = 3,
        batch_size: int = 64,
        *,
        loading: LoaderOptions | None = None,
        seed: int = 0,
    ) -> list[EpochRecord]:
        """Train for ``epochs`` more epochs; all ranks call this, and all get the same records.

        Args:
            train_data: the whole data set on every rank, of (inputs, targets) tensors.
            test_data: the same, evaluated after each epoch.
            epochs: passes over the training data.
            batch_size: samples per rank and step; the effective batch is ``world_size`` times that.
            loading: workers and memory of the loaders; None reads in the rank itself.
            seed: of the order of samples, which is another one in each epoch.

        Raises:
            ValueError: a data set is empty, has no length, or differs between ranks.
        """
        check_fit(self._world, train_data, test_data, epochs=epochs, batch_size=batch_size, seed=seed)
        sampler: DistributedSampler[Any] = DistributedSampler(
            train_data, num_replicas=self._world.world_size, rank=self._world.rank, shuffle=True, seed=seed
        )
        loader = make_loader(train_data, sampler, batch_size, self._world.device, loading)
        test_loader = None
        if test_data is not None:
            test_sampler = ShardSampler(test_data, self._world)
            test_loader = make_loader(test_data, test_sampler, batch_size, self._world.device, loading)
        records = [self._epoch(loader, sampler, test_loader) for _ in range(epochs)]
        heartbeat(last=True)
        return records

    def _epoch(
        self, loader: DataLoader[Any], sampler: DistributedSampler[Any], test_loader: DataLoader[Any] | None
    ) -> EpochRecord:
        self.epoch += 1
        sampler.set_epoch(self.epoch)
        train = self._train(loader)
        test = self._test(test_loader) if test_loader is not None else {}
        record = EpochRecord(self.epoch, train, test)
        if self._world.rank == 0:
            print_epoch(record)
            self._save()
        return record

    def _train(self, loader: DataLoader[Any]) -> dict[str, float]:
        sums = Sums(self._loss_function, self._metrics, self._world)
        self._replica.train()
        for inputs, targets, own in batches(loader, self._world):
            self.optimizer.zero_grad(set_to_none=True)
            outputs = self._replica(inputs)
            loss = self._loss_function(outputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            heartbeat()
            sums.add(loss, outputs, targets, own)
        share_buffers(self.model, self._world)
        return sums.means()

    @torch.no_grad()  # not inference_mode: what a model caches in it could not be used in training again
    def _test(self, loader: DataLoader[Any]) -> dict[str, float]:
        sums = Sums(self._loss_function, self._metrics, self._world)
        self.model.eval()
        # The model, not the wrap: shards differ in length, and the wrap's collectives would wait forever.
        for inputs, targets, own in batches(loader, self._world):
            outputs = self.model(inputs)
            sums.add(self._loss_function(outputs, targets), outputs, targets, own)
            heartbeat()
        return sums.means()

    def _save(self) -> None:
        if self._checkpoint_dir is None:
            return
        state = {
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        save_checkpoint(self._checkpoint_dir / "checkpoint.pt", state)
