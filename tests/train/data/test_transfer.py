"""Batches of any structure on their way to the device: here torch's meta device, which every
machine has.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset

from srunddp.train import DistributedDataLoader
from srunddp.train.data.transfer import DeviceTransfer
from tests.train.local_world import LocalWorld

META = torch.device("meta")


class Encoding(UserDict[str, Any]):
    """As what Hugging Face's tokenizers return: a mapping with a ``to`` of its own, which takes the
    device only.
    """

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: value.to(device) for name, value in self.items()})


class Graph:
    """No mapping, but it can be moved."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


class Point(NamedTuple):
    x: torch.Tensor
    label: str


def moved(batch: Any, **options: Any) -> Any:
    ((found,), copied) = DeviceTransfer(META, **options).send([batch])
    assert copied is None
    return found


def test_tensors_are_moved_wherever_they_are() -> None:
    one = torch.ones(2)
    batch = OrderedDict(
        a=[one, (one, "text")],
        b={"c": one},
        d=Point(one, "p"),
        e=Encoding(ids=one),
        f=Graph(one),
        g=3,
    )
    found = moved(batch)
    tensors = [
        found["a"][0],
        found["a"][1][0],
        found["b"]["c"],
        found["d"].x,
        found["e"]["ids"],
        found["f"].nodes,
    ]
    assert all(tensor.device == META for tensor in tensors)
    assert (found["a"][1][1], found["d"].label, found["g"]) == ("text", "p", 3)
    assert [type(found[name]) for name in "adef"] == [list, Point, Encoding, Graph]
    assert moved(one).device == META
    assert moved(None) is None


def test_the_host_does_not_wait_for_the_copy_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that can be asked for: memory that is not pinned is copied at once."""
    asked: list[bool] = []
    to: Any = torch.Tensor.to

    def noted(
        tensor: torch.Tensor, *arguments: Any, non_blocking: bool = False, **options: Any
    ) -> torch.Tensor:
        asked.append(non_blocking)
        copied: torch.Tensor = to(tensor, *arguments, non_blocking=non_blocking, **options)
        return copied

    monkeypatch.setattr(torch.Tensor, "to", noted)
    moved({"images": torch.ones(2, 3, 4, 4), "labels": torch.ones(2)})
    assert asked == [True, True]


def test_a_packed_sequence_keeps_its_sizes_on_the_host() -> None:
    found = moved(pack_sequence([torch.ones(3), torch.ones(2)]))
    assert isinstance(found, PackedSequence)
    assert (found.data.device, found.batch_sizes.device.type) == (META, "cpu")


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_come_with_their_channels_innermost(channels_last: bool) -> None:
    images = torch.ones(2, 3, 4, 4)
    other = torch.ones(2, 3)
    batch = ({"left": images, "right": other}, other)
    ((named, rest),), _ = DeviceTransfer(torch.device("cpu"), channels_last=channels_last).send(
        [batch]
    )
    image = named["left"]
    assert torch.equal(named["right"], other)
    assert image.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert torch.equal(image, images)
    assert torch.equal(rest, other)


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": [index] * (index + 1), "label": index}


def padded(samples: list[Any]) -> Encoding:
    rows = [torch.tensor(sample["ids"]) for sample in samples]
    return Encoding(ids=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_and_batches_may_be_of_any_structure(workers: int) -> None:
    """Sentences of any length, which collate pads to a mapping of a class of its own."""
    world = LocalWorld(device=META)
    options: Any = {
        "batch_size": 2,
        "num_workers": workers,
        "multiprocessing_context": "fork",
        "pin_memory": False,
    }
    batches = list(DistributedDataLoader(Texts(), world, collate=padded, weight=tokens, **options))
    assert [type(batch.data) for batch in batches] == [Encoding] * 3
    assert {batch.data["ids"].device for batch in batches} == {META}
    assert sum(batch.weight for batch in batches) == 2 + 3 + 4 + 5


def tokens(batch: Any) -> torch.Tensor:
    """Counted before the batch is moved: on the meta device there would be nothing to count."""
    assert batch["ids"].device.type == "cpu"
    count: torch.Tensor = (batch["ids"] != 0).sum()
    return count
