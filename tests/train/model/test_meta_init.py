"""The values that modules built on the meta device get."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from srunddp.errors import ConfigError
from srunddp.train import Trainer
from srunddp.train.model.meta_init import MetaInitializer, is_deferred
from tests.train.local_world import LocalWorld

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(3, 4),
    "Linear, bf16": lambda: nn.Linear(3, 4, dtype=torch.bfloat16),
    "Linear, complex": lambda: nn.Linear(3, 4, dtype=torch.complex64),
    "Linear, frozen": lambda: nn.Linear(3, 4).requires_grad_(False),
    "Bilinear": lambda: nn.Bilinear(3, 4, 5),
    "Conv2d": lambda: nn.Conv2d(4, 4, 3),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(4, 4, 3),
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "InstanceNorm1d, with statistics": lambda: nn.InstanceNorm1d(4, track_running_stats=True),
    "BatchNorm1d, without either": lambda: nn.BatchNorm1d(4, affine=False, track_running_stats=False),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4)),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "Embedding": lambda: nn.Embedding(5, 3, padding_idx=2),
    "EmbeddingBag": lambda: nn.EmbeddingBag(5, 3, padding_idx=1),
    "LSTM": lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
    "GRUCell": lambda: nn.GRUCell(3, 4),
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(4, 2, 8),
    "Transformer": lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
    "PReLU": lambda: nn.PReLU(3, 0.5),
    "a checkpointed one": lambda: checkpoint_wrapper(nn.Linear(3, 4)),
}


def deferred(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = build()
    MetaInitializer().make_all(model)
    return model


@pytest.mark.parametrize("name", MODULES)
def test_torchs_modules_get_the_values_that_they_have_on_the_cpu(name: str) -> None:
    torch.manual_seed(1)
    plain = MODULES[name]()
    torch.manual_seed(1)
    made = deferred(MODULES[name])
    for one, other in (
        (plain.named_parameters(), made.named_parameters()),
        (plain.named_buffers(), made.named_buffers()),
    ):
        found = dict(other)
        for key, tensor in one:
            assert torch.equal(tensor, found[key]), key
            assert (tensor.dtype, tensor.requires_grad) == (found[key].dtype, found[key].requires_grad)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Placed(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Masked(nn.Module):
    """Of a mask no value is none that may be meant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool))


class Starts(nn.Module):
    """As many do: with values that the modules in it do not have by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2)
        nn.init.zeros_(self.last.weight)


class Restarts(Starts):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.last.weight)


def loaded() -> nn.Module:
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="no-op"):
        model.load_state_dict(nn.Linear(2, 2, device="cpu").state_dict())
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Scaled, "scale of a Scaled, on the meta device, has no value"),
        (Placed, "places of a Placed, on the meta device, has no value"),
        (Masked, "mask of a Masked, on the meta device, has no value"),
        (Starts, "last.weight of a Starts, on the meta device, was set by more than reset_parameters()"),
        (loaded, "weight of a Linear, on the meta device, was set by more than reset_parameters()"),
    ],
)
def test_values_known_only_to_a_constructor_are_not_replaced(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        deferred(build)


def test_values_that_a_module_sets_in_others_are_theirs() -> None:
    assert not deferred(Restarts).get_parameter("last.weight").any()


def test_a_parameter_that_modules_share_stays_one() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    made = deferred(tied)
    assert made.get_parameter("1.weight") is made.get_parameter("0.weight")
    assert len(list(made.parameters())) == 3


def test_a_model_with_some_real_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"2 of 4 parameters on the meta device, the first 0\.weight; expected all"):
        is_deferred(model)


def test_a_state_of_what_has_no_values_is_refused() -> None:
    model = nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.Adagrad(model.parameters())
    with pytest.raises(ConfigError, match="the optimizer Adagrad with a state already, and a model on the meta device"):
        Trainer(model, optimizer, nn.MSELoss(), world=LocalWorld())
