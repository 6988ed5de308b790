"""The state of training: all that a checkpoint has, except what CheckpointManager adds, such as the
random states of the ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from srunddp.train.checkpoint.file import CheckpointError
from srunddp.train.model.ema import EMA
from srunddp.train.model.parameters import NamedParameters
from srunddp.train.optimizer import OptimizerModes, with_kernels_of
from srunddp.train.progress import EpochRecord
from srunddp.train.rng import StepRng
from srunddp.train.schedulers import Schedulers
from srunddp.train.start_settings import StartSettings

# The version of the layout of state_dict(). A checkpoint of another version is refused.
VERSION = 4
_PLAIN = (
    "lr_factor",
    "epoch",
    "samples_seen",
    "step",
    "sums",
    "evaluated",
    "best",
    "evals_since_best",
    "scores",
    "monitor",
    "mode",
)


@dataclass(kw_only=True)
class TrainingState:
    """Everything that changes while a model is trained.

    Attributes:
        model: The user's model.
        optimizers: The user's optimizers.
        scaler: The GradScaler for fp16; not in use with another precision.
        optimizer_modes: Sets the mode of optimizers that have modes.
        parameters: The parameters of the model and the loss function, by name.
        step_rng: The random numbers of training steps.
        lr_factor: The factor by which the learning rate was scaled for the samples of a step.
        schedulers: The schedulers; None before ``fit()``.
        parts: By name, all other objects with a ``state_dict``: the loss function, callbacks, the
            loader of the training data.
        average: The average of the model's weights; None if there is none.
        epoch: The number of finished epochs.
        samples_seen: The samples of the present epoch seen so far, over all ranks.
        step: The number of optimizer steps done, over all epochs.
        sums: The sums of the present epoch's figures so far, one row for each rank; empty at an
            epoch's start.
        evaluated: The step of the last evaluation; 0 before the first.
        best: The best score so far; None before the first evaluation.
        evals_since_best: The number of evaluations since the one with the best score.
        scores: The scores of the evaluated steps; lower is better.
        monitor: The name of the figure from which ``best`` and ``scores`` come.
        mode: ``min`` or ``max``: whether a smaller or a greater figure is better.
        settings: The settings of the script. Those that a checkpoint restores are from the first
            start of the run, the others from this start.
        step_random: On rank 0 the random states of training steps, by rank; on other ranks empty.
        identity: An object that tells this Trainer's run from other runs in the same process.
        records: The records of finished epochs, and of one that ``max_steps`` has ended early.
        steps_per_epoch: The number of optimizer steps per epoch; None if it is not known.
        total_steps: The number of optimizer steps of the whole run; None if it is not known, and
            before ``fit()``.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    scaler: GradScaler
    optimizer_modes: OptimizerModes
    parameters: NamedParameters
    step_rng: StepRng
    lr_factor: float = 1.0
    schedulers: Schedulers | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    average: EMA | None = None
    epoch: int = 0
    samples_seen: int = 0
    step: int = 0
    sums: list[list[float]] = field(default_factory=list)
    evaluated: int = 0
    best: float | None = None
    evals_since_best: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    monitor: str = "loss"
    mode: str = "min"
    settings: StartSettings = field(default_factory=StartSettings)
    step_random: list[Tensor] = field(default_factory=list)
    identity: object = field(default_factory=object, repr=False)
    records: list[EpochRecord] = field(default_factory=list)
    steps_per_epoch: int | None = None
    total_steps: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values; the tensors are not copied, so training
        changes them later.
        """
        return {
            "version": VERSION,
            "model": self.model.state_dict(),
            "optimizer": [each.state_dict() for each in self.optimizers],
            # Save the classes too: torch would load the state of another class of optimizer without
            # complaint.
            "optimizer_classes": self._optimizer_classes,
            "optimizer_parameters": [self.parameters.groups(each) for each in self.optimizers],
            "trained_parameters": [*self.parameters.trained()],
            "scheduler": self.schedulers.state_dict() if self.schedulers else {},
            "scheduler_classes": self._scheduler_classes,
            "scaler": self.scaler.state_dict(),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "ema": self.average.model.state_dict() if self.average else None,
            **{name: getattr(self, name) for name in _PLAIN},
            "steps_per_epoch": self.steps_per_epoch,
            "step_random": self.step_random,
            "records": [asdict(record) for record in self.records],
            "settings": asdict(self.settings),
        }

    @property
    def _optimizer_classes(self) -> list[str]:
        return [type(each).__name__ for each in self.optimizers]

    @property
    def _scheduler_classes(self) -> list[str]:
        return self.schedulers.classes if self.schedulers else []

    def _has_schedule_of(self, state: Mapping[str, Any]) -> bool:
        """Return whether the learning rate is scheduled as in the checkpoint: by the same classes,
        or by the same settings.
        """
        classes = self._scheduler_classes
        if classes or state["scheduler_classes"]:
            return bool(state["scheduler_classes"] == classes)
        before = state["settings"]["config"]
        now = self.settings.config
        return all(before[name] == now[name] for name in ("schedule", "warmup_steps"))

    def differences(self, state: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for each difference from the checkpoint.

        The line says which of the two values is used, or what begins anew.

        Args:
            state: The content of the checkpoint.
        """
        same_schedule = self._has_schedule_of(state)
        settings = StartSettings(**state["settings"])
        yield from settings.differences(self.settings, same_schedule=same_schedule)
        classes = state["scheduler_classes"]
        if classes != self._scheduler_classes:
            yield (
                f"the scheduler was {_listed(classes) or 'by the configuration'}, and is"
                f" {_listed(self._scheduler_classes) or 'by the configuration'} from here on"
            )
        for name in self.parts:
            if name not in state["parts"]:
                yield f"{name} begins anew: the checkpoint has no state of it"
        for name in state["parts"]:
            if name not in self.parts:
                yield f"{name} has a state in the checkpoint, and is not here: it is left out"

    def prepare_for(self, state: Mapping[str, Any]) -> None:
        """Prepare for :meth:`load_state_dict`: let the parameters that were trained require a
        gradient, and add to the optimizers the parameter groups that the previous run added.

        Args:
            state: The content of the checkpoint.

        Raises:
            CheckpointError: The checkpoint has other optimizers or parameters.
        """
        if len(state["optimizer"]) != len(self.optimizers):
            raise CheckpointError(
                f"{len(state['optimizer'])} optimizers in the checkpoint, and"
                f" {len(self.optimizers)} here",
                expected="as many as in the script that wrote it",
                hint="pass the same, or start with another output_dir",
            )
        if state["optimizer_classes"] != self._optimizer_classes:
            raise CheckpointError(
                f"{_listed(state['optimizer_classes'])} in the checkpoint, and"
                f" {_listed(self._optimizer_classes)} here",
                expected="the same optimizer, to which alone the saved state means something",
                hint=(
                    "pass that one; or load the weights alone, by srunddp.train.load_checkpoint()"
                    " in the script, and start with another output_dir"
                ),
            )
        self.parameters.set_trained(state["trained_parameters"])
        for optimizer, names in zip(self.optimizers, state["optimizer_parameters"], strict=True):
            self.parameters.add_groups(optimizer, names)
        if self.schedulers:
            self.schedulers.take_in_groups()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint.

        The learning rate is scaled again if the samples per step have changed. The best figure is
        forgotten if ``monitor`` or ``mode`` has changed. Schedulers other than those of the
        checkpoint begin now, and parts of which the checkpoint has no state keep their own.

        Args:
            state: The content of the checkpoint, for which :meth:`prepare_for` was called.

        Raises:
            RuntimeError, ValueError: The checkpoint does not fit the model, the optimizers or the
                schedulers.
            CheckpointError: The checkpoint has an average of the weights, and this run has none.
        """
        self._load_average(state)
        factor = self.lr_factor
        self.model.load_state_dict(state["model"])
        names = state["optimizer_parameters"]
        for optimizer, saved, groups in zip(
            self.optimizers, state["optimizer"], names, strict=True
        ):
            ordered = self.parameters.ordered(optimizer, saved, groups)
            optimizer.load_state_dict(dict(with_kernels_of(optimizer, ordered)))
        for name, part in self.parts.items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])
        # A scaler that was not in use, because the previous run had another precision, has an empty
        # state, which torch refuses to load.
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        # Keep the values of this start, which the loop over _PLAIN replaces by the checkpoint's.
        monitors = (self.monitor, self.mode)
        for name in _PLAIN:
            setattr(self, name, state[name])
        if monitors != (self.monitor, self.mode):
            self.monitor, self.mode = monitors
            self.best = None
            self.evals_since_best = 0
            self.scores = {}
        self.records = [EpochRecord(**record) for record in state["records"]]
        before = StartSettings(**state["settings"])
        self.settings.keep(before, same_schedule=self._has_schedule_of(state))
        self._load_schedulers(state, factor / self.lr_factor)
        self.lr_factor = factor

    def _load_schedulers(self, state: Mapping[str, Any], factor: float) -> None:
        """Restore the states of the schedulers, or begin them now if the checkpoint has others.

        Call this after the rest of the state is loaded, because a schedule may depend on the steps
        done.

        Args:
            state: The content of the checkpoint.
            factor: By what to multiply the checkpoint's learning rates, because a step may have
                another number of samples now.
        """
        if self.schedulers is None:
            return
        if self._has_schedule_of(state):
            self.schedulers.load_state_dict(state["scheduler"])
            self.schedulers.rescale(factor)
        else:
            self.schedulers.begin_here(factor)

    def _load_average(self, state: Mapping[str, Any]) -> None:
        """Load the averaged weights.

        If the checkpoint has none, the average begins with the model's weights.

        Raises:
            CheckpointError: The checkpoint has averaged weights, and this run has no average.
        """
        ema = state["ema"]
        if self.average:
            self.average.model.load_state_dict(ema or state["model"])
        elif ema:
            raise CheckpointError(
                "the checkpoint has an average of the weights, by which its evaluations went, and"
                " ema_decay is null",
                expected="ema_decay as in the run that wrote it",
                hint="set ema_decay, or start with another output_dir",
            )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)
