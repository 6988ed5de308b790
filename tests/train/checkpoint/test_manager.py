"""What CheckpointManager promises in a loop of one's own."""

from __future__ import annotations

import datetime
import errno
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from srunddp import telemetry
from srunddp.errors import ConfigError, SrunddpError, Stopped
from srunddp.train import (
    CheckpointError,
    CheckpointManager,
    Preemption,
    load_checkpoint,
    save_checkpoint,
)
from srunddp.train.checkpoint import async_writer
from srunddp.train.checkpoint.directory import CheckpointDirectory
from tests.support.facts import tells
from tests.support.small_disk import small_disk
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import OnStep, classes, trainer_of

LIMIT = 300.0  # seconds, which only what is broken reaches
LARGE = 15 << 20  # elements of a checkpoint of 60 MB
add = CheckpointDirectory.add


def manager_of(
    folder: Path, world: LocalWorld | None = None, **how: Any
) -> tuple[CheckpointManager, list[str]]:
    """And the lines that it says."""
    said: list[str] = []
    return CheckpointManager(folder, world or LocalWorld(), log=said.append, **how), said


# In several ranks.


def saved_and_drawn(world: LocalWorld, folder: Path) -> tuple[float, float]:
    """Save a state of this rank, and draw a number of torch and one of Python."""
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    manager, _ = manager_of(folder, world)
    model = {"weight": torch.full((3,), world.rank + 0.5), "mask": torch.eye(3).to_sparse()}
    manager.save(7, {"model": model, "epoch": 2}, score=0.25, wait=True)
    return float(torch.rand(())), random.random()


def loaded_and_drawn(world: LocalWorld, folder: Path) -> tuple[Any, ...]:
    manager, _ = manager_of(folder, world)
    state = manager.load("auto")
    assert state is not None
    manager.restore_rng(state, seed=0)
    assert torch.equal(state["model"]["mask"].to_dense(), torch.eye(3))
    drawn = float(torch.rand(())), random.random()
    return manager.loaded, state["model"]["weight"].tolist(), state["epoch"], manager.scores, drawn


def test_ranks_get_the_state_and_each_its_random_numbers(tmp_path: Path) -> None:
    """Two of them, and a third that there was not before and has random numbers of its own."""
    folder = tmp_path / "run" / "checkpoints"
    drawn = run_ranks(2, tmp_path / "two", saved_and_drawn, folder)
    loaded = run_ranks(3, tmp_path / "three", loaded_and_drawn, folder)
    assert [rank[:4] for rank in loaded] == [
        (folder / "step-00000007.pt", [0.5] * 3, 2, {7: 0.25})
    ] * 3
    assert [rank[4] for rank in loaded[:2]] == drawn
    assert loaded[2][4] not in drawn
    assert (folder / "best.pt").resolve().name == "step-00000007.pt"


def slow_and_failed(world: LocalWorld, folder: Path) -> tuple[bool, list[tuple[type, int, str]]]:
    """Collectives take 10 s at most, and rank 0 writes for 12; then the disk fails, and then no
    state can be saved.

    In the end rank 0 comes to stop() when the other one has waited for longer.
    """
    # After the ranks have connected, for which a busy machine may take longer than this limit.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=10))

    def slow(directory: CheckpointDirectory, step: int, state: Mapping[str, Any]) -> None:
        time.sleep(12.0 if step == 1 else 0.0)
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(directory, step, state)

    CheckpointDirectory.add = slow  # type: ignore[assignment, method-assign]
    manager, _ = manager_of(folder, world)
    there = manager.save(1, {"step": 1}, wait=True).exists()
    errors: list[tuple[type, int, str]] = []
    for action in (
        lambda: manager.save(2, {"step": 2}, wait=True),
        lambda: manager.check({"path": Path("x")}),
    ):
        try:
            action()
        except SrunddpError as error:
            errors.append((type(error), error.exit_code, str(error)))
    with Preemption(world, environ={}) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.should_stop()
        time.sleep(12.0 * (world.rank == 0))
        with pytest.raises(Stopped):
            preemption.stop(1, "step-1.pt")
    return there, errors


def test_ranks_wait_longer_than_a_collective_and_hear_failures(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path / "world", slow_and_failed, tmp_path / "checkpoints")
    assert first[0]
    assert second[0], "all ranks wait until it is written"
    for (kind, code, said), (_, other_code, other) in zip(first[1], second[1], strict=True):
        assert (kind, code, other_code) == (CheckpointError, 78, 78)
        assert other == f"rank 0 failed: {said}"
    assert tells(first[1][0][2], "step 2", "could not be written")
    assert tells(first[1][1][2], "cannot be a checkpoint")


def loaded_by_a_name_of_ones_own(world: LocalWorld, folder: Path) -> float:
    """The weight that a rank gets by a path that is another folder on each, as below /tmp."""
    os.chdir(folder / str(world.rank))
    manager, _ = manager_of(Path("checkpoints"), world)
    state = manager.load("auto")
    assert state is not None
    return float(state["weight"])


def test_another_nodes_folder_of_the_same_name_counts_for_nothing(tmp_path: Path) -> None:
    """Its checkpoint, of the same step, is that of another run."""
    for rank, weight in enumerate((1.5, 2.5)):
        manager, _ = manager_of(tmp_path / str(rank) / "checkpoints")
        manager.save(7, {"weight": torch.tensor(weight)}, wait=True)
    assert run_ranks(2, tmp_path / "world", loaded_by_a_name_of_ones_own, tmp_path) == [1.5, 1.5]


def memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def memory_of_a_load(world: LocalWorld, folder: Path, seen: bool) -> tuple[int, int, int, bool]:
    """The most memory that loading takes, what is left when a counter is kept, what mapping takes;
    whether all came.

    Args:
        seen: all ranks see the folder; else rank 0 has it by a name that is another's on the
            others.
    """
    if seen:
        name = folder
    else:
        name = Path(
            f"/proc/self/fd/{os.open(folder, os.O_RDONLY)}" if world.rank == 0 else "/dev/shm"
        )
    manager, _ = manager_of(name, world)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = memory("VmRSS")
    files = memory("RssFile")
    kept = memory("RssAnon") + memory("RssShmem")
    state = manager.load("auto")
    assert state is not None
    whole = float(state["values"].sum()) == LARGE
    most = memory("VmHWM") - before - (memory("RssFile") - files)  # without the libraries' pages
    step = state["step"]
    del state
    left = memory("RssAnon") + memory("RssShmem") - kept
    assert int(step) == 1
    before = memory("RssAnon")
    mapped = load_checkpoint(folder / "step-00000001.pt", mmap=True)
    assert float(mapped["values"].sum()) == LARGE
    return most, left, memory("RssAnon") - before, whole


@pytest.mark.parametrize("seen", [True, False], ids=["one file system", "rank 0 alone"])
def test_a_load_takes_the_memory_of_the_file_once(tmp_path: Path, seen: bool) -> None:
    folder = tmp_path / "checkpoints"
    manager, _ = manager_of(folder)
    size = (
        manager.save(1, {"values": torch.ones(LARGE), "step": torch.tensor(1)}, wait=True)
        .stat()
        .st_size
    )
    for most, left, mapped, whole in run_ranks(
        2, tmp_path / "world", memory_of_a_load, folder, seen
    ):
        assert whole
        assert most <= 1.2 * size
        assert max(left, mapped) <= 0.15 * size


# In one.


def test_unless_asked_for_more_the_two_newest_checkpoints_stay_and_the_best(tmp_path: Path) -> None:
    manager, _ = manager_of(tmp_path)
    for step, score in enumerate([3.0, 1.0, 2.0, 4.0, 5.0, 6.0], 1):
        manager.save(step, {}, score=score, wait=True)
    there = sorted(tmp_path.glob("step-*.pt"))
    assert there == [manager.path(step) for step in (2, 5, 6)]


def test_on_a_cpu_no_tensor_of_a_loaded_state_lies_in_the_file(tmp_path: Path) -> None:
    """An optimizer goes on with these tensors, and the file is deleted when newer ones have
    come.
    """
    manager, _ = manager_of(tmp_path)
    manager.save(1, {"weight": torch.ones(1 << 20)}, wait=True)
    state = manager.load("auto")
    assert state is not None
    assert str(manager.path(1)) not in Path("/proc/self/maps").read_text()


def test_what_is_due_amid_a_slow_write_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: telemetry.TelemetryPage
) -> None:
    """Training goes on, one line says it, and the last one is waited for; no step is expected
    meanwhile.
    """
    go = threading.Event()

    def blocked(directory: CheckpointDirectory, step: int, state: Mapping[str, Any]) -> None:
        assert go.wait(LIMIT)
        add(directory, step, state)

    monkeypatch.setattr(CheckpointDirectory, "add", blocked)
    monkeypatch.setattr(async_writer, "_PATIENCE", 0.1)
    manager, said = manager_of(tmp_path)
    telemetry.heartbeat()
    values = torch.ones(1000)
    for step in (1, 2, 3, 4):
        manager.save(step, {"step": step, "values": values, "list": [values]})
        values.zero_()
    assert manager.report() == []  # nor is a word said twice
    (line,) = said
    assert tells(line, "skipped", "step 2", "step 1")
    assert page.read() == 1
    go.set()
    assert not manager.wait(), "the latest was skipped"
    assert page.read() == 0, "no step is expected"
    path = manager.save(5, {"step": 5}, wait=True)
    assert manager.report() == [manager.path(1), path]
    assert sorted(tmp_path.glob("*.pt")) == [manager.path(1), path]
    state = load_checkpoint(manager.path(1))
    assert state["values"].tolist() == state["list"][0].tolist() == [1.0] * 1000, (
        "of the moment of its save"
    )


@pytest.mark.parametrize(
    ("fails", "found"),
    [("full", "No space left on device"), ("read-only", "Read-only file system")],
)
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, fails: str, found: str) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        CheckpointManager(disk, LocalWorld()).save(1, {"step": 1}, wait=True)
        if fails == "full":
            with pytest.raises(OSError, match=found), (disk / "ballast").open("wb") as file:
                file.write(bytes(2 << 20))
        else:
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(
            ConfigError, match=f"{disk} cannot be written: {found}; .* -> "
        ) as error:
            CheckpointManager(disk, LocalWorld())
        assert error.value.exit_code == 78


class Vocabulary(nn.Linear):
    """Its state holds an object that no checkpoint may hold."""

    def get_extra_state(self) -> object:
        return threading.Lock()

    def set_extra_state(self, state: object) -> None:
        pass


def test_what_cannot_be_saved_is_found_before_the_first_step(tmp_path: Path) -> None:
    manager, _ = manager_of(tmp_path)
    state = {
        "values": torch.ones(1).expand(1 << 40),
        "tied": [nn.Parameter(torch.ones(2))],
        "plain": (1, "a", None),
    }
    manager.check(state)  # of 4 TB
    with pytest.raises(CheckpointError, match=r"pathlib\.PosixPath; expected "):
        manager.check(state | {"path": Path("x")})
    trainer = trainer_of(model=Vocabulary(8, 4), output_dir=str(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"_thread\.lock"):
        trainer.fit(classes(20))
    assert trainer.state.step == 0


def test_a_path_begins_another_course_and_never_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, said = manager_of(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        manager.save(step, {"step": step}, wait=True)
    with pytest.raises(ConfigError, match=r"step-00000003\.pt exists .* resume is never; .* -> "):
        manager.load("never")
    state = manager.load(str(manager.path(1)))
    assert (state and state["step"], manager.loaded) == (1, manager.path(1))
    newer = [line.partition(" is from after the checkpoint that was asked for")[0] for line in said]
    assert newer == [f"{manager.path(step)}.aside" for step in (3, 2)]
    assert sorted(path.name[13:] for path in tmp_path.glob("step-*")) == [
        ".pt",
        ".pt.aside",
        ".pt.aside",
    ]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    state = manager.load("never")
    assert (state and state["step"]) == 1, "a job that Slurm has started again goes on"


REFUSED = (
    r"another run has since begun to write checkpoints here, so this run may not; expected"
    r" .* -> "
)


def test_a_run_is_refused_once_another_has_begun(tmp_path: Path) -> None:
    """Not by one that only looks, nor by one that is refused itself; what is written beside
    training fails later.
    """
    first, said = manager_of(tmp_path)
    first.save(1, {"step": 1}, wait=True)
    with pytest.raises(ConfigError, match="resume is never"):
        manager_of(tmp_path)[0].load("never")
    first.save(2, {"step": 2}, wait=True)
    second, _ = manager_of(tmp_path)
    state = second.load()
    assert (state and state["step"]) == 2
    first.save(3, {"step": 3})
    with pytest.raises(CheckpointError, match=REFUSED) as error:
        first.wait()
    assert error.value.exit_code == 78
    second.save(3, {"step": 3, "of": "second"}, wait=True)
    with pytest.raises(CheckpointError, match=REFUSED):
        first.save(4, {"step": 4}, wait=True)
    assert (load_checkpoint(second.path(3))["of"], second.path(4).exists(), said) == (
        "second",
        False,
        [],
    )


def test_the_training_of_a_replaced_run_ends(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def replace(trainer: Any, step: int) -> None:
        if step == 7:
            assert manager_of(folder)[0].load()

    with pytest.raises(CheckpointError, match=REFUSED):
        trainer_of(OnStep(replace), output_dir=str(tmp_path), epochs=3).fit(classes(20))
    assert [path.name for path in folder.glob("step-*")] == ["step-00000005.pt"]
    ended = trainer_of(output_dir=str(tmp_path), epochs=3, resume="auto")
    ended.fit(classes(20))
    assert ended.state.step == 15


def test_a_manager_may_load_again_while_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays the same run."""
    manager, said = manager_of(tmp_path)
    manager.save(1, {"step": 1}, wait=True)
    replace = os.replace
    go = threading.Event()

    def blocked(source: Path, target: Path) -> None:
        if Path(target) == manager.path(2):
            assert go.wait(LIMIT)
        replace(source, target)

    monkeypatch.setattr(os, "replace", blocked)
    manager.save(2, {"step": 2})
    state = manager.load()
    assert (state and state["step"]) == 1
    go.set()
    assert manager.wait()
    assert said == []


def test_a_checkpoint_without_a_generation_is_loaded(tmp_path: Path) -> None:
    """As an earlier version wrote it."""
    manager, said = manager_of(tmp_path)
    state = load_checkpoint(path := manager.save(1, {"step": 1}, wait=True))
    del state["srunddp"]["generation"]
    save_checkpoint(path, state)
    (tmp_path / "generation").unlink()
    for _ in range(2):
        manager, said = manager_of(tmp_path)
        state = manager.load() or {}
        assert (state["step"], said) == (1, [])
    manager.save(2, {"step": 2}, wait=True)
    assert load_checkpoint(manager.path(2))["srunddp"]["generation"] == int(
        (tmp_path / "generation").read_text()
    )
