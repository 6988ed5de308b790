"""The model in shards over several nodes, and a checkpoint that more of them take up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.slurm.conftest import SRUNDDP, Outcome, SlurmJobRunner

MNIST = str(ROOT / "docs" / "examples" / "mnist.py")
pytestmark = pytest.mark.slurm


def train(runner: SlurmJobRunner, nodes: int, output: Path | str, *options: str) -> Outcome:
    fsdp = ("--parallel=fsdp", "--fsdp.modules=Conv2d,Linear", f"--output-dir={output}", "--tensorboard=false")
    layout = ("--mpi=pmi2", f"-N{nodes}", "--ntasks-per-node=2", SRUNDDP)
    return runner.srun(*layout, MNIST, f"--data-dir={runner.cluster.shared / 'digits'}", *fsdp, *options, timeout=240)


def test_six_ranks_go_on_in_shards_from_the_checkpoint_of_four(runner: SlurmJobRunner) -> None:
    output = runner.cluster.shared / "shards"
    first = train(runner, 2, output, "--epochs=3")
    assert first.code == 0, first.errors
    (folder,) = max((output / "checkpoints").glob("step-*.pt")).parent.glob(f"step-{3 * 12:08}.*.shards")
    assert {path.name for path in folder.glob("*.distcp")} == {f"__{rank}_0.distcp" for rank in range(4)}
    second = train(runner, 3, output, "--epochs=6", "--resume=auto")
    assert second.code == 0, second.errors
    epochs = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["test/accuracy"] for line in epochs if line["kind"] == "epoch"]
    assert len(accuracies) == 6
    assert accuracies[3] >= accuracies[2] - 0.02
    assert accuracies[-1] >= 0.95
    assert f"goes on from {output}/checkpoints/step-{3 * 12:08}.pt: 3 epochs" in second.errors


def test_nodes_that_do_not_share_the_folder_are_named(runner: SlurmJobRunner) -> None:
    done = train(runner, 2, "/tmp/shards-of-this-node")
    assert done.code == 78, done.errors
    assert "is not seen by rank 2-3; expected with parallel=fsdp an output_dir that all nodes share" in done.errors
    assert "Traceback" not in done.errors
