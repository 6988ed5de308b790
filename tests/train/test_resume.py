"""A training that was killed, or that left by a signal, goes on to the very result of one that was left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from srunddp.errors import Stopped
from srunddp.train import CheckpointConfig, load_checkpoint
from srunddp.train.checkpoint.manager import CheckpointManager
from tests.train.conftest import HERE, ROOT
from tests.train.local_world import LocalWorld
from tests.train.problems import Numbered, scale_trainer


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("resume")
    done = subprocess.run(
        [sys.executable, str(HERE / "interrupted.py"), str(folder), "once"],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())


def test_kills_change_no_sample_figure_weight_or_optimizer_bit(results: Any) -> None:
    """Mid-epoch, with loader workers, dropout, BatchNorm, accumulation and several buckets of gradients."""
    hit, outcome = results["three killed"]
    assert set(chain(*hit)) >= {"at random", "amid a save", "amid an evaluation", "at an epoch's end"}
    assert outcome == results["three left alone"]
    hit, outcome = results["two killed"]
    assert set(chain(*hit)) >= {"at random", "amid a save"}
    assert outcome == results["two left alone"]
    (first, *others) = outcome["results"]
    assert first["average"] not in (None, first["weights"])
    assert others == [first]


def test_one_signalled_rank_stops_all_after_the_same_step(results: Any) -> None:
    ends, outcome = results["one signalled"]
    assert [code for code, _ in ends] == [75] * 3
    ((step, path),) = {
        re.findall(r"stopped after step (\d+) by SIGUSR[12]; checkpoint (\S+);", said)[0] for _, said in ends
    }
    assert path.endswith(f"step-{int(step):08}.pt")
    assert ends[0][1].endswith("not requeued: no job of Slurm -> start it again with resume=auto")
    assert outcome == results["three left alone"]


def test_all_leave_amid_an_evaluation_and_make_up_for_it_later(results: Any) -> None:
    ends, tested, outcome = results["amid evaluation"]
    assert {code for code, _ in ends} == {143}
    assert {said.partition(";")[0] for _, said in ends} == {"stopped after step 7 by SIGTERM"}
    assert tested == 3, "of 7 test batches"
    assert outcome == results["three left alone"]


def test_random_draws_of_an_aborted_evaluation_are_undone(results: Any) -> None:
    """It reads in the rank itself here, which draws for dropout too."""
    ends, tested, outcome = results["workerless amid evaluation"]
    assert ({code for code, _ in ends}, tested) == ({75}, 3)
    assert outcome == results["workerless left alone"]


def test_a_signal_while_resuming_is_obeyed_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointManager, "load_latest", lambda _: os.kill(os.getpid(), signal.SIGUSR2))
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        with pytest.raises(Stopped, match="stopped after step 1 by SIGUSR2"):
            scale_trainer(LocalWorld(), output_dir=str(tmp_path), tensorboard=False).fit(Numbered(20))
    finally:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, before)


def test_the_last_checkpoint_includes_the_last_evaluation(
    tmp_path: Path,
) -> None:
    trainer = scale_trainer(
        LocalWorld(), output_dir=str(tmp_path), tensorboard=False, checkpoint=CheckpointConfig(every_steps=5)
    )
    records = trainer.fit(Numbered(20), Numbered(4))
    state = load_checkpoint(tmp_path / "checkpoints" / "best.pt")
    assert (state["step"], state["epoch"], state["records"][0]["test"]) == (5, 1, records[0].test)
