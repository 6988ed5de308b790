"""One call of ``fit()``: what goes on around its steps."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from srunddp.bootstrap.environment.cpus import Cpus, advice
from srunddp.config.parse import save_config
from srunddp.errors import ConfigError, file_errors
from srunddp.telemetry import event, heartbeat
from srunddp.train import validate
from srunddp.train.checkpoint_policy import CheckpointPolicy, StopTraining
from srunddp.train.data import workers
from srunddp.train.data.loader import DistributedDataLoader
from srunddp.train.data.order import Order, Sequential
from srunddp.train.data.sampler import length_of
from srunddp.train.data.steps import StepBatches
from srunddp.train.evaluations import Evaluations
from srunddp.train.metrics.accumulator import Metric, MetricAccumulator
from srunddp.train.metrics.logger import MetricsLogger
from srunddp.train.progress import EpochRecord, Progress, SilentProgress
from srunddp.train.rng import preserved_rng
from srunddp.train.schedulers import Schedulers
from srunddp.train.start_settings import of_schedulers
from srunddp.train.step_timer import make_step_timer
from srunddp.train.world import check_all_leave

if TYPE_CHECKING:
    from srunddp.train.trainer import Trainer


ValData: TypeAlias = Dataset[Any] | Mapping[str, Dataset[Any]] | None
"""What ``fit()`` is given to evaluate on: a data set, or several by name."""


def _by_name(val_data: ValData, metrics: Mapping[str, Metric]) -> dict[str, Dataset[Any]]:
    """Return the validation sets by name; one that was passed alone has the name ``""``.

    Raises:
        ConfigError: Their names cannot be told from those of figures.
    """
    if val_data is None:
        return {}
    # A data set may be a mapping, too, of indices.
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
    trainer: Trainer,
    data: Dataset[Any],
    *,
    name: str,
    collate: Callable[[list[Any]], Any] | None,
    sharded: bool,
    order: Order | None = None,
    training: bool = False,
    log: Callable[[str], None] | None = None,
) -> DistributedDataLoader:
    """A loader by the Trainer's settings; ``name``: of the data in messages; ``training``: of
    training data, else of data for an evaluation.
    """
    config = trainer.config
    if not training and not isinstance(data, IterableDataset):
        order = Sequential(length_of(data) or 0)
    return DistributedDataLoader(
        data,
        trainer.world,
        batch_size=config.batch_size,
        order=order,
        seed=config.seed,
        collate=collate,
        weight=trainer.weight,
        sharded=sharded,
        drop_last=training and config.dataloader.drop_last,
        # As in training, where all but the last step are full: a step may call collectives.
        equal_batches=not training,
        gradient_accumulation_steps=config.gradient_accumulation_steps if training else 1,
        num_workers=config.dataloader.num_workers,
        prefetch_factor=config.dataloader.prefetch_factor,
        # Those of an evaluation end with it: else both would stay, twice as many as there are CPUs
        # for.
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
    """Return what a message calls a validation set."""
    return f"val_data {name}" if name else "val_data"


class FitLoop:
    """What happens before, between and after the steps of a :class:`srunddp.train.Trainer`. A
    context manager.

    Attributes:
        timer: notes where the time of its steps goes; evaluations: when they are due, and the best
            of them.
        policy: of checkpoints and stops; None without an ``output_dir``.
    """

    def __init__(
        self,
        trainer: Trainer,
        train_data: Dataset[Any],
        val_data: ValData,
        order: Order | None,
        collate: Callable[[list[Any]], Any] | None,
        val_collate: Callable[[list[Any]], Any] | None,
        sharded: bool,
    ) -> None:
        """The arguments are those of :meth:`srunddp.train.Trainer.fit`."""
        config = trainer.config
        world = trainer.world
        self._trainer = trainer
        self._config = config
        self._world = world
        self._state = trainer.state
        self._progress = Progress() if world.rank == 0 else SilentProgress()
        self.timer = make_step_timer(world.device)
        val_sets = _by_name(val_data, trainer.all_metrics)
        named: dict[str, Dataset[Any] | None] = {"val_data": None}
        if val_sets:
            named = {_of_val_data(name): each for name, each in val_sets.items()}
        validate.check_fit(world, {"train_data": train_data, **named}, trainer.weight, config)
        if collate and val_sets and not val_collate:
            raise ConfigError(
                "collate and val_data, without val_collate",
                expected=(
                    "both said: what mixes samples for training would make the evaluation wrong"
                ),
                hint="pass val_collate=collate, or val_collate=torch.utils.data.default_collate",
            )
        workers.set_threads(workers.share(world), config.num_threads)
        self._loader = make_loader(
            trainer,
            train_data,
            name="train_data",
            order=order,
            collate=collate,
            sharded=sharded,
            training=True,
            log=self.say,
        )
        self._val_loaders = {
            name: make_loader(
                trainer,
                each,
                name=_of_val_data(name),
                collate=val_collate,
                sharded=sharded and isinstance(each, IterableDataset),
            )
            for name, each in val_sets.items()
        }
        evaluates = config.evaluate_every_epochs or config.evaluate_every_steps
        if config.patience and val_sets and not evaluates:
            self.say(
                f"patience={config.patience} has no effect, as evaluate_every_epochs and"
                " evaluate_every_steps are 0"
            )
        self._samples: int | None
        if order:
            self._samples = len(order)
        elif not sharded:
            self._samples = length_of(train_data)
        else:
            self._samples = None
        validate.check_batch_norm(trainer.model, self._samples, world, config)
        self._callbacks = trainer.callback_runner
        self._stack = ExitStack()
        self._sums: MetricAccumulator | None = None
        self.evaluations = Evaluations(
            config,
            trainer.all_metrics if val_sets else trainer.metrics,
            trainer.state,
            sets=[*val_sets],
        )
        self._metrics_logger: MetricsLogger | None = None
        self.policy: CheckpointPolicy | None = None

    def __enter__(self) -> Self:
        """Get all ready, and go on from a checkpoint where there is one."""
        try:
            self._get_ready()
        except BaseException as error:
            self._stack.close()
            self._check_leaving(error)
            raise
        return self

    def _get_ready(self) -> None:
        event("fit")
        self._stack.callback(self._progress.close)
        if self._world.rank == 0:
            for line in advice(os.environ, Cpus.here()):
                self._progress.log(line)
        self._set_up_epochs()
        if self._config.output_dir:
            self._open(Path(self._config.output_dir))
        self._callbacks.fit_start()

    def _set_up_epochs(self) -> None:
        """Tell the state of this call's loader, and how many steps there are; and the schedulers,
        which go by them.
        """
        state = self._state
        config = self._config
        trainer = self._trainer
        per_epoch = self._loader.steps_left(0)
        whole = config.max_steps or (per_epoch and per_epoch * config.epochs)
        trainer.total_steps = whole
        if state.samples_seen:  # fit() was left amid an epoch, and is called again
            self._loader.load_state_dict(state.parts["loader"].state_dict())
        state.steps_per_epoch = per_epoch
        state.parts = {**state.parts, "loader": self._loader}
        if state.schedulers is None:
            state.schedulers = Schedulers(
                state.optimizers, trainer.schedulers, config, whole, self._steps_done
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
        """Steps of this world that the samples so far make, so that another world's steps count by
        their samples.
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
        if state.step == 0:  # a trainer that has made steps goes on from where it is
            self.policy.restore(self._before_restore)
        if self.is_over:
            self._progress.log(
                f"nothing to do: epochs done: {state.epoch}, steps done: {state.step}"
            )
        if self._world.rank == 0:
            path = folder / "config.yaml"
            hint = "correct output_dir, or free space there"
            with file_errors(str(path), expected="a folder that rank 0 may write to", hint=hint):
                save_config(path, self._config)
            self._metrics_logger = MetricsLogger(
                folder, self._config.tensorboard, self._progress.log
            )
            self._stack.callback(self._metrics_logger.close)
            self._metrics_logger.rewind(state.step)

    def _before_restore(self, saved: Mapping[str, Any]) -> None:
        """Check that the checkpoint is of this run, and have DistributedDataParallel make its first
        step.
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
                f"{saved_trained} parameters require a gradient, as in the checkpoint, and not"
                f" {trained}, as the script has it"
            )
        self._trainer.follow_requires_grad()
        self._trainer.warm_up_buckets(self.steps())

    @property
    def is_over(self) -> bool:
        """Whether all epochs, or all steps, are done, or the figures have not become better for
        long enough.
        """
        state = self._state
        config = self._config
        if config.max_steps:
            done = state.step >= config.max_steps
        else:
            done = state.epoch >= config.epochs
        return done or (self.evaluations.early_stopped and not state.samples_seen)

    def say(self, line: str) -> None:
        """Print a line for the user, on rank 0."""
        self._progress.log(line)

    def tell_of_uneven_end(self) -> None:
        """Say what an epoch's last step may do to a step that calls collectives, if anything."""
        ranks = self._world.world_size
        if self._samples and self._samples % ranks and not self._config.dataloader.drop_last:
            self.say(
                "the step calls collectives, and in an epoch's last step some ranks have a sample"
                f" less ({self._samples} samples, {ranks} ranks): all_gather and others fail or"
                " hang there, as their tensors must be of one shape; dataloader.drop_last=true"
                " leaves that step out"
            )

    def log(self, kind: str, figures: Mapping[str, float]) -> None:
        """A line of ``metrics.jsonl``, on rank 0 where there is an ``output_dir``."""
        if self._metrics_logger:
            self._metrics_logger.add(kind, self._state.step, **figures)

    def start_epoch(self) -> MetricAccumulator:
        """The figures of the epoch that begins, or goes on from a checkpoint."""
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
            epochs = -(-config.max_steps // steps)
        else:
            epochs = 0
        self._progress.start_epoch(state.epoch + 1, epochs, steps, done)
        self.timer.epoch(state.epoch + 1)
        self._sums = MetricAccumulator(self._trainer.metrics, self._world, state.sums)
        return self._sums

    def steps(self) -> Iterator[StepBatches]:
        """The steps that are left of this epoch."""
        state = self._state
        is_read = self._loader.state_dict()["epoch"] > state.epoch + 1
        if state.samples_seen and (is_read or self.evaluations.early_stopped):
            # A resume amid the evaluation at the epoch's end, or after the one that ended training.
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
        """Around an evaluation: the validation sets by name, and their batches as steps.

        Training's clock and random states stand still.
        """
        outside = self._state.step_rng.outside()
        with self._progress.paused(), outside, preserved_rng(self._world):
            if self.policy:
                self.policy.begin()
            event("evaluation")
            yield self._val_steps()
            event("evaluation_end")
        if self.policy:
            self.policy.begin()

    @contextmanager
    def trial(self) -> Iterator[Iterator[tuple[str, Iterator[StepBatches]]]]:
        """Around a trial of the evaluation: as :meth:`evaluation`, with one batch of each set."""
        with self._state.step_rng.outside(), preserved_rng(self._world):
            yield ((name, itertools.islice(steps, 1)) for name, steps in self._val_steps())

    def _val_steps(self) -> Iterator[tuple[str, Iterator[StepBatches]]]:
        for name, loader in self._val_loaders.items():
            loader.set_epoch(0)  # again: each evaluation reads the same
            yield name, loader.steps()

    def after_step(self, step: StepBatches, loss: Tensor | None) -> None:
        """Count a step, tell of it, and step the schedulers."""
        state = self._state
        config = self._config
        state.step += 1
        state.samples_seen += step.samples
        self._progress.step(step.samples, loss)
        if self._callbacks.follow_steps:
            self._callbacks.step(state.step, loss)
            self._trainer.follow_requires_grad(at_epoch=False)
        if self._metrics_logger and config.log_every and state.step % config.log_every == 0:
            if loss is None:
                figures = {}
            else:
                figures = {"loss": float(loss)}
            self.log("step", {**figures, "lr": float(state.optimizers[0].param_groups[0]["lr"])})
        self._schedulers.after_step()
        self.timer.done(step.samples)

    def record_evaluation(self, figures: Mapping[str, float]) -> None:
        """Take an evaluation's figures; those of a step that was evaluated before are not recorded
        again.
        """
        if self._state.evaluated < self._state.step:
            if self._callbacks.follow_evaluations:
                self._callbacks.evaluation(figures)
                self._trainer.follow_requires_grad(at_epoch=False)
            self.log("evaluation", figures)
            self._record(figures)

    def _record(self, figures: Mapping[str, float]) -> None:
        figure, is_best = self.evaluations.record(figures)
        self._schedulers.after_evaluation(figure)
        if is_best and self.policy and self._config.checkpoint.keep_best:
            self.policy.due = True

    def maybe_checkpoint(self) -> None:
        """Write a checkpoint if one is due after this step, and stop if that is agreed on."""
        if self.policy:
            self.policy.after_step(self._sums)

    @property
    def _is_cut(self) -> bool:
        """Whether ``max_steps`` ends the run amid this epoch; a longer run goes on in it."""
        state = self._state
        if state.step != self._config.max_steps or not state.samples_seen:
            return False
        return self._loader.steps_left(state.samples_seen) != 0

    def end_epoch(self, train: Mapping[str, float], val: Mapping[str, float]) -> None:
        """Record an epoch that is over, or that ``max_steps`` cuts."""
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
        # A run that was cut has recorded a part of this epoch.
        state.records = [*(each for each in state.records if each.epoch < record.epoch), record]
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
        """Training is over: the last checkpoint is written when this returns."""
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
        with self._stack:
            if self.policy and isinstance(error, StopTraining):
                self.policy.save_and_stop(self._sums)
            self._check_leaving(error)

    def _check_leaving(self, error: BaseException | None) -> None:
        """Where a callback or the data has called ``sys.exit()``: see that all ranks do."""
        if isinstance(error, SystemExit) and not error.code:
            check_all_leave(self._world)
