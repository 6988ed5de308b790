"""What writing beside training promises."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from srunddp.train.checkpoint.async_writer import AsyncCheckpointer, Snapshot
from srunddp.train.checkpoint.directory import CheckpointDirectory
from srunddp.train.checkpoint.file import CheckpointError
from tests.support.facts import tells
from tests.support.small_disk import small_disk
from tests.train.conftest import file_size_limit, run_python


def loaded(directory: CheckpointDirectory) -> dict[str, Any]:
    found = directory.newest(pytest.fail)
    assert found is not None
    return found[1]


def mebibyte(step: int) -> dict[str, Any]:
    return {"step": step, "values": torch.full((1 << 18,), float(step))}


@pytest.fixture(name="small_disk")
def small_disk_of_3m(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "3m") as disk:
        yield disk


@contextmanager
def full(disk: Path) -> Iterator[None]:
    (disk / "ballast").write_bytes(bytes(2_500_000))
    yield
    (disk / "ballast").unlink()


@pytest.mark.parametrize(
    ("fails", "found", "hint"),
    [
        (full, "No space left on device", "free space there"),
        (
            lambda disk: file_size_limit(500_000),
            "File too large",
            "raise the limit on the size of files",
        ),
    ],
    ids=["full", "limited"],
)
def test_a_full_disk_loses_nothing_and_training_goes_on(
    fails: Any, found: str, hint: str, small_disk: Path
) -> None:
    """Each save that the disk refuses is said once, and is an error at the end."""
    directory = CheckpointDirectory(small_disk, keep_last=2, keep_best=0)
    said: list[str] = []
    writer = AsyncCheckpointer(directory, said.append)
    writer.write(1, {"step": 1})
    writer.wait()
    assert writer.poll() == [1]
    with fails(small_disk):
        for step in (2, 3, 4):  # in vain three times: what a failed one leaves would fill the disk
            writer.write(step, mebibyte(step))
            with pytest.raises(CheckpointError, match=found) as error:
                writer.wait()
            assert said == [text := str(error.value)]
            said.clear()
            assert f"step {step} " in text
            assert tells(text, "last complete", "step-00000001.pt")
            assert text.endswith(f"-> {hint}")
            assert loaded(directory)["step"] == 1
            assert not list(small_disk.glob("*.tmp"))
    writer.write(9, mebibyte(9))
    writer.wait()
    assert (said, writer.poll()) == ([], [9])
    assert loaded(directory)["step"] == 9


@pytest.mark.parametrize("left", range(0, 12288, 4096))
def test_a_disk_that_is_full_at_any_page_loses_nothing(small_disk: Path, left: int) -> None:
    """Also where it is the last line, or the link to the best, that has no room."""
    directory = CheckpointDirectory(small_disk, keep_last=1, keep_best=1)
    directory.add(1, {"step": 1})
    size = directory.path(1).stat().st_size
    space = os.statvfs(small_disk).f_bavail * 4096
    with open(small_disk / "ballast", "wb") as file:
        file.write(bytes(space - left))
    directory.scores[2] = 0.0
    try:
        directory.add(2, {"step": 2})
    except OSError:
        assert left < size
        assert loaded(directory)["step"] == 1
    else:
        assert loaded(directory)["step"] == 2


def test_a_failure_is_raised_in_training_and_the_next_one_works(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    said: list[str] = []
    writer = AsyncCheckpointer(CheckpointDirectory(folder, keep_last=2, keep_best=0), said.append)
    writer.write(1, {"step": 1})
    with pytest.raises(CheckpointError, match=r"No such file.*last complete .*none -> "):
        writer.wait()
    folder.mkdir()
    writer.write(2, {"path": Path("x")})
    with pytest.raises(CheckpointError, match=r"pathlib\.PosixPath; expected "):
        writer.join()
    writer.write(3, {"step": 3})
    writer.wait()
    (line,) = said
    assert tells(line, "step 1", "could not be written")
    assert [writer.poll(), writer.poll()] == [[3], []]


# The write goes on only when the script has ended.
ENDS = """
import sys, threading, time
from pathlib import Path
from srunddp.train.checkpoint.directory import CheckpointDirectory
from srunddp.train.checkpoint.async_writer import AsyncCheckpointer
add = CheckpointDirectory.add
def add_at_the_end(directory, step, state):
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    add(directory, step, state)
CheckpointDirectory.add = add_at_the_end
writer = AsyncCheckpointer(CheckpointDirectory(Path(sys.argv[1]), 2, 0), print)
writer.write(1, {"step": 1})
assert not writer.join(0.0)
raise SystemExit(3)
"""


def test_the_end_of_python_finishes_the_write(tmp_path: Path) -> None:
    run_python("-c", ENDS, tmp_path, code=3)
    assert loaded(CheckpointDirectory(tmp_path, 2, 0))["step"] == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["generation", "step-00000001.pt"]


def test_a_snapshot_is_a_copy_of_all_that_may_change() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain: dict[str, Any] = {
        "rng": [torch.get_rng_state()],
        "pair": (1, "two", None),
        "deep": [{"a": [1.5]}],
    }
    state: dict[str, Any] = {"model": model.state_dict(), **plain}
    taken = Snapshot().take(state)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(1)
    plain["deep"][0]["a"].append(2.5)
    assert all(torch.equal(taken["model"][name], value) for name, value in before.items())
    assert not any(value.requires_grad for value in taken["model"].values())
    assert taken["deep"] == [{"a": [1.5]}]
    assert taken["pair"] == (1, "two", None)
    assert isinstance(taken["model"], OrderedDict)
    assert taken["model"]._metadata == state["model"]._metadata  # type: ignore[attr-defined]
    assert taken["model"]["0.weight"].stride() == model.get_parameter("0.weight").stride()


def test_a_snapshot_keeps_tied_weights_tied_and_drops_buffers() -> None:
    whole = torch.arange(1000.0)
    state = {
        "one": whole[:10],
        "again": whole[:10],
        "other": whole[5:15],
        "bits": whole[:10].view(torch.int32),
    }
    taken = Snapshot().take(state)
    assert all(torch.equal(taken[name], value) for name, value in state.items())
    assert taken["one"] is taken["again"]
    assert len({value.untyped_storage().data_ptr() for value in taken.values()}) == 3
    assert {value.untyped_storage().nbytes() for value in taken.values()} == {40}


def test_snapshots_copy_every_kind_of_tensor_to_one_memory() -> None:
    state = {
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.ones(2, dtype=torch.complex64).mul(1j).conj(),
        "expanded": torch.ones(1).expand(5),
        "empty": torch.empty(0),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "number": torch.tensor(3),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    snapshot = Snapshot()
    taken = snapshot.take(state)
    for name, value in state.items():
        assert torch.equal(taken[name].to_dense(), value.detach().to_dense()), name
        assert taken[name] is not value
    places = [taken[name].data_ptr() for name in ("half", "parameter")]
    state["half"].add_(1)
    again = snapshot.take(state)
    assert [again[name].data_ptr() for name in ("half", "parameter")] == places
    assert again["half"].tolist() == [2.0] * 3
