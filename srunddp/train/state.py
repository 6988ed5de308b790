"""Where training stands: all that a checkpoint holds, but for the random states."""

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

# Of the layout of what state_dict() returns. A checkpoint of another one is refused.
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
    """What changes while a model is trained.

    Attributes:
        model: The user's.
        optimizers: The user's.
        scaler: Of fp16; not in use in another precision.
        optimizer_modes: Whether the optimizers train.
        parameters: The model's and the loss function's, by name.
        step_rng: The random numbers of training steps.
        lr_factor: By which the learning rate was scaled for this world's batch.
        schedulers: None before ``fit()``.
        parts: By name whatever else has a ``state_dict``: the loss function, callbacks, the
            training data's loader.
        average: Of the model's weights; None where there is none.
        epoch: Epochs that are over.
        samples_seen: Samples of the present epoch, over all ranks.
        step: Optimizer steps that are done, over all epochs.
        sums: Of the present epoch's figures so far, by rank.
        evaluated: The step of the last evaluation; 0 before the first.
        best: The best score so far; None before the first.
        evals_since_best: Evaluations since the best one.
        scores: Of the evaluated steps; less is better.
        monitor: The figure that ``best`` and ``scores`` are of.
        mode: Which of this figure is better, ``min`` or ``max``.
        settings: What the script has said when the run began, as far as a checkpoint brings it
            back, and else at this start.
        step_random: Where the random numbers of training steps stand, of all ranks, on rank 0.
        identity: This run's, among others of the process.
        records: Of the epochs that are over, and of one that ``max_steps`` cuts.
        steps_per_epoch: Optimizer steps; None where that is not known.
        total_steps: Optimizer steps of the whole run; None where that is not known, and before
            ``fit()``.
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
        """Return tensors and plain values; training goes on to change these very tensors."""
        return {
            "version": VERSION,
            "model": self.model.state_dict(),
            "optimizer": [each.state_dict() for each in self.optimizers],
            # torch would load the state of another optimizer class without a word, if the names
            # match.
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
        """Yield a line for each thing that is another one than when the checkpoint was written.

        It says which of the two counts, and what begins anew.

        Args:
            state: The checkpoint.
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
        """Prepare for :meth:`load_state_dict`: train the parameters that were trained then.

        And give the optimizers the groups that they had.

        Args:
            state: The checkpoint.

        Raises:
            CheckpointError: It is of other optimizers or parameters.
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
        """Go on from there.

        The learning rate is scaled again where this world's batch is another. The best figure is
        forgotten where it is of another ``monitor`` or ``mode``. Other schedulers than those of the
        checkpoint begin now, and parts that it does not have keep their state.

        Args:
            state: The checkpoint, for which :meth:`prepare_for` was called.

        Raises:
            ValueError: It is of another model.
            CheckpointError: It has an average of the weights, and this run has none.
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
        # A scaler that was not in use has an empty state, which torch refuses to load into one that
        # is: the run before had another precision.
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        # This start's, which the loop over _PLAIN replaces by the checkpoint's.
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
        """Load the schedulers, after all else, as a schedule may go by the steps that are done.

        Args:
            state: The checkpoint.
            factor: By which this world's learning rate differs from the checkpoint's.
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

        Without them in the checkpoint the average begins with its model.

        Raises:
            CheckpointError: It has some, and this run has no average.
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
