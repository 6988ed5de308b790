"""The order of a step, of an epoch and of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from srunddp.errors import ConfigError, Scope
from srunddp.telemetry import heartbeat
from srunddp.train.config import Config
from srunddp.train.data.loader import StepBatches
from srunddp.train.data.order import Order
from srunddp.train.fit import FitLoop
from srunddp.train.metrics.accumulator import LossFunction, Metric, MetricAccumulator
from srunddp.train.model.ema import EMA
from srunddp.train.model.fsdp import wrap_model
from srunddp.train.optimizer import Scheduler, lr_factor, scale_lr, use_fused
from srunddp.train.progress import EpochRecord
from srunddp.train.state import TrainingState
from srunddp.train.step_timer import ThroughputMeter
from srunddp.train.validate import check_parts, pair
from srunddp.train.world import World

_NOTHING = nullcontext()


class Trainer:
    """Trains one model on all ranks of a world.

    Attributes:
        model: the model itself, on ``world.device``; never the DistributedDataParallel wrap. With ``parallel`` fsdp its
            parameters are DTensors.
        averaged: a copy of it with averaged weights, in evaluation mode, where ``config.ema_decay`` is set; else None.
        optimizer: as it was given, with fused kernels and a scaled learning rate where the configuration says so.
        config, world, metrics, scheduler, callbacks: as they were given.
        state: where training stands.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_function: LossFunction,
        config: Config | None = None,
        *,
        world: World,
        metrics: Mapping[str, Metric] | None = None,
        scheduler: Scheduler | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Move the model to the device, or with ``parallel`` fsdp a shard of it; all ranks have rank 0's parameters.

        Args:
            model: called as ``model(inputs)``; where it was built on the meta device it is given its values here.
            optimizer: built from ``model.parameters()``.
            loss_function: ``loss_function(outputs, targets)``, the mean over a batch.
            config: all other settings; the same on all ranks.
            world: from :func:`srunddp.init`.
            metrics: by name, ``metric(outputs, targets)``: a value per sample, or their sum; or torchmetrics objects.
            scheduler: of torch, or what makes one of the optimizer; stepped after each step, also one that fp16's
                overflow left out, but ReduceLROnPlateau after each evaluation, with its loss.
            callbacks: called at their moments, in this order.

        Raises:
            ConfigError: these do not fit together; the message says what to do.
        """
        self.config = config = config or Config()
        self.world = world
        self.metrics = dict(metrics or {})
        check_parts(world, model, optimizer, loss_function, self.metrics, config)
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # events and random states are the current device's
        if isinstance(loss_function, nn.Module):
            loss_function.to(world.device)
        self._loss_function = loss_function
        self._wrapped = wrap_model(model, optimizer, world, config)
        self.model, self.optimizer = self._wrapped.model, optimizer
        decay, compiles = config.ema_decay, config.ddp.compile
        self._average = None if decay is None else EMA(self.model, decay, compile=compiles)
        self.averaged = self._average.model if self._average else None
        self.scheduler, self.callbacks = scheduler, tuple(callbacks)
        if config.fused:
            use_fused(optimizer, self.model)
        factor = lr_factor(config, world.world_size)
        scale_lr(optimizer, factor)
        scaler = GradScaler(world.device.type, enabled=config.precision == "fp16")
        self.state = TrainingState(self.model, optimizer, scaler, factor, average=self._average)

    def methods(self, name: str) -> list[Callable[..., Any]]:
        """The callbacks' methods of this name, without those that are :class:`Callback`'s own and do nothing.

        Raises:
            ConfigError: one of them is no Callback; a class instead of its instance, say.
        """
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"{callback!r} among the callbacks",
                    expected="instances of srunddp.train.Callback",
                    hint="derive its class from Callback, and pass an instance",
                    scope=Scope.JOB,
                )
        methods = [getattr(callback, name) for callback in self.callbacks]
        return [method for method in methods if getattr(method, "__func__", None) is not getattr(Callback, name)]

    def fit(
        self,
        train_data: Dataset[Any],
        test_data: Dataset[Any] | None = None,
        *,
        order: Order | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> list[EpochRecord]:
        """Train until ``config.epochs`` are done; all ranks call this.

        Args:
            train_data: the whole data set on every rank; its samples are pairs, inputs and targets.
            test_data: the same, for evaluation.
            order: of the training samples in each epoch; None shuffles them by ``config.seed``.
            collate: makes a batch of a list of samples; None for torch's way.

        Returns:
            A record of each epoch, the same on all ranks but for the throughput.

        Raises:
            ConfigError: a data set is empty, or differs between ranks.
            CheckpointError: there is no whole checkpoint where one was named, or the last one could not be written.
            Stopped: the job is preempted; a checkpoint is written.
        """
        with FitLoop(self, train_data, test_data, order, collate) as run:
            with run.timer.time_collective_waits(self._wrapped):
                while self.state.epoch < self.config.epochs and (self.state.samples_seen or not run.early_stopped):
                    self._epoch(run)
            run.finish()
        return self.state.records

    def _epoch(self, run: FitLoop) -> None:
        sums = run.start_epoch()
        self._wrapped.training.train()
        if run.evaluation_is_due():  # the run before this one left amid it
            self._evaluate_and_checkpoint(run)
        for step in run.steps():
            run.after_step(step, self._step(step, sums, run.timer))
            self._evaluate_and_checkpoint(run)
        train = sums.means()
        run.end_epoch(train, (run.evaluated or self._evaluate(run)) if run.ends_with_evaluation() else {})

    def _step(self, step: StepBatches, sums: MetricAccumulator, timer: ThroughputMeter) -> float | None:
        """One optimizer step; returns the loss of the micro-batch before its last."""
        state = self.state
        self.optimizer.zero_grad(set_to_none=True)
        for batch in step.batches:
            last = batch is step.batches[-1]
            # Only a step's last forward and backward share gradients between ranks.
            with _NOTHING if last else self._wrapped.accumulating():
                inputs, targets = pair(batch.data)
                with self._precision():
                    outputs = self._wrapped.training(inputs)
                    loss = self._loss_function(outputs, targets)
                if last:
                    timer.start_wait()
                # DistributedDataParallel takes the mean over ranks: this makes it the mean over the step's samples.
                scaled = loss if batch.scale == 1 else loss * batch.scale
                state.scaler.scale(scaled).backward()  # type: ignore[no-untyped-call]
            if last:
                timer.end_wait()
            loss_before = sums.add(loss, outputs, targets, batch.samples)
        if self.config.clip_norm is not None:
            state.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        state.scaler.step(self.optimizer)
        state.scaler.update()
        if self._average:
            self._average.update(first=state.step == 0)
        if state.scheduler is not None and not isinstance(state.scheduler, ReduceLROnPlateau):
            state.scheduler.step()
        heartbeat()
        return loss_before

    def _evaluate_and_checkpoint(self, run: FitLoop) -> None:
        if run.evaluation_is_due():
            run.record_evaluation(self._evaluate(run))
        run.maybe_checkpoint()

    @torch.no_grad()  # not inference_mode: what a model caches in it could not be used in training again
    def _evaluate(self, run: FitLoop) -> dict[str, float]:
        self._wrapped.share_buffers(self.model)
        self.model.eval()
        testing = self._wrapped.testing
        if self._average:
            self._wrapped.share_buffers(self._average.model)
            testing = self._average.testing
        sums = MetricAccumulator(self.metrics, self.world)
        with run.evaluation() as steps:
            for (batch,), *_ in steps:
                inputs, targets = pair(batch.data)
                with self._precision():
                    # The model, not the wrap: it has no gradients to share, and its buffers are shared already.
                    outputs = testing(inputs)
                    loss = self._loss_function(outputs, targets)
                sums.add(loss, outputs, targets, batch.samples)
                heartbeat()
                run.agree()
        self._wrapped.training.train()
        return sums.means()

    def warm_up_buckets(self, steps: Iterator[StepBatches]) -> None:
        """A step without a consequence, but that DistributedDataParallel orders its buckets for the next one."""
        if not self._wrapped.rebuilds_buckets or not (step := next(steps, None)):
            return
        inputs, targets = pair(step.batches[0].data)
        with self._precision():
            loss = self._loss_function(self._wrapped.training(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._wrapped.static_graph_recorded()
        self.optimizer.zero_grad(set_to_none=True)

    def _precision(self) -> AbstractContextManager[Any]:
        """Around a forward pass."""
        if self.config.precision == "fp32":
            return _NOTHING
        dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float16
        return torch.autocast(self.world.device.type, dtype)


class Callback:
    """Override what is wanted; the rest costs nothing.

    All methods run on every rank, so that they may use collectives, but :meth:`on_checkpoint`, which runs on rank 0
    alone. What one raises ends training.
    """

    def on_step(self, trainer: Trainer, step: int, loss: float | None) -> None:
        """After each step.

        Args:
            trainer: whose step it was.
            step: counted over all epochs.
            loss: this rank's, of the micro-batch before the last: reading the last would wait for the GPU. None at
                first, and after a checkpoint.
        """

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """After each evaluation; the figures are the same on all ranks."""

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        """After each epoch and its evaluation; the record is the same on all ranks but for its throughput."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """On rank 0 alone, once the checkpoint is whole: no collectives here."""
