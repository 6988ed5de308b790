"""Accelerate, and what stands on it, takes ranks without a GPU for one world, as below its own launcher."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.starting import python, slurm, write
from tests.support.worlds import run

# Stand-ins for what takes seconds to import: srunddp asks torch about GPUs, and accelerate reads a variable.
# Of torch's two answers, is_available's costs the processes that are forked later their GPUs.
TORCH = 'import os\nclass accelerator:\n    device_count = staticmethod(lambda: int(os.environ["GPUS"]))\n'
READS = 'import os\nfound = os.environ.get("ACCELERATE_USE_CPU", "unset")\n'
SCRIPT = 'import accelerate; say("found", accelerate.found)'


def found(folder: Path, size: int = 2, **variables: str) -> set[str]:
    write(folder / "torch.py", TORCH)
    write(folder / "accelerate.py", READS)
    ended = run(folder, SCRIPT, size=size, variables={"PYTHONPATH": str(folder), **variables})
    assert ended.codes == [0] * size, ended.text
    return {(folder / f"found.{rank}").read_text() for rank in range(size)}


@pytest.mark.parametrize(("gpus", "expected"), [("0", "true"), ("2", "unset")])
def test_accelerate_is_told_that_the_ranks_have_no_gpu(tmp_path: Path, gpus: str, expected: str) -> None:
    assert found(tmp_path, GPUS=gpus) == {expected}


def test_what_the_user_told_accelerate_stays(tmp_path: Path) -> None:
    assert found(tmp_path, GPUS="0", ACCELERATE_USE_CPU="false") == {"false"}


def test_a_world_of_one_is_left_to_accelerate(tmp_path: Path) -> None:
    assert found(tmp_path, size=1, GPUS="0") == {"unset"}


def test_accelerate_imported_before_the_meeting_is_told(tmp_path: Path) -> None:
    """As in a script that calls srunddp.init() after its imports, without the srunddp command."""
    write(tmp_path / "torch.py", TORCH)
    write(tmp_path / "accelerate.py", "")
    joins = """
import accelerate, contextlib, os, srunddp
with contextlib.suppress(ImportError):  # of torch.distributed, after the ranks have met
    srunddp.init()
print(os.environ["ACCELERATE_USE_CPU"], flush=True)
os._exit(0)
"""
    script, path = write(tmp_path / "train.py", joins), f"{tmp_path}:{ROOT}"
    with ThreadPoolExecutor() as ranks:
        place = partial(python, script, folder=tmp_path, PYTHONPATH=path, GPUS="0")
        runs = [ranks.submit(place, **slurm(rank, SLURM_JOB_ID=str(os.getpid()))) for rank in (0, 1)]
    assert [run.result().stdout for run in runs] == ["true\n"] * 2, [run.result().stderr for run in runs]
