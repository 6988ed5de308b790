"""What a folder of checkpoints promises."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from srunddp.train import load_checkpoint
from srunddp.train.checkpoint.directory import CheckpointDirectory


def directory(
    folder: Path, *steps: int, keep_last: int = 2, keep_best: int = 0, **scores: float
) -> CheckpointDirectory:
    made = CheckpointDirectory(folder, keep_last, keep_best)
    made.scores = {int(step[1:]): score for step, score in scores.items()}
    for step in steps:
        made.add(step, {"step": step})
    return made


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)


def step_of_newest(made: CheckpointDirectory, said: list[str]) -> int | None:
    found = made.newest(said.append)
    if found is None:
        return None
    path, state = found
    assert path == made.path(state["step"])
    return int(state["step"])


def test_the_newest_and_the_best_stay_and_the_rest_goes(tmp_path: Path) -> None:
    made = directory(tmp_path, 1, 2, 3, 4, 5, 6, keep_best=2, s1=9.0, s2=1.0, s3=2.0, s4=3.0, s5=float("nan"))
    assert made.steps() == [2, 3, 5, 6]
    assert os.readlink(tmp_path / "best.pt") == "step-00000002.pt"
    made.scores[6] = 0.5
    made.add(7, {"step": 7})
    assert made.steps() == [2, 6, 7]
    assert os.readlink(tmp_path / "best.pt") == "step-00000006.pt"
    assert {file.name for file in tmp_path.iterdir()} == {*(made.path(step).name for step in (2, 6, 7)), "best.pt"}


def test_steps_are_numbers_not_names(tmp_path: Path) -> None:
    made = directory(tmp_path, 99_999_999, 100_000_000)
    for other in ("step-1.pt", "step-000000001.pt", "step-00000001.pt.aside", "notes.pt"):
        (tmp_path / other).touch()
    assert made.steps() == [99_999_999, 100_000_000]
    assert step_of_newest(made, []) == 100_000_000


def test_broken_checkpoints_are_named_and_the_newest_one_loaded(tmp_path: Path) -> None:
    made, said = directory(tmp_path, 1, 2, 3, keep_last=3), []
    assert step_of_newest(made, said) == 3
    assert said == []
    damage(made.path(3))
    made.path(2).write_bytes(b"")
    assert step_of_newest(made, said) == 1
    assert [str(made.path(3)) in said[0], str(made.path(2)) in said[1], len(said)] == [True, True, 2]
    damage(made.path(1))
    assert step_of_newest(made, said) is None
    assert step_of_newest(CheckpointDirectory(tmp_path / "none", 1, 1), said) is None


def test_a_broken_one_never_counts_among_those_kept(tmp_path: Path) -> None:
    made = directory(tmp_path, 1, 2, 3, keep_last=3, keep_best=1)
    for step in (2, 3):
        damage(made.path(step))
    again = directory(tmp_path, 4, keep_last=2, keep_best=1, s1=2.0, s3=1.0)  # as a process that resumed from 1
    assert again.steps() == [1, 4]
    assert os.readlink(tmp_path / "best.pt") == "step-00000001.pt"


@pytest.mark.parametrize("keep_last", [0, 1])
def test_what_was_added_last_stays_whatever_else_is_there(tmp_path: Path, keep_last: int) -> None:
    directory(tmp_path, 10, 20)
    assert 5 in directory(tmp_path, 5, keep_last=keep_last).steps()


def test_a_killed_save_leaves_nothing_after_the_next(tmp_path: Path) -> None:
    for name in ("step-00000009.pt.01234567.tmp", "best.pt.01234567.tmp", "others.tmp"):
        (tmp_path / name).write_bytes(b"x")
    directory(tmp_path, 10)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["others.tmp", "step-00000010.pt"]


def test_no_link_to_the_best_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems without links."""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refused)
    assert directory(tmp_path, 1, 2, keep_best=1, s1=1.0).steps() == [1, 2]


def test_a_checkpoint_deleted_meanwhile_is_not_called_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, said = directory(tmp_path, 1, keep_last=1), []

    def late(path: Path, **how: Any) -> dict[str, Any]:
        monkeypatch.undo()
        made.add(2, {"step": 2})
        return load_checkpoint(path, **how)

    monkeypatch.setattr("srunddp.train.checkpoint.directory.load_checkpoint", late)
    assert step_of_newest(CheckpointDirectory(tmp_path, 1, 0), said) == 2
    assert said == []
