"""What a checkpoint file promises."""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import pickle
import random
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from srunddp.train import load_checkpoint, save_checkpoint
from srunddp.train.checkpoint.directory import CheckpointDirectory
from srunddp.train.checkpoint.file import CheckpointError
from tests.support.facts import tells
from tests.train.conftest import HERE, run_python


def test_a_killed_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    said = run_python(HERE / "killed_saves.py", tmp_path, 60)
    assert int(said.split()[2]) >= 30, f"too few kills fell into a save to prove anything: {said}"


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="needs root and mkfs.ext4"
)
def test_a_power_cut_leaves_what_was_acknowledged(tmp_path: Path) -> None:
    run_python(HERE / "killed_saves.py", tmp_path, 20, "power-cuts", before=("unshare", "--mount"))


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Half of them are flips; of all a quarter is in the line at the end, and the rest anywhere."""
    start = draw.choice((0, 0, 0, len(data) - 117))
    place = draw.randrange(start, len(data))
    return flipped(data, 8 * place + draw.randrange(8)) if draw.random() < 0.5 else data[:place]


def damage_and_load(folder: Path, number: int) -> None:
    """Each damaged file is refused by name, and the one before it is loaded instead."""
    directory = CheckpointDirectory(folder, keep_last=2, keep_best=0)
    for step in (1, 2):
        directory.add(step, {"step": step, "values": torch.arange(500.0) * step})
    path = directory.path(2)
    draw = random.Random(0)
    data = path.read_bytes()
    for _ in range(number):
        path.write_bytes(damaged(data, draw))
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(path)
        said: list[str] = []
        found = directory.newest(said.append)
        assert found is not None
        assert found[1]["step"] == 1
        assert said == [f"ignored {str(error.value).partition(';')[0]}"]
        assert str(path) in said[0]


def test_damaged_files_are_named_and_passed_over(tmp_path: Path) -> None:
    damage_and_load(tmp_path, 300)


def test_what_is_broken_is_said(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"values": torch.ones(10)})
    data = path.read_bytes()
    length = data.rindex(b"\nsrunddp checkpoint")
    damages = {
        f"it ends after {length} bytes without the line that ends a checkpoint": data[:length],
        "it ends after 0 bytes without the line that ends a checkpoint": b"",
        "it holds a list, not a dict": sealed(zipped([1, 2])),
        f"it has {length - 5} of {length} bytes": data[:100] + data[105:],
        "its SHA-256 is not that of its content": flipped(data, 8 * 1000),
    }
    for found, damaged in damages.items():
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(path)
        assert tells(str(error.value), path, found, "; expected ", " -> ")
        assert error.value.exit_code == 78


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "folder.pt").mkdir()
    cases = {
        "pipe.pt": "not a regular file",
        "folder.pt": "Is a directory",
        "none.pt": "no such file",
    }
    for name, found in cases.items():
        with pytest.raises(CheckpointError, match=f"{name}: .*{found}"):
            load_checkpoint(tmp_path / name)


def test_plain_torch_reads_a_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint.pt", {"values": torch.arange(3)})
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["values"].tolist() == [0, 1, 2]


def test_what_reads_back_wrong_never_gets_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that keeps something else than was written, which is found before the old file
    goes.
    """
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"epoch": 1})
    fsync = os.fsync

    def wrong_fsync(descriptor: int) -> None:
        fsync(descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.pwrite(descriptor, b"\0", 200)

    monkeypatch.setattr(os, "fsync", wrong_fsync)
    with pytest.raises(OSError, match="read back"):
        save_checkpoint(path, {"epoch": 2})
    assert load_checkpoint(path) == {"epoch": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "unfit", [lambda: 2, Path("x"), torch.ones(1, device="meta").numpy, torch.float64.__class__]
)
def test_a_failed_save_leaves_only_the_previous_checkpoint(tmp_path: Path, unfit: object) -> None:
    """What could not be loaded again is refused when it is saved, not when it is needed."""
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"epoch": 1})
    with pytest.raises(CheckpointError, match="expected tensors and plain values"):
        save_checkpoint(path, {"epoch": unfit})
    assert load_checkpoint(path) == {"epoch": 1}
    assert list(tmp_path.iterdir()) == [path]


class Calls:
    """A pickle of it calls ``function`` when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def zipped(state: object, **how: bool) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, **how)
    return file.getvalue()


legacy = partial(zipped, _use_new_zipfile_serialization=False)


def nested(state: object) -> bytes:
    """A pickle within the checkpoint's own bytes, as an attacker would hide it."""
    return zipped({"model": Calls(pickle.loads, pickle.dumps(state))})


def sealed(data: bytes) -> bytes:
    return (
        data
        + f"\nsrunddp checkpoint: {len(data):020} bytes, SHA-256"
        f" {hashlib.sha256(data).hexdigest()}\n".encode()
    )


@pytest.mark.parametrize("seal", [sealed, bytes])
@pytest.mark.parametrize("packed", [zipped, legacy, nested, pickle.dumps])
@pytest.mark.parametrize(
    ("function", "words"), [(os.system, "touch {}"), (builtins.exec, "open({!r}, 'w')")]
)
def test_loading_executes_nothing(
    tmp_path: Path,
    function: Callable[..., Any],
    words: str,
    packed: Callable[[object], bytes],
    seal: Callable[[bytes], bytes],
) -> None:
    trace = tmp_path / "executed"
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(seal(packed({"model": Calls(function, words.format(str(trace)))})))
    with pytest.raises(CheckpointError, match=str(path)):
        load_checkpoint(path)
    assert not trace.exists()


def test_tensors_are_loaded_to_the_cpu_wherever_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # As if saved from a fourth GPU, which loading would otherwise ask for.
        patch.setattr("torch.serialization.location_tag", lambda storage: "cuda:3")
        save_checkpoint(tmp_path / "checkpoint.pt", {"values": torch.ones(3)})
    assert load_checkpoint(tmp_path / "checkpoint.pt")["values"].device == torch.device("cpu")
