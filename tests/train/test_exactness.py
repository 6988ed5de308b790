"""Any number of ranks trains as one does, and goes on from what another number has left."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from srunddp.train import Callback, CheckpointConfig, Config, Trainer
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import settings

SAMPLES = 50 * 64  # 50 steps an epoch
PART = 47  # samples of the epoch that is interrupted
BOUND = 1e-12  # the figures are about 1: sums in another order differ by some last digits

pytestmark = pytest.mark.usefixtures("one_thread")


class IndexedSamples(Dataset[tuple[Tensor, Tensor]]):
    """Samples whose first input is their index."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
        self.targets = self.inputs[:, 1:5].argmax(dim=1)
        self.inputs[:, 0] = torch.arange(samples)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class IndexedStream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int) -> None:
        self.data = IndexedSamples(samples)

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))


class IndexRecorder(nn.Module):
    """A network that does not look at the samples' indices, but keeps those of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        self.indices: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.indices = [int(index) for index in inputs[:, 0]]
        output: Tensor = self.layers(inputs[:, 1:])
        return output


class StepRecorder(Callback):
    """The samples and the loss of each step; stops after a step by an exception."""

    def __init__(self, stop: int | None) -> None:
        self.samples: dict[int, list[int]] = {}
        self.losses: list[float] = []
        self.stop = stop

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        self.losses.append(float("nan") if loss is None else float(loss))
        assert isinstance(trainer.model, IndexRecorder)
        self.samples[step] = trainer.model.indices
        if step == self.stop:
            raise KeyboardInterrupt


def train(world: LocalWorld, config: Config, data: Any, stop: int | None = None) -> Any:
    model = IndexRecorder()
    recorder = StepRecorder(stop)
    # AdamW divides by the root of gradients' squares, so that one wrong by a factor would still
    # look right.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = Trainer(
        model, optimizer, nn.CrossEntropyLoss(), config, world=world, callbacks=[recorder]
    )
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit(data)
    return trainer.state.records, model.state_dict(), recorder.losses, recorder.samples


@pytest.fixture(scope="module")
def single_process() -> Any:
    return train(LocalWorld(), settings(batch_size=64), IndexedSamples(SAMPLES))


@pytest.mark.parametrize(
    ("ranks", "batch_size", "accumulation"), [(4, 16, 1), (1, 16, 4), (4, 4, 4)]
)
def test_four_ranks_with_accumulation_train_as_one_rank(
    ranks: int, batch_size: int, accumulation: int, single_process: Any, tmp_path: Path
) -> None:
    """Losses and weights after 50 steps; also each step's loss, which is that of its last
    micro-batch.
    """
    (expected,), weights, losses, _ = single_process
    assert len(losses) == 50
    config = settings(batch_size=batch_size, gradient_accumulation_steps=accumulation)
    by_rank = run_ranks(ranks, tmp_path, train, config, IndexedSamples(SAMPLES))
    for (record,), state, *_ in by_rank:
        assert record.train["loss"] == pytest.approx(expected.train["loss"], rel=0, abs=BOUND)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=BOUND)
    if accumulation == 1:
        means = [
            sum(step) / ranks for step in list(zip(*(rank[2] for rank in by_rank), strict=True))
        ]
        assert means == pytest.approx(losses, rel=0, abs=BOUND)


@pytest.mark.parametrize(("kind", "ranks"), [(IndexedSamples, 6), (IndexedStream, 2)])
def test_another_number_of_ranks_sees_the_rest_of_the_epoch_once(
    kind: Any, ranks: int, tmp_path: Path
) -> None:
    checkpoint = CheckpointConfig(every_steps=3)
    options: dict[str, Any] = {
        "epochs": 1,
        "batch_size": 2,
        "output_dir": str(tmp_path),
        "tensorboard": False,
        "checkpoint": checkpoint,
    }
    before = run_ranks(4, tmp_path, train, Config(**options), kind(PART), 4)
    after = run_ranks(ranks, tmp_path, train, Config(**options, resume="auto"), kind(PART))
    seen = [index for *_, samples in before for step in (1, 2, 3) for index in samples[step]]
    rest = list(itertools.chain(*(step for *_, samples in after for step in samples.values())))
    assert len(seen) == 3 * 4 * 2, "the checkpoint was in the middle of the epoch"
    assert [min(samples) for *_, samples in after] == [4] * ranks
    assert sorted(seen + rest) == list(range(PART))
