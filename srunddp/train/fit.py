"""One call of ``fit()``: what goes on around its steps."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from srunddp.bootstrap.environment.cpus import Cpus, advice
from srunddp.config.parse import save_config
from srunddp.errors import ConfigError
from srunddp.telemetry import event, heartbeat
from srunddp.train import validate
from srunddp.train.checkpoint_policy import CheckpointPolicy, StopTraining
from srunddp.train.data import workers
from srunddp.train.data.loader import StepBatches, make_loaders
from srunddp.train.data.order import Order
from srunddp.train.metrics.accumulator import MetricAccumulator
from srunddp.train.metrics.logger import MetricsLogger
from srunddp.train.optimizer import make_scheduler
from srunddp.train.profiler import Profile, parse
from srunddp.train.progress import EpochRecord, Progress, SilentProgress
from srunddp.train.rng import preserved_rng
from srunddp.train.step_timer import make_step_timer

if TYPE_CHECKING:
    from srunddp.train.trainer import Trainer


class FitLoop:
    """What happens before, between and after the steps of a :class:`srunddp.train.Trainer`. A context manager.

    Attributes:
        timer: notes where the time of its steps goes.
    """

    def __init__(
        self,
        trainer: Trainer,
        train_data: Dataset[Any],
        test_data: Dataset[Any] | None,
        order: Order | None,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        """The arguments are those of :meth:`srunddp.train.Trainer.fit`."""
        config, world = trainer.config, trainer.world
        self._trainer, self._config, self._world, self._state = trainer, config, world, trainer.state
        self._progress = Progress() if world.rank == 0 else SilentProgress()
        self.timer = make_step_timer(world.device)
        validate.check_fit(world, train_data, test_data, order, config)
        share = workers.share(world)
        workers.set_threads(share, config.loading.threads)
        self._loader, self._test_loader = make_loaders(world, config, train_data, test_data, order, collate, share)
        self._on_step = trainer.methods("on_step")
        self._stack = ExitStack()
        self._sums: MetricAccumulator | None = None
        self._latest: tuple[int, Mapping[str, float]] = (0, {})  # an evaluation's step, and its figures
        self._profile: Profile | None = None
        self._metrics_logger: MetricsLogger | None = None
        self._policy: CheckpointPolicy | None = None

    def __enter__(self) -> Self:
        """Get all ready, and go on from a checkpoint where there is one."""
        try:
            self._get_ready()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _get_ready(self) -> None:
        event("fit")
        self._stack.callback(self._progress.close)
        if self._world.rank == 0:
            for line in advice(os.environ, Cpus.here()):
                self._progress.log(line)
        state, steps = self._state, self._loader.steps_left(0)
        if state.scheduler is None:
            whole = None if steps is None else steps * self._config.epochs
            state.scheduler = make_scheduler(self._trainer.optimizer, self._trainer.scheduler, self._config, whole)
        folder = Path(self._config.output_dir or ".")
        if self._config.output_dir is not None:
            self._open(folder)
        if self._config.profile and self._world.rank in self._config.profile_ranks:
            trace = folder / f"trace-rank{self._world.rank}.json"
            self._profile = Profile(parse(self._config.profile), trace, self._progress.log)
            self._stack.callback(self._profile.close)

    def _open(self, folder: Path) -> None:
        written = [partial(call, self._trainer) for call in self._trainer.methods("on_checkpoint")]
        self._policy = CheckpointPolicy(
            self._config, self._world, self._state, self._stack, log=self._progress.log, written=written
        )
        if self._state.step == 0:  # a trainer that has made steps goes on from where it is
            self._policy.restore(lambda _: self._trainer.warm_up_buckets(self.steps()))
        if self._state.epoch >= self._config.epochs:
            self._progress.log(
                f"nothing to do: {self._state.epoch} epochs are done, and epochs is {self._config.epochs}"
            )
        if self._world.rank == 0:
            save_config(folder / "config.yaml", self._config)
            self._metrics_logger = MetricsLogger(folder, self._config.tensorboard, self._progress.log)
            self._stack.callback(self._metrics_logger.close)
            self._metrics_logger.rewind(self._state.step)

    @property
    def early_stopped(self) -> bool:
        """The figures have not become better for as long as the configuration allows."""
        return 0 < self._config.patience <= self._state.evals_since_best

    def start_epoch(self) -> MetricAccumulator:
        """The figures of the epoch that begins, or goes on from a checkpoint."""
        state, loader = self._state, self._loader
        steps, left = loader.steps_left(0), loader.steps_left(state.samples_seen)
        done = steps - left if steps is not None and left is not None else 0
        self._progress.start_epoch(state.epoch + 1, self._config.epochs, steps, done)
        self.timer.epoch(state.epoch + 1)
        self._sums = MetricAccumulator(self._trainer.metrics, self._world, state.sums)
        return self._sums

    def steps(self) -> Iterator[StepBatches]:
        """The steps that are left of this epoch."""
        if self.early_stopped and self._state.samples_seen:
            return  # a resume after the evaluation that ended training
        for step in self.timer.timed(self._loader.steps(self._state.epoch + 1, self._state.samples_seen)):
            if self._profile:
                self._profile.before(self._state.step + 1)
            yield step
            if self.early_stopped:
                return
        if not self._state.samples_seen:
            raise ConfigError(
                "an epoch without a step",
                expected="training data for one",
                hint="check what the data set yields; with loading.drop_last, also batch_size and accumulation",
            )

    @contextmanager
    def evaluation(self) -> Iterator[Iterator[StepBatches]]:
        """The test data, a batch each step. Training's clock and random states stand still."""
        assert self._test_loader is not None
        with self._progress.paused(), preserved_rng(self._world):
            if self._policy:
                self._policy.begin()
            event("evaluation")
            yield self._test_loader.steps()
            event("evaluation_end")
        if self._policy:
            self._policy.begin()

    def after_step(self, step: StepBatches, loss: float | None) -> None:
        """Count a step, and tell of it.

        Args:
            loss: of the micro-batch before this step's last.
        """
        state = self._state
        state.step += 1
        state.samples_seen += step.total
        if self._profile:
            self._profile.after(state.step)
        self._progress.step(step.total, loss)
        for call in self._on_step:
            call(self._trainer, state.step, loss)
        if self._metrics_logger and self._config.log_every and state.step % self._config.log_every == 0:
            rates = [float(group["lr"]) for group in self._trainer.optimizer.param_groups[:1]]
            figures = {} if loss is None else {"loss": loss}
            self._metrics_logger.add("step", state.step, **figures, lr=rates[0])
        self.timer.done(step.total)

    def evaluation_is_due(self) -> bool:
        """Whether to evaluate after this step."""
        every = self._config.evaluate_every_steps
        state = self._state
        return bool(every and self._test_loader and state.step % every == 0 and state.evaluated < state.step)

    def ends_with_evaluation(self) -> bool:
        """The same at the end of this epoch."""
        every = self._config.evaluate_every_epochs
        return bool(every and self._test_loader and (self._state.epoch + 1) % every == 0)

    @property
    def evaluated(self) -> Mapping[str, float]:
        """The figures of this very step; empty where it was not evaluated in this run."""
        step, figures = self._latest
        return figures if step == self._state.step else {}

    def record_evaluation(self, figures: Mapping[str, float]) -> None:
        """Take an evaluation's figures; those of a step that was evaluated before are not recorded again."""
        state = self._state
        if state.evaluated == state.step:
            return
        self._latest = (state.step, figures)
        for call in self._trainer.methods("on_evaluation"):
            call(self._trainer, figures)
        if self._metrics_logger:
            self._metrics_logger.add("evaluation", state.step, **figures)
        self._compare(figures)

    def _compare(self, figures: Mapping[str, float]) -> None:
        """Are they the best so far?"""
        state, config = self._state, self._config
        # One figure for all of a metric's is that it is not known: nothing was evaluated.
        if config.best not in figures and not math.isnan(figures.get(config.best.split("/")[0], 0.0)):
            raise ConfigError(f"best={config.best}", expected=f"one of {', '.join(figures)}", hint="correct it")
        state.evaluated = state.step
        if isinstance(state.scheduler, ReduceLROnPlateau):
            state.scheduler.step(figures["loss"])
        figure = figures.get(config.best, math.nan)
        score = figure if config.best_mode == "min" else -figure
        if not math.isnan(score):
            state.scores[state.step] = score
        if score < (math.inf if state.best is None else state.best):
            state.best, state.evals_since_best = score, 0
            if self._policy and config.checkpoint.keep_best:
                self._policy.due = True
        else:
            state.evals_since_best += 1

    def agree(self) -> None:
        """Within an evaluation: agree with the other ranks whether to stop."""
        if self._policy:
            self._policy.agree()

    def maybe_checkpoint(self) -> None:
        """Write a checkpoint if one is due after this step, and stop if that is agreed on."""
        if self._policy:
            self._policy.after_step(self._sums)

    def end_epoch(self, train: Mapping[str, float], test: Mapping[str, float]) -> None:
        """Record an epoch that is over."""
        state = self._state
        speed, world = self._progress.samples_per_second, self._world
        event("epoch_end", state.epoch + 1)
        record = EpochRecord(state.epoch + 1, dict(train), dict(test), speed, world.world_size, world.device.type)
        self._progress.end_epoch(record)
        if test:
            self.record_evaluation(test)
        elif self._test_loader is None:
            self._compare(train)
        state.epoch, state.samples_seen, state.sums, self._sums = state.epoch + 1, 0, [], None
        state.records.append(record)
        if self._metrics_logger:
            self._metrics_logger.add(
                "epoch", state.step, epoch=record.epoch, **train, **{f"test/{k}": v for k, v in test.items()}
            )
        for call in self._trainer.methods("on_epoch"):
            call(self._trainer, record)
        if self._policy:
            self._policy.after_epoch()

    def finish(self) -> None:
        """Training is over: the last checkpoint is written when this returns."""
        heartbeat(last=True)
        if self.early_stopped and self._state.epoch < self._config.epochs:
            evaluations = self._state.evals_since_best
            self._progress.log(f"no better {self._config.best} in {evaluations} evaluations: training is over")
        if self._policy:
            self._policy.finish()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if self._policy and isinstance(error, StopTraining):
                self._policy.save_and_stop(error, self._sums)
