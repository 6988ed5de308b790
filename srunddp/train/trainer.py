"""The Trainer: what happens in a step, in an epoch and in a run, and in which order."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import Dataset

from srunddp.telemetry import heartbeat
from srunddp.train import validate
from srunddp.train.callback import Callback
from srunddp.train.callback_runner import CallbackRunner
from srunddp.train.config import Config, with_expanded_paths
from srunddp.train.data.order import Order
from srunddp.train.data.reader import Weight
from srunddp.train.data.steps import Batch, StepBatches
from srunddp.train.evaluations import figure_name
from srunddp.train.fewer_ranks import with_batch_kept, world_sizes_of_run
from srunddp.train.fit import FitData, FitLoop, LoopContext, ValData, make_loader
from srunddp.train.metrics.accumulator import Metric, MetricAccumulator
from srunddp.train.model.ddp import DDPModel
from srunddp.train.model.ema import EMA
from srunddp.train.model.mean_watch import MeanWatch
from srunddp.train.model.modes import TrainingModes, train_as_a_whole, train_if_evaluated
from srunddp.train.model.step import LossFunction, Step, StepModule, make_step, targets_of
from srunddp.train.optimizer import (
    OptimizerModes,
    as_tuple,
    has_gradients,
    leave_fused_for_sparse,
    lr_factor,
    scale_lr_once,
    stepped_parameters,
    use_fused,
    zero_grad,
)
from srunddp.train.progress import EpochRecord
from srunddp.train.rng import StepRng, preserved_rng
from srunddp.train.schedulers import Scheduler
from srunddp.train.start_settings import StartSettings, of_config, of_optimizers, rates_of
from srunddp.train.state import TrainingState
from srunddp.train.step_timer import ThroughputMeter
from srunddp.train.world import World

_NOTHING = nullcontext()


class Trainer:
    """Trains one model on all ranks of a world. All arguments except ``loss_function`` and ``step``
    are also attributes.

    Attributes:
        model: The model itself, on ``world.device``, not wrapped in DistributedDataParallel.
        averaged: A copy of the model with averaged weights, in evaluation mode, if
            ``config.ema_decay`` is set; else None.
        optimizer: The optimizer as given; from ``fit()`` on with fused kernels and a scaled
            learning rate if so configured.
        state: The state of training: ``state.epoch`` epochs are over, and ``state.step`` optimizer
            steps are done.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loss_function: LossFunction | None = None,
        config: Config | None = None,
        *,
        world: World,
        step: Step | None = None,
        weight: Weight | None = None,
        metrics: Mapping[str, Metric] | None = None,
        val_metrics: Mapping[str, Metric] | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Move the model to the device, and give all ranks rank 0's parameters.

        There are three kinds of steps. With ``loss_function`` a batch is a pair: the loss is
        ``loss_function(model(inputs), targets)``. With ``step`` a batch may be anything. With
        neither, the model must return its loss, as Hugging Face's models do:
        ``model(**batch).loss`` for a mapping, ``model(batch).loss`` for a tensor.

        Args:
            model: The model, not wrapped, on any device. Modules in evaluation mode stay in it,
                unless the whole model is in it.
            optimizer: An optimizer of the model's parameters; or a list of optimizers with
                different parameters, which are stepped together.
            loss_function: ``loss_function(outputs, targets)`` returns the mean loss over a batch, a
                scalar.
            config: All other settings, the same on all ranks; None for the defaults.
            world: The return value of ``srunddp.init()``.
            step: ``step(model, batch)`` returns the mean loss of the batch, or the loss and the
                outputs for the metrics; called in training and evaluation.
            weight: ``weight(batch)`` returns how much the mean loss of a batch counts among other
                batches and ranks, such as its number of tokens; called with the collated batch, on
                the host. None uses the number of samples.
            metrics: Metrics by name: ``metric(outputs, targets)`` returns one value per sample, or
                a count; or torchmetrics objects. If a batch is not a pair, the targets are its
                ``labels``, or the batch itself. If the step returns no outputs, metrics get None.
            val_metrics: The same for evaluations only, for example if training mixes targets
                (MixUp), or if a metric takes long.
            scheduler: A scheduler of torch, or a function that makes one for the optimizer; a list
                for several optimizers. Replaces ``schedule`` and ``warmup_steps``. Stepped after
                each step, even one that was skipped because of an fp16 overflow, or after each
                epoch (``scheduler_interval``); ReduceLROnPlateau is stepped after each evaluation,
                by ``config.monitor``.
            callbacks: The callbacks, called in this order.

        Raises:
            ConfigError: The arguments do not fit together; the message says what to do.
        """
        config = with_expanded_paths(config or Config())
        self.config = config
        self.world = world
        self.metrics = dict(metrics or {})
        self.val_metrics = dict(val_metrics or {})
        self.optimizer = optimizer
        self._optimizers = as_tuple(optimizer)
        self.scheduler = scheduler
        self.schedulers = as_tuple(scheduler)
        self.weight = weight
        self.callbacks = tuple(callbacks)
        self._check(model, loss_function)
        self._given_config = config
        self._world_sizes = world_sizes_of_run()
        config = self.config = with_batch_kept(config, self._world_sizes)
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # events and random states use the current device
        step = make_step(loss_function, step)
        self._ddp = DDPModel(model, step, loss_function, world, config)
        self.model = self._ddp.model
        if config.ema_decay is None:
            self._average = None
        else:
            self._average = EMA(self.model, config.ema_decay, compile=config.compile)
        self.averaged = self._average.model if self._average else None
        if self._average:
            self._evaluated = StepModule(self._average.testing, step, loss_function)
        else:
            self._evaluated = self._ddp.testing
        scaler = GradScaler(world.device.type, enabled=config.precision == "fp16")
        self.state = TrainingState(
            model=self.model,
            optimizers=self._optimizers,
            scaler=scaler,
            lr_factor=lr_factor(config, world.world_size),
            average=self._average,
            optimizer_modes=OptimizerModes(self._optimizers),
            parameters=self._ddp.parameters,
            step_rng=StepRng(world),
            settings=StartSettings(
                optimizer=of_optimizers(self._optimizers),
                rates=rates_of(self._optimizers),
                config=of_config(config),
            ),
            parts=_with_states(loss_function, callbacks),
        )
        self._run: FitLoop | None = None
        self._mean_watch: MeanWatch | None = None
        # Parameters that require a gradient but are in no optimizer: no zero_grad() clears their
        # gradients.
        self._not_stepped: Sequence[nn.Parameter] = ()
        # Optimizers with new fused kernels that have not made a step yet.
        self._newly_fused: list[Optimizer] = []
        self.callback_runner = CallbackRunner(self, self.state.step_rng)

    def _check(self, model: nn.Module, loss_function: LossFunction | None) -> None:
        validate.check_group(self.world)
        validate.check_model(model, self._optimizers, loss_function)
        validate.check_loss_function(loss_function)
        validate.check_metrics(self.metrics, self.val_metrics, self.config)
        validate.check_schedulers(self.schedulers, self._optimizers)
        validate.check_callbacks(self.callbacks, Callback)
        validate.check_settings(self.config)

    @property
    def total_steps(self) -> int | None:
        """The number of optimizer steps of the whole run.

        It is known from the beginning of ``fit()`` on, so a function for ``scheduler`` can use it.
        None before, and if the data has no length and ``config.max_steps`` is not set.
        """
        return self.state.total_steps

    @property
    def all_metrics(self) -> dict[str, Metric]:
        """The metrics of training, and those of evaluations only."""
        return self.metrics | self.val_metrics

    def log(self, figures: Mapping[str, float]) -> None:
        """Write rank 0's figures of this step to ``metrics.jsonl`` (kind ``log``) and TensorBoard.

        This does nothing outside of ``fit()``, on other ranks, or without an ``output_dir``.

        Args:
            figures: The figures by name.
        """
        if self._run:
            self._run.log("log", figures)

    def fit(
        self,
        train_data: Dataset[Any],
        val_data: ValData = None,
        *,
        order: Order | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        val_collate: Callable[[list[Any]], Any] | None = None,
        sharded: bool = False,
    ) -> list[EpochRecord]:
        """Train until ``config.epochs`` or ``config.max_steps`` are done, including those before a
        resume.

        All ranks call this. Rank 0 prints a line for each epoch on standard output, and progress on
        standard error. ``srunddp.heartbeat()`` is called after each step of training and
        evaluation.

        Args:
            train_data: The complete data set on every rank: with ``__len__`` and ``__getitem__``
                (or ``__getitems__``), or iterable; not a DataLoader. Its samples must fit the step.
                Workers call its ``set_epoch(epoch)``, if it has one.
            val_data: The same for evaluation, in its own order; its figures decide which model is
                best and when to stop. Or several data sets by name, whose figures are ``NAME/loss``
                and so on; the first one decides, unless ``monitor`` names another. Before the first
                step one batch of each is tried.
            order: The order of the training samples in each epoch; None shuffles them by
                ``config.seed``.
            collate: Makes a batch from a list of samples; None for torch's ``default_collate``.
            val_collate: The same for ``val_data``; required with ``collate``, which may mix
                samples.
            sharded: Whether ``train_data``, and ``val_data`` if it is iterable, splits itself by
                rank and worker.

        Returns:
            A record of each epoch, the same on all ranks except for the throughput.

        Raises:
            ConfigError: The arguments do not fit together, or a data set is empty or differs
                between ranks.
            CheckpointError: A checkpoint that was named is missing or damaged, or the last one
                could not be written.
            Stopped: The job is preempted; a checkpoint is written.
        """
        train_as_a_whole(self._ddp.testing)
        self.callback_runner.refresh()
        # Do not watch with torch.compile, which compiles the model for torch's active modes: it
        # would compile again when the watch is over.
        if self.weight is None and not self.config.compile:
            self._mean_watch = MeanWatch()
        for optimizer in self._optimizers:
            if self.config.fused and use_fused(optimizer, self.model):
                self._newly_fused.append(optimizer)
            if self.config.scale_lr != "no":
                scale_lr_once(optimizer, self.state.lr_factor)
        # Create the FitLoop, and with it the schedulers, after scaling the learning rates, because
        # schedulers start from the scaled ones.
        self._run = FitLoop(
            self._loop_context(),
            FitData(
                train_data=train_data,
                val_data=val_data,
                order=order,
                collate=collate,
                val_collate=val_collate,
                sharded=sharded,
            ),
        )
        try:
            with self._run as run:
                if self.state.step == 0 and not run.is_over:
                    self._try_evaluation(run)
                while not run.is_over:
                    self._epoch(run)
                self.state.optimizer_modes.set(False)
                run.finish()
        finally:
            self._run = None
            self._mean_watch = None
        return self.state.records

    def _loop_context(self) -> LoopContext:
        return LoopContext(
            config=self.config,
            given_config=self._given_config,
            world_sizes=self._world_sizes,
            world=self.world,
            state=self.state,
            ddp=self._ddp,
            metrics=self.metrics,
            val_metrics=self.val_metrics,
            weight=self.weight,
            schedulers=self.schedulers,
            callbacks=self.callback_runner,
            warm_up_buckets=self._warm_up_buckets,
        )

    def evaluate(
        self,
        data: Dataset[Any],
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        sharded: bool = False,
    ) -> dict[str, float]:
        """Compute the loss and the metrics of the model, or of the averaged one with
        ``config.ema_decay``; all ranks call this.

        Args:
            data: A data set like ``val_data`` of ``fit()``.
            collate: Like ``val_collate`` of ``fit()``.
            sharded: Whether ``data`` splits itself by rank and worker.

        Returns:
            The means over the samples of all ranks, by name; the same on all ranks.

        Raises:
            ConfigError: The data is empty or differs between ranks, or a metric cannot be computed.
        """
        validate.check_fit(self.world, {"data": data}, self.weight, self.config)
        with preserved_rng(self.world):
            loader = make_loader(
                data,
                self.config,
                self.world,
                name="data",
                collate=collate,
                weight=self.weight,
                sharded=sharded,
            )
            figures = self._evaluate(loader.steps())
        heartbeat(last=True)
        return figures

    def _epoch(self, run: FitLoop) -> None:
        sums = run.start_epoch()
        # A callback may have evaluated the model itself, and left it in evaluation mode.
        train_if_evaluated(self._ddp.testing)
        self._ddp.follow_requires_grad()
        if self._average:
            self._average.check(self.model)
        stepped = {id(parameter) for parameter in stepped_parameters(self._optimizers)}
        trained = self.state.parameters.trained().values()
        self._not_stepped = [parameter for parameter in trained if id(parameter) not in stepped]
        self.state.optimizer_modes.set(True)
        # A run that was preempted during an evaluation saved the state before it: the step is done,
        # but not its evaluation.
        if run.evaluations.due:
            self._evaluate_and_checkpoint(run)
        with self.state.step_rng.steps():
            for step in run.steps():
                run.after_step(step, self._step(step, sums, run.timer))
                self._evaluate_and_checkpoint(run)
        # Compute the means of training before the evaluation: means() is a collective, and waits
        # until the GPU has done the last step of training.
        train = sums.means()
        val: Mapping[str, float] = {}
        if run.evaluations.due_at_epochs_end:
            # The last step may have been evaluated already, by evaluate_every_steps.
            val = run.evaluations.latest or self._evaluate_within(run)
        run.end_epoch(train, val)

    def _step(
        self, step: StepBatches, sums: MetricAccumulator, timer: ThroughputMeter
    ) -> Tensor | None:
        """Make one optimizer step.

        Args:
            step: This rank's micro-batches of the step.
            sums: The epoch's figures, to which those of the step are added.
            timer: Measures how long this rank waits for others.

        Returns:
            The loss of this rank's last micro-batch that had samples; None if none had.
        """
        for optimizer in self._optimizers:
            zero_grad(optimizer)
        for parameter in self._not_stepped:
            # No optimizer's zero_grad() clears this gradient, so it would add up over all steps.
            parameter.grad = None
        loss = None
        for batch in step.batches[:-1]:
            if batch.weight or self._ddp.runs_always:
                with self._ddp.accumulating():
                    loss = self._forward_backward(batch, sums)
            else:
                self._forward_without_weight(batch, sums)
        # Only the last forward and backward pass of a step shares gradients between ranks. The
        # passes before run within no_sync(), where DistributedDataParallel only adds to this rank's
        # gradients, so that the sums are sent once.
        last = self._forward_backward(step.batches[-1], sums, timer)
        if last is not None:
            loss = last
        self._optimizer_step()
        if self._ddp.collectives.agree() and self._run:
            self._run.tell_of_uneven_end()
        if self._mean_watch:
            self._tell_of_mean(self._mean_watch)
        heartbeat()
        return loss

    def _tell_of_mean(self, watch: MeanWatch) -> None:
        """Print a line if the first steps show that the mean of the loss is not over samples.

        All ranks call this after the same steps, because ``MeanWatch.parts()`` is a collective. The
        watch ends once the line is printed or enough steps were watched.
        """
        parts = watch.parts(self.world)
        if parts and self._run:
            self._run.say(
                f"the loss's mean is over {parts}, and weight= does not say so: batches of other"
                " ranks and steps count as if it were over samples; see 'weight' in"
                " docs/guides/training.md"
            )
        if parts or watch.is_over:
            self._mean_watch = None

    def _forward_backward(
        self, batch: Batch, sums: MetricAccumulator, shared: ThroughputMeter | None = None
    ) -> Tensor | None:
        """Run a micro-batch, and add its gradients to those of the step.

        Args:
            batch: The micro-batch.
            sums: The epoch's figures.
            shared: Measures how long this rank waits for others; None for a pass in which ranks do
                not share gradients.

        Returns:
            The loss; None if the batch has no weight.
        """
        # A rank without samples that count must still take part in the all-reduce of the gradients:
        # DistributedDataParallel gets None, for a loss of 0, or the stand-in of the batch.
        runs = bool(batch.weight) or self._ddp.runs_always
        if shared:
            shared.start_wait()
            # The broadcast of the buffers waits for rank 0. Do not leave it to the forward pass of
            # DistributedDataParallel, where the wait could not be told from this rank's own work.
            self._ddp.share_buffers()
            shared.end_wait()
        with self._precision(), self._ddp.collectives.watching(), self._mean_watch or _NOTHING:
            loss, outputs = self._ddp.training(batch.data if runs else None)
        if shared:
            shared.start_wait()
        # DistributedDataParallel takes the plain mean over ranks; the scale turns it into the
        # weighted mean of the step. Do not multiply by 1, because each operation on a GPU costs
        # microseconds in both passes.
        scaled = loss if batch.scale == 1 else loss * batch.scale
        self.state.scaler.scale(scaled).backward()  # type: ignore[no-untyped-call]
        if shared:
            shared.end_wait()
        if not runs:
            self._forward_without_weight(batch, sums)
            return None
        _add(sums, batch, loss, outputs)
        return loss.detach() if batch.weight else None

    @torch.no_grad()
    def _forward_without_weight(self, batch: Batch, sums: MetricAccumulator) -> None:
        """Run the model on this rank's samples of a batch of weight 0, and add them to the metrics.

        Run it even if there are no metrics: otherwise adding a metric would change the random
        numbers and the running statistics of the model.
        """
        if batch.samples:
            with self._precision():
                loss, outputs = self._ddp.testing(batch.data)
            _add(sums, batch, loss, outputs)

    def _optimizer_step(self) -> None:
        state = self.state
        optimizers = self._optimizers
        if state.scaler.is_enabled():
            # Leave out an optimizer whose parameters are all frozen: it has no gradient, and
            # GradScaler asserts that each optimizer that it steps has one.
            optimizers = tuple(filter(has_gradients, optimizers))
        if self.config.max_grad_norm is not None or self.callback_runner.read_gradients:
            for optimizer in optimizers:
                state.scaler.unscale_(optimizer)
        # Call the callbacks after unscaling and before clipping, as on_before_optimizer_step
        # promises.
        if self.callback_runner.read_gradients:
            self.callback_runner.before_optimizer_step()
            self._ddp.check_requires_grad()
        if self.config.max_grad_norm is not None:
            parameters = stepped_parameters(self._optimizers)
            nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        for optimizer in self._newly_fused:
            leave_fused_for_sparse(optimizer)
        self._newly_fused.clear()
        # In fp16 a step with infinite or NaN gradients is skipped. All ranks skip it, because after
        # the all-reduce they have the same gradients.
        for optimizer in optimizers:
            state.scaler.step(optimizer)
        state.scaler.update()
        if self._average:
            self._average.update(first=state.step == 0)

    def _evaluate_and_checkpoint(self, run: FitLoop) -> None:
        if run.evaluations.due:
            run.record_evaluation(self._evaluate_within(run))
        run.maybe_checkpoint()

    def _evaluate_within(self, run: FitLoop) -> dict[str, float]:
        agree = run.policy.agree if run.policy else None
        with run.evaluation() as sets:
            return {
                figure_name(of, name): figure
                for of, steps in sets
                for name, figure in self._evaluate(steps, agree).items()
            }

    def _try_evaluation(self, run: FitLoop) -> None:
        """Evaluate one batch of each set, so that an error shows before an epoch of training.

        Figures are not computed: a metric may need more than one batch.
        """
        with run.trial() as sets:
            for _, steps in sets:
                with self._evaluating():
                    self._sums(steps, None)

    def _evaluate(
        self, steps: Iterator[StepBatches], agree: Callable[[], None] | None = None
    ) -> dict[str, float]:
        with self._evaluating():
            return self._sums(steps, agree).means()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put model and optimizers into evaluation mode within the block."""
        modules = [self._ddp.testing]
        if self._average:
            modules.append(self._evaluated)
        # share_all_buffers() is a collective, which all ranks call before their first batch.
        self._ddp.share_all_buffers(*modules)
        modes = [TrainingModes(module) for module in modules]
        for module in modules:
            module.eval()
        try:
            # Do not use inference_mode: tensors that a model caches in it could not be used in
            # training.
            with self.state.optimizer_modes.evaluating(), torch.no_grad():
                yield
        finally:
            for each in modes:
                each.restore()

    def _sums(
        self, steps: Iterator[StepBatches], agree: Callable[[], None] | None
    ) -> MetricAccumulator:
        sums = MetricAccumulator(self.all_metrics, self.world)
        for (batch,), *_ in steps:
            counts = batch.weight or sums.needs_outputs(batch.samples)
            if counts or self._ddp.evaluates_always:
                with self._precision(), self._ddp.evaluation_collectives.watching():
                    # Call the unwrapped model: there are no gradients to share, and buffers are
                    # shared already.
                    loss, outputs = self._evaluated(batch.data)
            self._ddp.evaluation_collectives.agree()
            if counts:
                _add(sums, batch, loss, outputs)
            heartbeat()
            if agree:
                agree()
        return sums

    def _warm_up_buckets(self, steps: Iterator[StepBatches]) -> None:
        """Make a forward and backward pass, after which DistributedDataParallel orders its buckets
        as after the first step of a run, and drop its gradients.

        The model's buffers and the random states change too; the caller then loads a checkpoint.

        Args:
            steps: The steps of this epoch, the first of which is read.
        """
        if not self._ddp.rebuilds_buckets:
            return
        step = next(steps, None)
        if step is None:
            return
        with self._precision(), self._ddp.collectives.watching():
            loss, _ = self._ddp.training(step.batches[0].data)
        self._ddp.collectives.agree()
        loss.backward()  # type: ignore[no-untyped-call]
        self._ddp.static_graph_recorded()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass with the configured precision."""
        if self.config.precision == "fp32":
            return _NOTHING
        if self.config.precision == "bf16":
            dtype = torch.bfloat16
        else:
            dtype = torch.float16
        return torch.autocast(self.world.device.type, dtype)


def _add(sums: MetricAccumulator, batch: Batch, loss: Tensor, outputs: Any) -> None:
    targets = targets_of(batch.data)
    sums.add(loss, outputs, targets, samples=batch.samples, weight=batch.weight)


def _with_states(loss_function: object, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the loss function and the callbacks that have a state, by name.

    The name of a callback does not change if callbacks of other classes are added or removed.
    """
    parts: dict[str, Any] = {}
    if isinstance(loss_function, nn.Module) and loss_function.state_dict():
        parts["the loss function"] = loss_function
    numbers: Counter[str] = Counter()
    for callback in callbacks:
        if type(callback).state_dict is Callback.state_dict:
            continue
        name = type(callback).__name__
        numbers[name] += 1
        # If there are several callbacks of a class, the first one has the plain name.
        parts[f"{name} {numbers[name]}" if numbers[name] > 1 else name] = callback
    return parts
