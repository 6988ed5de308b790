"""The last batch of an epoch, in which some ranks have no sample of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from srunddp.train import DataLoaderConfig, DDPConfig, Trainer
from srunddp.train.data.order import Sequential
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import classes, settings

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 1e-12


class TwoHeads(nn.Module):
    """The first class of a batch decides which of two heads it goes through; a third is unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        number = int(inputs[0, 0] > 0)
        outputs: Tensor = self.heads[number](self.trunk(inputs))
        return outputs


def heads(world: LocalWorld, samples: int) -> list[Tensor]:
    """The weights after two epochs of steps of one sample a rank, or one and none."""
    model = TwoHeads()
    data = classes(samples, torch.float64)
    # All samples of a step through one head, so that one process takes the same.
    data.tensors[0][:, 0] = torch.arange(samples).div(2, rounding_mode="floor") % 2 - 0.5
    trainer = Trainer(
        model,
        AdamW(model.parameters(), lr=0.01),
        nn.CrossEntropyLoss(),
        settings(
            epochs=2,
            batch_size=2 // world.world_size,
            tensorboard=False,
            ddp=DDPConfig(find_unused_parameters=True),
        ),
        world=world,
    )
    trainer.fit(data, order=Sequential(samples))
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("samples", [8, 9, 11])
def test_a_head_that_no_sample_of_a_step_uses_is_left_alone(samples: int, tmp_path: Path) -> None:
    """Also by weight decay and moments, which a gradient of 0 would let act."""
    first, second = run_ranks(2, tmp_path, heads, samples)
    alone = heads(LocalWorld(), samples)
    untouched = TwoHeads()
    for one, other, by_one in zip(first, second, alone, strict=True):
        assert torch.equal(one, other)
        assert (one - by_one).abs().max() < CLOSE
    assert torch.equal(first[-2], untouched.get_parameter("heads.2.weight"))
    assert torch.equal(first[-1], untouched.get_parameter("heads.2.bias"))


def contrast(model: nn.Module, batch: Any) -> Tensor:
    """The mean of all ranks' outputs, by a collective of the step's own."""
    outputs = model(batch[0])
    mean = outputs.mean(dim=0).detach()
    if dist.is_initialized():
        dist.all_reduce(mean)
    apart: Tensor = outputs - mean
    return apart.square().mean()


def contrasted(world: LocalWorld, samples: int, drop_last: bool, fits: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        config=settings(
            batch_size=4,
            tensorboard=False,
            dataloader=DataLoaderConfig(num_workers=0, drop_last=drop_last),
        ),
        world=world,
        step=contrast,
    )
    if not fits:
        return trainer.evaluate(classes(samples))
    (record,) = trainer.fit(classes(samples if not drop_last else 24), classes(samples))
    return record.val, model.weight.detach().clone()


@pytest.mark.parametrize("samples", [16, 17, 20])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_step_with_a_collective_is_run_on_all_ranks(
    drop_last: bool, samples: int, tmp_path: Path
) -> None:
    """Else those that have a sample would wait for the others in the last batch."""
    first, second = run_ranks(2, tmp_path, contrasted, samples, drop_last, True)
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
    first, second = run_ranks(2, tmp_path / "evaluate", contrasted, samples, drop_last, False)
    assert first == second
