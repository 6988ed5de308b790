"""Devices: each rank has one of its own, by its UUID, and idle ones are named."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.gpu import ranks
from tests.gpu.ranks import alone, ran, run
from tests.gpu.requirements import SHARED, gpus, need_gpus, need_shared_gpu, need_tool
from tests.support.starting import NODE

UUIDS = """
import torch

for index in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(index).uuid)
"""
DEVICE = """
import srunddp

world = srunddp.init()
print(world.device, world.backend)
world.close()
"""
SUM = """
world = srunddp.init()
total = ones(world)
dist.all_reduce(total)
print(world.device, total.sum().item())
world.close()
"""


def listed(kind: str) -> list[str]:
    """The UUIDs of ``nvidia-smi -L`` that begin with GPU or MIG, without that word."""
    done = subprocess.run(
        [need_tool("nvidia-smi"), "-L"], capture_output=True, text=True, check=True, timeout=60
    )
    return re.findall(rf"UUID: {kind}-([\w-]+)\)", done.stdout)


def uuids(folder: Path, **variables: str) -> list[str]:
    """Of the devices that torch sees, in a process of its own."""
    done = ranks.plain(folder, UUIDS, **variables)
    return [re.sub(r"^(GPU|MIG)-", "", uuid) for uuid in done.stdout.split()]


def test_each_gpu_has_the_uuid_that_nvidia_smi_says(tmp_path: Path) -> None:
    expected = listed("GPU")
    found = uuids(tmp_path)
    assert len(set(found)) == len(found) == gpus()
    assert set(found) <= set(expected)


def test_each_mig_instance_has_a_uuid_of_its_own(tmp_path: Path) -> None:
    instances = listed("MIG")
    if len(instances) < 2:
        pytest.skip(f"needs 2 MIG instances, found {len(instances)}")
    found = [uuids(tmp_path, CUDA_VISIBLE_DEVICES=f"MIG-{uuid}") for uuid in instances]
    assert all(len(each) == 1 for each in found), found
    assert len({each[0] for each in found}) == len(instances), found


@pytest.mark.skipif(
    torch.version.hip is None, reason=f"needs ROCm, found CUDA {torch.version.cuda}"
)
def test_each_gpu_of_rocm_has_a_uuid_of_its_own(tmp_path: Path) -> None:
    need_gpus(2)
    found = uuids(tmp_path)
    assert len(set(found)) == len(found) == gpus()


def test_two_ranks_with_one_gpu_are_refused_before_nccl_starts(tmp_path: Path) -> None:
    done = run(tmp_path, SUM, variables={"CUDA_VISIBLE_DEVICES": "0"}, limit=120)
    assert done.codes == [78, 78], done.text
    assert re.search(rf"ranks [01] and [01] on {NODE} have the same GPU, ", done.text), done.text


def test_ranks_may_share_a_gpu_where_nccl_is_told_so(tmp_path: Path) -> None:
    need_shared_gpu()
    assert ran(tmp_path, SUM, variables=SHARED) == ["cuda:0 8.0\n"] * 2


@pytest.mark.parametrize("visible", ["all", "index", "uuid", "none"])
def test_a_rank_takes_what_is_visible(visible: str, tmp_path: Path) -> None:
    uuid = listed("GPU")[0]
    wanted = {
        "all": {},
        "index": {"CUDA_VISIBLE_DEVICES": "0"},
        "uuid": {"CUDA_VISIBLE_DEVICES": f"GPU-{uuid}"},
    }
    done = alone(tmp_path, DEVICE, **wanted.get(visible, {"CUDA_VISIBLE_DEVICES": ""}))
    assert done.stdout == ("cpu gloo\n" if visible == "none" else "cuda:0 nccl\n"), done.stderr


def test_idle_gpus_are_named_where_each_rank_has_several(tmp_path: Path) -> None:
    """As by --gpus-per-task=2: each rank uses one of its own two."""
    need_gpus(4)
    below = {rank: ["env", f"CUDA_VISIBLE_DEVICES={2 * rank},{2 * rank + 1}"] for rank in range(2)}
    with ranks.started(tmp_path, SUM, variables={"SLURM_GPUS_PER_TASK": "2"}, below=below) as it:
        done = it.wait()
    assert done.codes == [0, 0], done.text
    assert done.printed == ["cuda:0 8.0\n"] * 2, done.text
    assert re.search(r"unused|idle", done.text), done.text


NESTED = """
import subprocess

world = srunddp.init()
source = "import srunddp; w = srunddp.init(); "
source += "print(w.rank, w.world_size, w.device, w.backend); w.close()"
if RANK == 0:
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    print(done.returncode, done.stdout.strip(), done.stderr)
dist.barrier()
world.close()
"""


def test_a_program_that_a_rank_starts_is_a_single_process(tmp_path: Path) -> None:
    """It trains or evaluates by itself, with NCCL on the same GPU."""
    answer = ran(tmp_path, NESTED, backend="gloo")[0]
    assert answer.startswith("0 0 1 cuda:0 "), answer
