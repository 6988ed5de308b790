"""Where training stands: all that a checkpoint holds, but for the random states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from srunddp.train.checkpoint.file import CheckpointError
from srunddp.train.model.ema import EMA
from srunddp.train.optimizer import rescale, with_kernels_of
from srunddp.train.progress import EpochRecord

VERSION = 1


@dataclass
class TrainingState:
    """What changes while a model is trained.

    Attributes:
        model, optimizer, scheduler, scaler: each with a ``state_dict``.
        average: of the model's weights; None where there is none.
        lr_factor: by which the learning rate was scaled for this world's batch.
        epoch: epochs that are over; samples_seen: samples of the present one, over all ranks; step: optimizer steps.
        sums: of the present epoch's figures so far, by rank.
        evaluated: the step of the last evaluation; best: its best figure; evals_since_best: evaluations since then.
        scores: of the evaluated steps; less is better.
        records: of the epochs that are over.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    lr_factor: float = 1.0
    scheduler: LRScheduler | None = None
    average: EMA | None = None
    epoch: int = 0
    samples_seen: int = 0
    step: int = 0
    sums: list[list[float]] = field(default_factory=list)
    evaluated: int = 0
    best: float | None = None
    evals_since_best: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    records: list[EpochRecord] = field(default_factory=list)

    # Keys of a checkpoint, which keep their names, and the attributes that they hold.
    _PLAIN: ClassVar[dict[str, str]] = {
        name: name for name in ("lr_factor", "epoch", "step", "sums", "evaluated", "best", "scores")
    } | {
        "seen": "samples_seen",
        "waited": "evals_since_best",
    }
    _PARTS = ("model", "optimizer", "scaler", "scheduler")

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; the tensors are those that training goes on to change."""
        parts = {name: getattr(self, name) for name in self._PARTS}
        return {
            "version": VERSION,
            **{name: part.state_dict() if part is not None else None for name, part in parts.items()},
            "ema": self.average.model.state_dict() if self.average else None,
            **{key: getattr(self, name) for key, name in self._PLAIN.items()},
            "records": [asdict(record) for record in self.records],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the learning rate is scaled again where this world's batch is another."""
        if (state["scheduler"] is None) != (self.scheduler is None):
            raise ValueError("one of the two has a scheduler, the other has none")
        self._load_average(state)
        factor = self.lr_factor
        parts = {**state, "optimizer": with_kernels_of(self.optimizer, state["optimizer"])}
        for name in self._PARTS:
            part = getattr(self, name)
            # A scaler that was not in use has an empty state.
            if part is not None and (parts[name] or name == "model"):
                part.load_state_dict(parts[name])
        for key, name in self._PLAIN.items():
            setattr(self, name, state[key])
        self.records = [EpochRecord(**record) for record in state["records"]]
        rescale(self.optimizer, self.scheduler, factor / self.lr_factor)
        self.lr_factor = factor

    def _load_average(self, state: Mapping[str, Any]) -> None:
        """Without one in the checkpoint the average begins with its model."""
        ema = state.get("ema")  # of no checkpoint from before there was an average
        if self.average:
            self.average.model.load_state_dict(ema or state["model"])
        elif ema:
            raise CheckpointError(
                "the checkpoint has an average of the weights, by which its evaluations went, and ema_decay is null",
                expected="ema_decay as in the run that wrote it",
                hint="set ema_decay, or start with another output_dir",
            )
