"""What one call of ``fit()`` does before, between and after the steps."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from srunddp.bootstrap.environment.cpus import Cpus, advice
from srunddp.config.parse import save_config
from srunddp.errors import ConfigError, file_errors
from srunddp.telemetry import MONITOR_FOLDER, event, heartbeat
from srunddp.train import validate
from srunddp.train.callback_runner import CallbackRunner
from srunddp.train.checkpoint_policy import CheckpointPolicy, StopTraining
from srunddp.train.config import Config
from srunddp.train.data import workers
from srunddp.train.data.loader import DistributedDataLoader
from srunddp.train.data.order import Order, Sequential
from srunddp.train.data.reader import Collate, Weight
from srunddp.train.data.sampler import length_of
from srunddp.train.data.steps import StepBatches
from srunddp.train.evaluations import Evaluations
from srunddp.train.fewer_ranks import WorldSizes, what_cannot_follow
from srunddp.train.metrics.accumulator import Metric, MetricAccumulator
from srunddp.train.metrics.logger import MetricsLogger
from srunddp.train.model.ddp import DDPModel
from srunddp.train.progress import EpochRecord, Progress, SilentProgress
from srunddp.train.rng import preserved_rng
from srunddp.train.schedulers import Scheduler, Schedulers
from srunddp.train.start_settings import of_schedulers
from srunddp.train.state import TrainingState
from srunddp.train.step_timer import make_step_timer
from srunddp.train.world import World, check_all_leave
from srunddp.util.sample_files import SETTINGS

ValData: TypeAlias = Dataset[Any] | Mapping[str, Dataset[Any]] | None
"""The validation data of ``fit()``: a data set, or several by name."""


@dataclass(frozen=True, kw_only=True)
class LoopContext:
    """The objects that a Trainer shares with its loop.

    Attributes:
        config: The settings; with ``--min-nodes`` they are adjusted to the present number of ranks.
        given_config: The settings as the script has given them, before that adjustment.
        world_sizes: The numbers of ranks that the run may have; None if the number does not change.
        world: The ranks that train together.
        state: Where training stands; the loop counts its steps and epochs.
        ddp: The model in DistributedDataParallel. After a callback the loop makes it share the
            gradients of those parameters that require a gradient by then.
        metrics: The metrics of training and evaluations, by name.
        val_metrics: The metrics of evaluations only, by name.
        weight: Returns how much a batch counts; None for its number of samples.
        schedulers: The user's schedulers, one for each optimizer; empty if the settings define the
            schedule.
        callbacks: Calls the user's callbacks.
        warm_up_buckets: Called with steps before a checkpoint is loaded; makes a forward and
            backward pass of the first one, so that DistributedDataParallel orders its buckets.
    """

    config: Config
    given_config: Config
    world_sizes: WorldSizes | None
    world: World
    state: TrainingState
    ddp: DDPModel
    metrics: Mapping[str, Metric]
    val_metrics: Mapping[str, Metric]
    weight: Weight | None
    schedulers: tuple[Scheduler, ...]
    callbacks: CallbackRunner
    warm_up_buckets: Callable[[Iterator[StepBatches]], None]

    @property
    def all_metrics(self) -> dict[str, Metric]:
        """The metrics of training, and those of evaluations only."""
        return {**self.metrics, **self.val_metrics}


@dataclass(frozen=True, kw_only=True)
class FitData:
    """The data of one call of ``Trainer.fit()``; the fields have the names of its arguments."""

    train_data: Dataset[Any]
    val_data: ValData
    order: Order | None
    collate: Collate | None
    val_collate: Collate | None
    sharded: bool


def _by_name(val_data: ValData, metrics: Mapping[str, Metric]) -> dict[str, Dataset[Any]]:
    """Return the validation sets by name; a single set has the name ``""``.

    Raises:
        ConfigError: A name is empty, has a slash or is the name of a figure; or the mapping is
            empty.
    """
    if val_data is None:
        return {}
    # A data set may itself be a mapping, from indices to samples. Only a mapping whose keys are all
    # strings has several sets.
    if not isinstance(val_data, Mapping) or not all(isinstance(each, str) for each in val_data):
        return {"": cast(Dataset[Any], val_data)}
    for name in val_data:
        if not name or "/" in name or name in ("loss", *metrics):
            raise ConfigError(
                f"a validation set with the name {name!r}",
                expected="a word without '/', and not the name of a figure",
                hint="rename it",
            )
    if not val_data:
        raise ConfigError(
            "val_data without a data set",
            expected="one at least, or None",
            hint="check what was passed to fit()",
        )
    return dict(val_data)


def make_loader(
    data: Dataset[Any],
    config: Config,
    world: World,
    *,
    name: str,
    collate: Collate | None,
    weight: Weight | None,
    sharded: bool,
    order: Order | None = None,
    training: bool = False,
    log: Callable[[str], None] | None = None,
) -> DistributedDataLoader:
    """Create a loader with a Trainer's settings; a collective.

    Args:
        data: A data set with indices, or an iterable one.
        config: The settings.
        world: The ranks, all of which create the loader.
        name: The name of the data in messages.
        collate: Makes a batch from a list of samples; None for torch's ``default_collate``.
        weight: Returns how much a batch counts; None for its number of samples.
        sharded: Whether the data splits itself by rank and worker.
        order: The order of training samples; None shuffles them.
        training: Whether the data is for training. Data for evaluations keeps its own order.
        log: Prints a line for the user, on rank 0; None logs it.

    Raises:
        ConfigError: The arguments do not fit together, or differ between ranks.
    """
    if not training and not isinstance(data, IterableDataset):
        order = Sequential(length_of(data) or 0)
    return DistributedDataLoader(
        data,
        world,
        batch_size=config.batch_size,
        order=order,
        seed=config.seed,
        collate=collate,
        weight=weight,
        sharded=sharded,
        drop_last=training and config.dataloader.drop_last,
        # A step that calls all_gather needs tensors of one shape on all ranks. In training only an
        # epoch's last step can be uneven, and the user is told; an evaluation must not fail.
        equal_batches=not training,
        gradient_accumulation_steps=config.gradient_accumulation_steps if training else 1,
        num_workers=config.dataloader.num_workers,
        prefetch_factor=config.dataloader.prefetch_factor,
        # The default number of workers uses all CPUs of the rank. So workers of an evaluation end
        # with the evaluation: otherwise they would take CPUs from the workers of training.
        persistent_workers=training and config.dataloader.persistent_workers,
        pin_memory=config.dataloader.pin_memory,
        multiprocessing_context=config.dataloader.multiprocessing_context,
        channels_last=config.channels_last,
        signals=config.preemption.signals,
        resume_changed_data=config.resume_changed_data,
        name=name,
        log=log,
    )


def _of_val_data(name: str) -> str:
    """Return how messages call a validation set: ``val_data``, followed by its name, if any."""
    return f"val_data {name}" if name else "val_data"


class FitLoop:
    """Does everything before, between and after the steps of a :class:`srunddp.train.Trainer`.

    Use it as a context manager around the steps of one call of ``fit()``.

    Attributes:
        timer: Measures where the time of the steps goes.
        evaluations: Decides when evaluations are due, and keeps the best one.
        policy: Decides on checkpoints and stops; None without an ``output_dir``.
    """

    def __init__(self, context: LoopContext, given: FitData) -> None:
        """Check the data, and create its loaders; a collective.

        Args:
            context: The objects of the Trainer.
            given: The arguments of ``fit()``.

        Raises:
            ConfigError: Arguments do not fit together, or a data set is empty or differs between
                ranks.
        """
        config = context.config
        world = context.world
        self._context = context
        self._config = config
        self._world = world
        self._state = context.state
        self._progress = Progress() if world.rank == 0 else SilentProgress()
        self.timer = make_step_timer(world.device)
        val_sets = _by_name(given.val_data, context.all_metrics)
        named: dict[str, Dataset[Any] | None] = {"val_data": None}
        if val_sets:
            named = {_of_val_data(name): each for name, each in val_sets.items()}
        validate.check_fit(world, {"train_data": given.train_data, **named}, context.weight, config)
        if given.collate and val_sets and not given.val_collate:
            raise ConfigError(
                "collate and val_data, without val_collate",
                expected=(
                    "both said: what mixes samples for training would make the evaluation wrong"
                ),
                hint="pass val_collate=collate, or val_collate=torch.utils.data.default_collate",
            )
        # Set the number of threads before creating the loaders, because forked workers inherit it.
        workers.set_threads(workers.share(world), config.num_threads)
        self._loader = make_loader(
            given.train_data,
            config,
            world,
            name="train_data",
            order=given.order,
            collate=given.collate,
            weight=context.weight,
            sharded=given.sharded,
            training=True,
            log=self.say,
        )
        self._val_loaders = {
            name: make_loader(
                each,
                config,
                world,
                name=_of_val_data(name),
                collate=given.val_collate,
                weight=context.weight,
                sharded=given.sharded and isinstance(each, IterableDataset),
            )
            for name, each in val_sets.items()
        }
        evaluates = config.evaluate_every_epochs or config.evaluate_every_steps
        if config.patience and val_sets and not evaluates:
            self.say(
                f"patience={config.patience} has no effect, as evaluate_every_epochs and"
                " evaluate_every_steps are 0"
            )
        # Samples per epoch, over all ranks; None if the number is not known.
        self._samples: int | None
        if given.order:
            self._samples = len(given.order)
        elif not given.sharded:
            self._samples = length_of(given.train_data)
        else:
            self._samples = None
        validate.check_batch_norm(context.ddp.model, self._samples, world, config)
        self._is_sharded = given.sharded
        self._callbacks = context.callbacks
        self._stack = ExitStack()
        self._sums: MetricAccumulator | None = None
        self.evaluations = Evaluations(
            config,
            context.all_metrics if val_sets else context.metrics,
            context.state,
            sets=[*val_sets],
        )
        self._metrics_logger: MetricsLogger | None = None
        self.policy: CheckpointPolicy | None = None

    def __enter__(self) -> Self:
        """Prepare everything, and continue from a checkpoint if there is one."""
        try:
            self._get_ready()
        except BaseException as error:
            # Python does not call __exit__ if __enter__ raises.
            self._stack.close()
            self._check_leaving(error)
            raise
        return self

    def _get_ready(self) -> None:
        event("fit", self._loader.num_workers)
        self._stack.callback(self._progress.close)
        if self._world.rank == 0:
            for line in advice(os.environ, Cpus.here()):
                self._progress.log(line)
        self._set_up_epochs()
        for line in what_cannot_follow(
            self._context.given_config,
            self._context.world_sizes,
            sharded=self._is_sharded,
            steps_scheduler=bool(self._schedulers.made_for_steps),
        ):
            self._progress.log(line)
        if self._config.output_dir:
            self._open(Path(self._config.output_dir))
        self._callbacks.fit_start()

    def _set_up_epochs(self) -> None:
        """Set the loader and the number of steps in the state, and create the schedulers.

        Raises:
            ConfigError: The schedulers do not fit the number of steps, or the evaluations.
        """
        state = self._state
        config = self._config
        per_epoch = self._loader.steps_left(0)
        # Set this before creating schedulers: the user's function may read trainer.total_steps.
        if config.max_steps:
            state.total_steps = config.max_steps
        elif per_epoch is None:
            state.total_steps = None
        else:
            state.total_steps = per_epoch * config.epochs
        if state.samples_seen:
            # fit() is called again after the previous call was left within an epoch, for example by
            # an error in a callback. The state still has the loader of that call, which knows the
            # position in the epoch.
            self._loader.load_state_dict(state.parts["loader"].state_dict())
        state.steps_per_epoch = per_epoch
        state.parts = {**state.parts, "loader": self._loader}
        if state.schedulers is None:
            state.schedulers = Schedulers(
                state.optimizers,
                self._context.schedulers,
                config,
                state.total_steps,
                self._steps_done,
            )
            state.settings.scheduler = of_schedulers(state.schedulers.all)
        self._schedulers = state.schedulers
        evaluates = (
            not self._val_loaders or config.evaluate_every_epochs or config.evaluate_every_steps
        )
        if self._schedulers.wait_for_evaluations and not evaluates:
            raise ConfigError(
                "ReduceLROnPlateau, and evaluate_every_epochs and evaluate_every_steps are 0",
                expected="evaluations, after each of which it is stepped",
                hint="set evaluate_every_epochs=1",
            )
        self._schedulers.check_direction(state.monitor, state.mode)

    def _steps_done(self) -> float:
        """Return how many steps, of the present size, the samples seen so far make.

        If the run began with another number of ranks, steps had another size, and the result, which
        stands for the share of the training that is done, may be a fraction.
        """
        state = self._state
        if self._config.max_steps or not self._samples or not state.steps_per_epoch:
            return state.step
        return (state.epoch + state.samples_seen / self._samples) * state.steps_per_epoch

    def _open(self, folder: Path) -> None:
        state = self._state
        self.policy = CheckpointPolicy(
            self._config,
            self._world,
            state,
            self._stack,
            log=self._progress.log,
            written=self._callbacks.checkpoint,
        )
        # If fit() is called a second time, do not load a checkpoint: the newest one may be older
        # than the model that the Trainer has.
        if state.step == 0:
            self.policy.restore(self._before_restore)
        if self.is_over:
            self._progress.log(
                f"nothing to do: epochs done: {state.epoch}, steps done: {state.step}"
            )
        if self._world.rank == 0:
            path = folder / "config.yaml"
            hint = "correct output_dir, or free space there"
            with file_errors(str(path), expected="a folder that rank 0 may write to", hint=hint):
                save_config(path, self._context.given_config)
            # With --monitor, write the settings of this start for the report of the run.
            if monitor := os.environ.get(MONITOR_FOLDER):
                with suppress(OSError):
                    save_config(Path(monitor, SETTINGS), self._config)
            self._metrics_logger = MetricsLogger(
                folder, self._config.tensorboard, self._progress.log
            )
            self._stack.callback(self._metrics_logger.close)
            # The previous run may have written figures after its last checkpoint. Their steps are
            # repeated, so the figures would be there twice.
            self._metrics_logger.rewind(state.step)

    def _before_restore(self, saved: Mapping[str, Any]) -> None:
        """Check that the checkpoint fits this run, and prepare the model for it.

        Args:
            saved: The content of the checkpoint, none of which is restored yet.

        Raises:
            ConfigError: An epoch had another number of steps, and a scheduler depends on it.
            CheckpointError: The checkpoint has other optimizers or parameters.
        """
        state = self._state
        if self._schedulers.made_for_steps:
            made_for = self._schedulers.made_for_steps
            validate.check_steps_per_epoch(
                saved["steps_per_epoch"], state.steps_per_epoch, made_for
            )
        for line in state.differences(saved):
            self._progress.log(line)
        trained = len(state.parameters.trained())
        state.prepare_for(saved)
        saved_trained = len(state.parameters.trained())
        if trained != saved_trained:
            self._progress.log(
                f"{saved_trained} parameters require a gradient, as in the checkpoint, instead of"
                f" {trained}, as in the script"
            )
        self._context.ddp.follow_requires_grad()
        # DistributedDataParallel puts the gradients of its first step into buckets by the order of
        # the parameters, and those of later steps by the order in which gradients were ready. With
        # other buckets, rounding differs. So make its first step here: loading the checkpoint then
        # removes all other traces of that step, and the next step is bit for bit the same as in a
        # run without a stop.
        self._context.warm_up_buckets(self.steps())

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train.

        All epochs or steps are done, or ``patience`` evaluations have passed without a better
        figure.
        """
        state = self._state
        config = self._config
        if config.max_steps:
            done = state.step >= config.max_steps
        else:
            done = state.epoch >= config.epochs
        return done or (self.evaluations.early_stopped and not state.samples_seen)

    def say(self, line: str) -> None:
        """Print a line for the user, on rank 0.

        Args:
            line: The line, without ``srunddp:`` before it.
        """
        self._progress.log(line)

    def tell_of_uneven_end(self) -> None:
        """Warn that an uneven last step of an epoch may break a step that calls collectives."""
        ranks = self._world.world_size
        if self._samples and self._samples % ranks and not self._config.dataloader.drop_last:
            self.say(
                "the step calls collectives, and in an epoch's last step some ranks have a sample"
                f" less ({self._samples} samples, {ranks} ranks): all_gather and others fail or"
                " hang there, as their tensors must be of one shape; dataloader.drop_last=true"
                " leaves that step out"
            )

    def log(self, kind: str, figures: Mapping[str, float]) -> None:
        """Write a line of ``metrics.jsonl``; do nothing on ranks other than 0, or without an
        ``output_dir``.

        Args:
            kind: ``step``, ``epoch``, ``evaluation`` or ``log``.
            figures: The figures by name.
        """
        if self._metrics_logger:
            self._metrics_logger.add(kind, self._state.step, **figures)

    def start_epoch(self) -> MetricAccumulator:
        """Begin an epoch, or continue one from a checkpoint; return the accumulator of
        its figures.
        """
        state = self._state
        config = self._config
        steps = state.steps_per_epoch
        left = self._loader.steps_left(state.samples_seen)
        if steps is not None and left is not None:
            done = steps - left
        else:
            done = 0
        if not config.max_steps:
            epochs = config.epochs
        elif steps:
            epochs = math.ceil(config.max_steps / steps)
        else:
            epochs = 0
        self._progress.start_epoch(state.epoch + 1, epochs, steps, done)
        self.timer.epoch(state.epoch + 1)
        self._sums = MetricAccumulator(self._context.metrics, self._world, state.sums)
        return self._sums

    def steps(self) -> Iterator[StepBatches]:
        """Yield the remaining steps of this epoch.

        Raises:
            ConfigError: The data did not yield a single step.
        """
        state = self._state
        is_read = self._loader.state_dict()["epoch"] > state.epoch + 1
        if state.samples_seen and (is_read or self.evaluations.early_stopped):
            # The checkpoint was written when the epoch's last step was done and the epoch was not
            # over: during its evaluation, or after the evaluation that ended training. To read on
            # would begin the next epoch.
            return
        self._loader.set_epoch(state.epoch + 1)
        for step in self.timer.timed(self._loader.steps()):
            yield step
            if self.evaluations.early_stopped or state.step == self._config.max_steps:
                return
        if not state.samples_seen:
            sizes = "batch_size and gradient_accumulation_steps"
            raise ConfigError(
                "an epoch without a step",
                expected="training data for one",
                hint=f"check what the data set yields; with dataloader.drop_last, also {sizes}",
            )

    @contextmanager
    def evaluation(self) -> Iterator[Iterator[tuple[str, Iterator[StepBatches]]]]:
        """Yield the names of the validation sets, each with its batches as steps of one batch.

        The caller evaluates in the block. The time of the block does not count as training, and the
        random states of training are the same after it as before.
        """
        # outside() replaces the random state of training steps by that from which callbacks draw.
        # preserved_rng() restores the latter, because an evaluation must change neither.
        outside = self._state.step_rng.outside()
        with self._progress.paused(), outside, preserved_rng(self._world):
            # The ranks agree on a stop each time after as many steps as take about a second. Steps
            # of an evaluation are faster or slower than those of training, so the number begins
            # with 1 again at the start of the evaluation and after it.
            if self.policy:
                self.policy.begin()
            event("evaluation")
            yield self._val_steps()
            event("evaluation_end")
        if self.policy:
            self.policy.begin()

    @contextmanager
    def trial(self) -> Iterator[Iterator[tuple[str, Iterator[StepBatches]]]]:
        """Yield the same as :meth:`evaluation`, but only one batch per set, to try
        an evaluation.
        """
        with self._state.step_rng.outside(), preserved_rng(self._world):
            yield ((name, itertools.islice(steps, 1)) for name, steps in self._val_steps())

    def _val_steps(self) -> Iterator[tuple[str, Iterator[StepBatches]]]:
        for name, loader in self._val_loaders.items():
            # Without this call the loader would count its epochs. But each evaluation must read the
            # same samples, even if the data set draws random numbers.
            loader.set_epoch(0)
            yield name, loader.steps()

    def after_step(self, step: StepBatches, loss: Tensor | None) -> None:
        """Count a step, report it, and step the schedulers.

        Args:
            step: The batches of the step.
            loss: The loss of this rank's last micro-batch; None if this rank had no samples.
        """
        state = self._state
        config = self._config
        state.step += 1
        state.samples_seen += step.samples
        self._progress.step(step.samples, loss)
        if self._callbacks.follow_steps:
            self._callbacks.step(state.step, loss)
            # A callback may have frozen or unfrozen parameters. Pass at_epoch=False, because with
            # True this call would be a collective in each step.
            self._context.ddp.follow_requires_grad(at_epoch=False)
        if self._metrics_logger and config.log_every and state.step % config.log_every == 0:
            # Write a line only every log_every steps: float() waits until the GPU has computed the
            # step.
            if loss is None:
                figures = {}
            else:
                figures = {"loss": float(loss)}
            self.log("step", {**figures, "lr": float(state.optimizers[0].param_groups[0]["lr"])})
        # Step the schedulers after the log line, which shows the learning rate of this step.
        self._schedulers.after_step()
        self.timer.done(step.samples)

    def record_evaluation(self, figures: Mapping[str, float]) -> None:
        """Record the figures of an evaluation after this step, and pass them to callbacks.

        If figures of this step are recorded already, as may happen at the end of an epoch, nothing
        is done.

        Args:
            figures: The figures by name, the same on all ranks.
        """
        if self._state.evaluated < self._state.step:
            if self._callbacks.follow_evaluations:
                self._callbacks.evaluation(figures)
                self._context.ddp.follow_requires_grad(at_epoch=False)
            self.log("evaluation", figures)
            self._record(figures)

    def _record(self, figures: Mapping[str, float]) -> None:
        figure, is_best = self.evaluations.record(figures)
        self._schedulers.after_evaluation(figure)
        if is_best and self.policy and self._config.checkpoint.keep_best:
            # Saving is a collective, so ``due`` must be the same on all ranks. It is, because the
            # figures are the same.
            self.policy.due = True

    def maybe_checkpoint(self) -> None:
        """Write a checkpoint if one is due after this step.

        Raises:
            StopTraining: All ranks have agreed to stop after this step.
        """
        if self.policy:
            self.policy.after_step(self._sums)

    @property
    def _is_cut(self) -> bool:
        """Whether ``max_steps`` ends the run within this epoch; a longer run would continue
        in it.
        """
        state = self._state
        if state.step != self._config.max_steps or not state.samples_seen:
            return False
        return self._loader.steps_left(state.samples_seen) != 0

    def end_epoch(self, train: Mapping[str, float], val: Mapping[str, float]) -> None:
        """Record an epoch that is over, or that ``max_steps`` ends early.

        Args:
            train: The figures of training, by name.
            val: The figures of the evaluation at the end of the epoch; empty if there was none.
        """
        state = self._state
        speed = self._progress.samples_per_second
        world = self._world
        event("epoch_end", state.epoch + 1)
        record = EpochRecord(
            state.epoch + 1, dict(train), dict(val), speed, world.world_size, world.device.type
        )
        self._progress.end_epoch(record)
        if val:
            self.record_evaluation(val)
        elif not self._val_loaders:
            self._record(train)
        # Replace the record of a part of this epoch, which a run that max_steps ended has made.
        state.records = [*(each for each in state.records if each.epoch < record.epoch), record]
        # If max_steps ends the epoch early, keep its position and sums: a run with more steps
        # continues within the epoch.
        if not self._is_cut:
            state.epoch += 1
            state.samples_seen = 0
            state.sums = []
            self._sums = None
            self._schedulers.after_epoch()
        self.log(
            "epoch",
            {
                "epoch": record.epoch,
                **train,
                **{f"val/{name}": value for name, value in val.items()},
            },
        )
        self._callbacks.epoch(record)
        if self.policy:
            self.policy.after_epoch(self._sums)

    def finish(self) -> None:
        """Write the last checkpoint, wait until it is written, and call ``on_fit_end``.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        heartbeat(last=True)
        if self.evaluations.early_stopped and self._state.epoch < self._config.epochs:
            evaluations = self._state.evals_since_best
            self._progress.log(
                f"no better {self._config.monitor} in {evaluations} evaluations: training is over"
            )
        if self.policy:
            self.policy.finish(self._sums)
        self._callbacks.fit_end()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Keep the stack open until the last checkpoint is written, because it holds the signal
        # handlers: a second signal must not end the rank before.
        with self._stack:
            if self.policy and isinstance(error, StopTraining):
                self.policy.save_and_stop(self._sums)
            self._check_leaving(error)

    def _check_leaving(self, error: BaseException | None) -> None:
        """Check that all ranks leave if ``error`` ends this rank with exit code 0.

        A callback or the data set may have called ``sys.exit()`` on this rank only.

        Raises:
            ConfigError: Other ranks go on.
        """
        if isinstance(error, SystemExit) and not error.code:
            check_all_leave(self._world)
