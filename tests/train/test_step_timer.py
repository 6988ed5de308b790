"""Where the time of a step goes is known of each rank, although the ranks wait for each other."""

from __future__ import annotations

import io
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from srunddp import telemetry
from srunddp.telemetry import TelemetryPage
from srunddp.train import Callback, CheckpointConfig, Trainer
from srunddp.train.step_timer import StepTimer, ThroughputMeter, make_step_timer
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import settings, trainer_of

# What a rank sleeps in each step is far more than a busy machine takes from a step.
STEPS = 6
SLEEP = 0.3
SLEPT = STEPS * SLEEP
# By which a slow rank is seen to be slower: were waiting counted as work, they would be equal.
MORE = SLEPT / 4

pytestmark = pytest.mark.alone


class SlowSamples(Dataset[tuple[Tensor, Tensor]]):
    """Whose reading may take time."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count = count
        self._seconds = seconds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._seconds)
        return torch.ones(8), torch.tensor(index % 2)


class SlowCallback(Callback):
    """Sleeps after each step. It also saves the model as a whole, which is not to hold anything of
    ours.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        time.sleep(self._seconds)
        torch.save(trainer.model, io.BytesIO())


def train(
    world: LocalWorld, slow: int, where: str, buffers: bool, changes: dict[str, Any]
) -> dict[str, Any]:
    """The sums of a training in which one rank sleeps in each step, and its events."""
    # What the first steps of a process take is nobody's here.
    trainer_of(world=world).fit(SlowSamples(16, 0.0))
    page = telemetry.TelemetryPage(recording=True)
    telemetry.install(page)
    seconds = SLEEP if world.rank == slow else 0.0
    norm: list[nn.Module]
    if buffers:
        norm = [nn.BatchNorm1d(8)]
    else:
        norm = []
    model = nn.Sequential(nn.Linear(8, 8), *norm, nn.Linear(8, 2))
    data = SlowSamples(2 * STEPS * 4, seconds / 4 if where == "data" else 0.0)
    callback = SlowCallback(seconds if where == "callback" else 0.0)
    trainer = trainer_of(callback, model=model, world=world, **changes)
    began = time.perf_counter()
    trainer.fit(data, SlowSamples(8, 0.0))
    sums = dict(zip(telemetry.Steps._fields, page.read_steps(), strict=True))
    result = sums | {"seconds": time.perf_counter() - began, "events": page.events(0)[0]}
    if where == "callback":
        trainer.config = settings(epochs=2, tensorboard=False)
        trainer.fit(data)
        result["steps of two fits"] = page.read_steps().steps
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("step_timer")
    checkpoints = {
        "output_dir": str(folder / "training"),
        "checkpoint": CheckpointConfig(every_steps=4),
    }
    scenarios: dict[str, tuple[Any, ...]] = {
        "data of 1": (1, "data", False, {}),
        "work of 0": (0, "callback", False, {}),
        "work of 0, buffers": (0, "data", True, {}),
        "accumulation": (1, "data", False, {"gradient_accumulation_steps": 3}),
        "checkpoints": (1, "", False, checkpoints),
    }
    return {name: run_ranks(2, folder, train, *arguments) for name, arguments in scenarios.items()}


@pytest.mark.parametrize("name", ["data of 1", "work of 0", "work of 0, buffers"])
def test_the_steps_of_all_ranks_take_the_slow_ones_time(results: Any, name: str) -> None:
    ours, theirs = results[name]
    assert (
        (ours["steps"], ours["samples"])
        == (theirs["steps"], theirs["samples"])
        == (STEPS, 2 * STEPS * 4)
    )
    # Its last wait is in nobody's step.
    assert min(ours["step_s"], theirs["step_s"]) >= SLEPT - SLEEP
    assert max(ours["step_s"], theirs["step_s"]) <= min(ours["seconds"], theirs["seconds"])
    assert min(ours["longest_step_s"], theirs["longest_step_s"]) >= SLEEP


def test_waiting_for_data_counts_for_that_rank_alone(results: Any) -> None:
    fast, slow = results["data of 1"]
    assert SLEPT <= slow["data_s"] <= slow["own_s"]
    assert slow["data_s"] - fast["data_s"] > MORE
    assert slow["own_s"] - fast["own_s"] > MORE


def test_slow_work_of_a_rank_is_not_counted_as_waiting(results: Any) -> None:
    slow, fast = results["work of 0"]
    assert slow["own_s"] - slow["data_s"] >= SLEPT
    assert slow["own_s"] - fast["own_s"] > MORE
    assert slow["data_s"] < SLEPT / 2


def test_the_wait_for_others_before_a_forward_is_not_a_ranks_own(results: Any) -> None:
    slow, fast = results["work of 0, buffers"]
    assert slow["own_s"] >= SLEPT
    assert slow["own_s"] - fast["own_s"] > MORE


def test_with_accumulation_a_step_is_all_its_micro_batches(results: Any) -> None:
    fast, slow = results["accumulation"]
    assert fast["steps"] == slow["steps"] == STEPS / 3
    assert slow["data_s"] >= SLEPT
    assert slow["own_s"] - fast["own_s"] > MORE


def test_a_second_training_goes_on_to_count(results: Any) -> None:
    assert [rank["steps of two fits"] for rank in results["work of 0"]] == 2 * [2 * STEPS]


def test_epochs_evaluations_and_checkpoints_become_events(results: Any) -> None:
    for rank, found in enumerate(results["checkpoints"]):
        names = [event.name for event in found["events"]]
        written = 2 if rank == 0 else 0  # after step 4 and the last
        expected = Counter(
            fit=1, epoch=1, step=1, evaluation=1, evaluation_end=1, epoch_end=1, checkpoint=2
        )
        assert Counter(names) == expected + Counter(checkpoint_written=written)
        assert [
            event.value for event in found["events"] if event.name in ("epoch", "epoch_end")
        ] == [1, 1]
        times = [event.time for event in found["events"]]
        assert times == sorted(times)
        checkpoints = [
            event.value for event in found["events"] if event.name.startswith("checkpoint")
        ]
        assert all(0 < seconds < found["seconds"] for seconds in checkpoints)


class Event:
    """torch.cuda.Event, by a GPU's clock."""

    gpu = SimpleNamespace(now=0.0)
    recorded = 0
    ready = True

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.at: float = Event.gpu.now

    def query(self) -> bool:
        return Event.ready

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


def test_a_gpus_time_excludes_waits_for_ranks_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Event", Event)
    clock = SimpleNamespace(now=0.0)
    gpu = Event.gpu
    page = TelemetryPage(recording=True)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    pace = StepTimer(page, torch.device("cuda"))

    def step(forward: float) -> None:
        for _ in pace.timed(iter(["a step"])):
            gpu.now += forward
            pace.start_wait()
            gpu.now += 4.0  # the backward pass
            clock.now += 1.0
            pace.end_wait()
            clock.now += 9.0  # it reads the loss
            gpu.now += 2.0  # the optimizer, and what the rank was late with
            pace.done(1)

    step(3.0)
    assert page.read_steps()[2:5] == (10.0, 0.0, 5.0)
    step(1.0)
    assert page.read_steps()[2:5] == (20.0, 0.0, 8.0)
    Event.ready = False
    before = Event.recorded
    step(2.0)
    step(2.0)
    assert page.read_steps().own_s == 14.0  # as in the step before, until the GPU has come so far
    assert Event.recorded == before + 4  # of the first of them
    Event.ready = True
    step(7.0)
    assert page.read_steps().own_s == 18.0


def test_with_a_gpu_an_epochs_last_data_request_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Event", Event)
    clock = SimpleNamespace(now=0.0)
    page = TelemetryPage(recording=True)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    pace = StepTimer(page, torch.device("cuda"))
    assert list(pace.timed(iter(()))) == []
    Event.gpu.now += 1000.0  # an evaluation
    for _ in pace.timed(iter(["a step"])):
        clock.now += 2000.0
        Event.gpu.now += 7.0
        pace.done(1)
    assert page.read_steps().own_s == 7.0


@pytest.mark.usefixtures("page")
def test_without_monitoring_nothing_is_timed() -> None:
    assert type(make_step_timer(torch.device("cpu"))) is ThroughputMeter
    steps = iter([1, 2])
    assert ThroughputMeter().timed(steps) is steps
