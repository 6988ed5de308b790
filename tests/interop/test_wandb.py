"""The example callback for Weights & Biases, offline: one run, of rank 0, which a resumed training
goes on with.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples import WANDB, figures
from tests.interop.conftest import LIBMPI, ours
from tests.mpirun.conftest import there
from tests.slurm.conftest import SRUNDDP


def trained(folder: Path, *arguments: str) -> tuple[str, str, list[str]]:
    """The example's last line, what it wrote on standard error, and the runs' folders so far."""
    words = (SRUNDDP, *WANDB.words(folder, folder / "out"), *arguments)
    variables = ours() | LIBMPI | {"WANDB_MODE": "offline", "WANDB_DIR": str(folder)}
    done = there(WANDB.channel).run(2, *words, env=variables)
    runs = sorted(path.name for path in (folder / "wandb").glob("offline-run-*"))
    return figures(WANDB, done, folder / "out").last, done.errors, runs


@pytest.mark.mpirun
def test_a_resumed_training_goes_on_with_its_run(tmp_path: Path) -> None:
    _, _, first = trained(tmp_path, "--epochs=3")
    last, summary, runs = trained(tmp_path, "--resume=auto")
    assert len(first) == 1  # of two ranks
    assert len(runs) == 2  # offline each start has a folder, which ends in the run's name
    assert len({name.rpartition("-")[2] for name in runs}) == 1
    found = re.search(r"val/accuracy ([\d.]+)", summary)
    assert found, summary
    assert f"{100 * float(found[1]):.2f}" == re.findall(WANDB.figure, last)[0]
    assert re.search(r"train/loss \S\S$", summary, re.MULTILINE)  # a history of two epochs
