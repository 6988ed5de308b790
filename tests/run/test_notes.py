"""Rank 0's notes about what nobody would see else: ranks that work alone, a limit
that does not count, GPUs that stay idle.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from srunddp.telemetry import TelemetryPage
from tests.support.facts import tells
from tests.support.starting import slurm, srunddp, write

# The parts of torch that count here, without the seconds of its import.
STAND_IN = """
import sys, types
torch = types.ModuleType("torch")
torch.distributed = types.ModuleType("torch.distributed")
torch.distributed.is_available = lambda: True
torch.distributed.is_initialized = lambda: {together}
sys.modules |= {{"torch": torch, "torch.distributed": torch.distributed}}
"""

SPAWNS = """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=print)
child.start()
child.join()
"""
# What the DataLoader leaves once it has started workers.
LOADS = """
name = "torch.utils.data._utils.signal_handling"
sys.modules[name] = types.ModuleType(name)
sys.modules[name]._SIGCHLD_handler_set = True
"""


def notes(folder: Path, script: str, *options: str, **changes: str) -> list[str]:
    """What two ranks that end well write on standard error, apart from the summary."""
    write(folder / "train.py", script)
    with ThreadPoolExecutor(2) as pool:
        done = list(
            pool.map(
                lambda rank: srunddp(
                    "--quiet", *options, "train.py", folder=folder, **slurm(rank, **changes)
                ),
                range(2),
            )
        )
    assert [one.returncode for one in done] == [0, 0], done
    assert done[1].stderr == ""
    return [line for line in done[0].stderr.splitlines() if line]


@pytest.mark.parametrize(
    ("script", "is_said"),
    [
        (STAND_IN.format(together=False), True),
        (STAND_IN.format(together=True), False),
        (STAND_IN.format(together="__import__('os').environ['RANK'] == '1'"), False),
        (STAND_IN.format(together=False) + "sys.modules['horovod'] = torch\n", False),
        (STAND_IN.format(together=False) + "import mpi4py\n", False),
        (STAND_IN.format(together=False) + "__import__('mpi4py')\n", True),
        ("print('no torch')\n", False),
        (STAND_IN.format(together=False) + "import subprocess\nsubprocess.run('true')\n", False),
        (STAND_IN.format(together=False) + "import subprocess\nsubprocess.Popen('true')\n", False),
        (STAND_IN.format(together=False) + SPAWNS, False),
        (STAND_IN.format(together=False) + LOADS + SPAWNS, True),
    ],
    ids=[
        "each alone",
        "together",
        "one alone",
        "over Horovod",
        "over MPI",
        "srunddp has MPI",
        "no torch",
        "child has ended",
        "child is there",
        "spawned",
        "loader's workers",
    ],
)
def test_ranks_that_have_not_worked_together_are_told_so_at_the_end(
    tmp_path: Path, script: str, is_said: bool
) -> None:
    """As where a script waits for --local_rank, or reads variables of another launcher."""
    found = notes(tmp_path, script)
    if not is_said:
        assert found == []
        return
    (line,) = found
    assert tells(line, "2 ranks", "process group", " -> ", "init_process_group", "LOCAL_RANK")


def test_whoever_has_joined_others_once_has_not_worked_alone() -> None:
    page = TelemetryPage()
    assert not page.ran_alone()
    page.conclude_alone()
    assert page.ran_alone()
    page.join_others()
    page.conclude_alone()
    assert not page.ran_alone()


BEATS = "import srunddp, time\nsrunddp.heartbeat()\nsrunddp.heartbeat(last=True)\ntime.sleep(6)\n"


@pytest.mark.parametrize(
    ("script", "options", "changes", "is_said"),
    [
        ("import time; time.sleep(4)", ("--stall-timeout=0.2",), {}, True),
        ("import time; time.sleep(4)", (), {"SRUNDDP_STALL_TIMEOUT": "0.2"}, True),
        (BEATS, ("--stall-timeout=3",), {}, False),
        ("import time; time.sleep(1)", ("--stall-timeout=0",), {}, False),
    ],
    ids=["option", "variable", "steps", "no limit"],
)
def test_a_stall_timeout_that_does_not_count_yet_is_explained_once(
    tmp_path: Path, script: str, options: tuple[str, ...], changes: dict[str, str], is_said: bool
) -> None:
    found = notes(tmp_path, script, *options, **changes)
    if not is_said:
        assert found == []
        return
    (line,) = found
    assert tells(line, "0.2 s", "--stall-timeout", "srunddp.heartbeat", "srunddp.Trainer", " -> ")


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "3"}, 0),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"SLURM_GPUS_ON_NODE": "1"}, 0),
        ({"SLURM_GPUS_ON_NODE": "many"}, 0),
        ({}, 0),
    ],
)
def test_one_rank_that_has_several_gpus_is_told_how_to_use_them(
    tmp_path: Path, variables: dict[str, str], gpus: int
) -> None:
    write(tmp_path / "train.py", "print('trained')")
    done = srunddp("--quiet", "train.py", folder=tmp_path, **slurm(0, 1, **variables))
    assert (done.returncode, done.stdout) == (0, "trained\n")
    if not gpus:
        assert done.stderr == ""
        return
    (line,) = done.stderr.splitlines()
    assert tells(line, f"{gpus} GPUs", f"{gpus - 1} stay idle", " -> ", f"--ntasks-per-node={gpus}")


def test_ranks_that_share_the_gpus_of_a_node_are_told_nothing(tmp_path: Path) -> None:
    assert notes(tmp_path, "print('trained')", SLURM_GPUS_ON_NODE="2") == []
