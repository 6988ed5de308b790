"""What a folder of checkpoints promises."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from srunddp.train import CheckpointError, load_checkpoint, save_checkpoint
from srunddp.train.checkpoint import directory as directory_module
from srunddp.train.checkpoint.directory import CheckpointDirectory
from srunddp.train.checkpoint.file import verify
from tests.support.facts import tells


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
    made = directory(
        tmp_path, 1, 2, 3, 4, 5, 6, keep_best=2, s1=9.0, s2=1.0, s3=2.0, s4=3.0, s5=float("nan")
    )
    assert made.steps() == [2, 3, 5, 6]
    assert os.readlink(tmp_path / "best.pt") == "step-00000002.pt"
    made.scores[6] = 0.5
    made.add(7, {"step": 7})
    assert made.steps() == [2, 6, 7]
    assert os.readlink(tmp_path / "best.pt") == "step-00000006.pt"
    others = {"best.pt", "generation"}
    assert {file.name for file in tmp_path.iterdir()} == {
        *(made.path(step).name for step in (2, 6, 7)),
        *others,
    }


def test_steps_are_numbers_not_names(tmp_path: Path) -> None:
    made = directory(tmp_path, 99_999_999, 100_000_000)
    for other in ("step-1.pt", "step-000000001.pt", "step-00000001.pt.aside", "notes.pt"):
        (tmp_path / other).touch()
    assert made.steps() == [99_999_999, 100_000_000]
    assert step_of_newest(made, []) == 100_000_000


@pytest.mark.parametrize(
    "own",
    [
        "x",
        None,
        {"generation": "zz"},
        {"step": None},
        {"scores": {"2": 1.0}},
        {"scores": {2: "best"}},
        {"random": {}},
    ],
)
def test_a_whole_checkpoint_that_is_none_of_ours_is_named_and_passed_over(
    tmp_path: Path, own: Any
) -> None:
    made = directory(tmp_path, 1)
    save_checkpoint(made.path(2), {"step": 2, "srunddp": own})
    said: list[str] = []
    assert step_of_newest(made, said) == 1
    assert len(said) == 1
    assert tells(said[0], "ignored", made.path(2))


@pytest.mark.parametrize("odd", [os.mkfifo, os.mkdir])
def test_something_else_in_the_place_of_the_generation_stops_no_run(
    tmp_path: Path, odd: Callable[[Path], None]
) -> None:
    """It waits for no writer of a pipe; a folder cannot be replaced, and is named."""
    directory(tmp_path, 1)
    (tmp_path / "generation").unlink()
    odd(tmp_path / "generation")
    assert step_of_newest(CheckpointDirectory(tmp_path, 2, 0), []) == 1
    if odd is os.mkfifo:
        CheckpointDirectory(tmp_path, 2, 0).begin()
    else:
        with pytest.raises(OSError, match="generation"):
            CheckpointDirectory(tmp_path, 2, 0).begin()


def test_broken_checkpoints_are_named_and_the_newest_one_loaded(tmp_path: Path) -> None:
    made = directory(tmp_path, 1, 2, 3, keep_last=3)
    said: list[str] = []
    assert step_of_newest(made, said) == 3
    assert said == []
    damage(made.path(3))
    made.path(2).write_bytes(b"")
    assert step_of_newest(made, said) == 1
    assert [str(made.path(3)) in said[0], str(made.path(2)) in said[1], len(said)] == [
        True,
        True,
        2,
    ]
    damage(made.path(1))
    assert step_of_newest(made, said) is None
    assert step_of_newest(CheckpointDirectory(tmp_path / "none", 1, 1), said) is None


def test_a_broken_one_never_counts_among_those_kept(tmp_path: Path) -> None:
    made = directory(tmp_path, 1, 2, 3, keep_last=3, keep_best=1)
    for step in (2, 3):
        damage(made.path(step))
    # As a process that resumed from 1.
    again = directory(tmp_path, 4, keep_last=2, keep_best=1, s1=2.0, s3=1.0)
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
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "generation",
        "others.tmp",
        "step-00000010.pt",
    ]


def test_no_link_to_the_best_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems without links."""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refused)
    assert directory(tmp_path, 1, 2, keep_best=1, s1=1.0).steps() == [1, 2]


def test_a_checkpoint_deleted_meanwhile_is_not_called_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = directory(tmp_path, 1, keep_last=1)
    said: list[str] = []

    def late(path: Path, **how: Any) -> dict[str, Any]:
        monkeypatch.undo()
        made.add(2, {"step": 2})
        return load_checkpoint(path, **how)

    monkeypatch.setattr("srunddp.train.checkpoint.directory.load_checkpoint", late)
    assert step_of_newest(CheckpointDirectory(tmp_path, 1, 0), said) == 2
    assert said == []


# Two runs.


REFUSED = (
    r"another run has since begun to write checkpoints here, so this run may not; expected"
    r" .* -> "
)


def begun(folder: Path, keep_last: int = 2) -> CheckpointDirectory:
    made = CheckpointDirectory(folder, keep_last, keep_best=1)
    made.begin()
    return made


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.name: os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        for path in folder.iterdir()
    }


def generation(path: Path) -> int:
    return int(load_checkpoint(path)["srunddp"]["generation"])


def test_an_earlier_run_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """Neither the files of the later run, nor what it is writing, nor the link to its best."""
    first = directory(tmp_path, 10, 20, keep_best=1, s10=1.0)
    second = begun(tmp_path)
    second.scores[30] = 0.5
    second.add(30, {"step": 30})
    (tmp_path / "step-00000040.pt.01234567.tmp").write_bytes(b"x")
    before = content(tmp_path)
    first.scores[40] = 0.0
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"^{tmp_path}: {REFUSED}"):
            first.add(40, {"step": 40})
        assert content(tmp_path) == before
    second.add(50, {"step": 50})
    assert step_of_newest(second, []) == 50
    assert (
        int((tmp_path / "generation").read_text())
        == generation(second.path(50))
        == generation(second.path(30))
    )


def test_a_run_that_has_just_looked_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other begins between the look at the number and the rename."""
    first = directory(tmp_path, 10)
    replace = os.replace
    after = []

    def lose_and_replace(source: Path, target: Path) -> None:
        if Path(target) == first.path(20):
            begun(tmp_path)
            after.append(content(tmp_path))
        replace(source, target)

    monkeypatch.setattr(os, "replace", lose_and_replace)
    with pytest.raises(FileNotFoundError):
        first.add(20, {"step": 20})
    assert [content(tmp_path)] == after


def test_after_a_refusal_no_restart_may_take_the_folder_back(tmp_path: Path) -> None:
    first = begun(tmp_path)
    begun(tmp_path)
    with pytest.raises(CheckpointError, match=REFUSED) as refused:
        first.add(10, {"step": 10})
    assert refused.value.final
    with pytest.raises(CheckpointError) as missing:
        load_checkpoint(tmp_path / "missing.pt")
    assert not missing.value.final, "a file system may be slow"


def test_a_run_deletes_nothing_once_another_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins while the files are checked that are to be kept."""
    directory(tmp_path, 5, 10)
    first = begun(tmp_path)

    def lose_and_verify(path: Path) -> None:
        begun(tmp_path)
        verify(path)

    monkeypatch.setattr(directory_module, "verify", lose_and_verify)
    first.scores[20] = 0.0
    with pytest.raises(CheckpointError, match=REFUSED):
        first.add(20, {"step": 20})
    assert first.steps() == [5, 10, 20]
    assert not (tmp_path / "best.pt").is_symlink()


@pytest.mark.parametrize("clocks", [(1, 2), (2, 1)])
def test_of_two_that_begin_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clocks: tuple[int, int]
) -> None:
    """One begins while the other asks for the time: neither sees the other's number."""
    between: list[CheckpointDirectory] = []
    times = iter(clocks)

    def time_ns() -> int:
        now = next(times)
        if not between:
            between.append(CheckpointDirectory(tmp_path, 2, 1))
            between[0].begin()
        return now

    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", time_ns)
        last = begun(tmp_path)
    last.add(1, {"step": 1})
    with pytest.raises(CheckpointError, match=REFUSED):
        between[0].add(2, {"step": 2})
    assert last.steps() == [1]


def test_a_late_file_of_an_earlier_run_is_set_aside(tmp_path: Path) -> None:
    """On a file system where the refusal comes too late: the checkpoints of the later run are the
    newest.
    """
    first = directory(tmp_path, 10, 20)
    said: list[str] = []
    (tmp_path / "late").write_bytes(first.path(20).read_bytes())
    assert step_of_newest(begun(tmp_path), said) == 20
    second = begun(tmp_path, keep_last=9)
    assert step_of_newest(second, said) == 20, "the run between has written none"
    second.add(30, {"step": 30})
    (tmp_path / "late").rename(second.path(50))
    assert second.steps() == [10, 20, 30, 50]
    newest = begun(tmp_path).newest(said.append)
    assert newest is not None
    assert newest[0] == second.path(30)
    (line,) = said
    assert tells(line, second.path(50), "earlier run", "set aside")
    assert second.path(50).with_suffix(".pt.aside").exists()
    second = begun(tmp_path)
    second.add(40, {"step": 40})
    assert second.steps() == [30, 40]


def test_files_without_a_number_count_as_the_earliest(tmp_path: Path) -> None:
    """As those of earlier versions; a damaged number is none."""
    old = CheckpointDirectory(tmp_path, 2, 0)
    said: list[str] = []
    for step in (1, 2):
        save_checkpoint(old.path(step), {"step": step})
    assert step_of_newest(begun(tmp_path), said) == 2
    (tmp_path / "generation").write_bytes(b"?")
    assert step_of_newest(begun(tmp_path), said) == 2
    begun(tmp_path).add(3, {"step": 3})
    save_checkpoint(old.path(4), {"step": 4})
    newest = begun(tmp_path).newest(said.append)
    assert newest is not None
    assert newest[0] == old.path(3)
    assert len(said) == 1


def test_copied_files_go_on_in_another_folder(tmp_path: Path) -> None:
    """Also where the number is not copied, and the runs that follow the first one there write
    none.
    """
    for step in (10, 20):
        begun(tmp_path).add(step, {"step": step})
    (copy := tmp_path / "copy").mkdir()
    for path in tmp_path.glob("step-*.pt"):
        shutil.copy(path, copy)
    said: list[str] = []
    here = begun(copy)
    assert step_of_newest(here, said) == 20
    here.add(30, {"step": 30})
    for _ in range(3):
        assert step_of_newest(begun(copy), said) == 30
    assert said == []


def test_a_folder_that_is_made_again_is_written_to(tmp_path: Path) -> None:
    (folder := tmp_path / "checkpoints").mkdir()
    made = directory(folder, 1)
    shutil.rmtree(folder)
    folder.mkdir()
    made.add(2, {"step": 2})
    assert made.steps() == [2]
