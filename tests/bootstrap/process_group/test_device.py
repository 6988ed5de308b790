from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from srunddp.bootstrap.environment.slurm import has_own
from srunddp.bootstrap.process_group import device
from srunddp.errors import ConfigError
from tests.conftest import ROOT
from tests.support.facts import tells


@pytest.mark.parametrize(
    ("visible", "expected"), [(1, [0, 0, 0, 0]), (4, [0, 1, 2, 3]), (8, [0, 1, 2, 3])]
)
def test_the_local_rank_counts_unless_one_gpu_is_visible(visible: int, expected: list[int]) -> None:
    """--gpus-per-task or --gpu-bind: each rank sees its own GPU alone."""
    assert [device.device_index(local_rank, 4, visible) for local_rank in range(4)] == expected


@pytest.mark.parametrize("visible", [2, 3])
def test_too_few_gpus_are_refused_and_not_shared(visible: int) -> None:
    found = (
        f"{visible} GPUs are visible to local rank 0, and 4 ranks share this"
        " node.*--gpus-per-node=4 --gpu-bind=none"
    )
    with pytest.raises(ConfigError, match=found):
        device.device_index(0, 4, visible)


@pytest.mark.parametrize(("local_world_size", "visible"), [(1, 0), (1, 1), (2, 8), (8, 8)])
def test_idle_gpus_are_warned_of_with_the_flags(local_world_size: int, visible: int) -> None:
    assert device.unused_devices(local_world_size, visible) == ""
    flags = "--ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=none"
    assert re.search(f"7 stay idle; .*{flags}", device.unused_devices(1, 8))


OWN = {"SLURM_STEP_GPUS": "0,1,2,3"}  # two tasks of the step are on this node


@pytest.mark.parametrize(
    ("variables", "local_world_size", "visible", "own"),
    [
        *(
            (variables, 2, 2, True)
            for variables in (OWN, {"SLURM_GPUS_PER_TASK": "2"}, {"SLURM_GPUS_PER_TASK": "a:2"})
        ),
        ({}, 2, 2, False),
        ({"SLURM_STEP_GPUS": "0,1"}, 2, 2, False),  # all of the node's to all
        # --gpu-bind=closest: two ranks see the same four.
        ({"SLURM_STEP_GPUS": "0,1,2,3,4,5,6,7"}, 4, 4, False),
        ({"SLURM_STEP_GPUS": "0,1"}, 2, 1, False),
        ({"SLURM_GPUS_PER_TASK": "2"}, 2, 4, False),  # --gpu-bind=none
        (OWN, 1, 4, False),
        # Slurm 22.05, sbatch: of several types.
        ({"SLURM_GPUS_PER_TASK": "a100:1,h100:1"}, 3, 2, True),
        # mpirun: two ranks in one task of Slurm, whose GPUs both of them see.
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_GTIDS": "0"}, 2, 2, False),
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_GTIDS": "4,5"}, 2, 2, True),
    ],
)
def test_own_gpus_are_told_from_all(
    variables: dict[str, str], local_world_size: int, visible: int, own: bool
) -> None:
    assert has_own(variables, local_world_size, visible) is own


@pytest.mark.parametrize(
    ("binding", "own"),
    [
        ("gpu:per_task:2", True),  # Slurm 22.05
        ("gres/gpu:per_task:2", True),
        ("gres/gpu:verbose,per_task:2", True),
        ("gres/nic:per_task:1+gres/gpu:per_task:2", True),
        ("gres/gpu:per_task:4", False),  # CUDA_VISIBLE_DEVICES was changed after Slurm
        ("gres/nic:per_task:2+gres/gpu:none", False),
        ("gres/gpu:closest", False),  # several tasks may be closest to the same GPUs
        ("gpu:mask_gpu:0x3,0xc,0x30", True),  # Slurm 22.05
        ("gres/gpu:mask:3,12,48", True),
        ("gres/gpu:mask:0x3,0xc", False),  # the third task has the first mask again
        ("gres/gpu:mask:0x3*2,0xc", False),
        ("gres/gpu:mask:nonsense", False),
    ],
)
def test_what_srun_has_bound_to_each_task_is_its_own(binding: str, own: bool) -> None:
    """Three tasks on a node with two GPUs each: SLURM_STEP_GPUS names the task's own there."""
    variables = {"SLURMD_TRES_BIND": binding, "SLURM_STEP_GPUS": "2,3"}
    assert has_own(variables, 3, 2) is own


@pytest.mark.parametrize(
    ("tres", "own"),
    [
        ("gres/gpu=2", True),
        ("gres/gpu:2", True),
        ("gres:gpu:2", True),  # Slurm 23.02
        ("gres/gpu:a100=2", True),
        ("gres/gpu:a100:2", True),
        ("cpu=4,gres/gpu:a100=2,license/matlab=1", True),
        ("gres/gpu:a100=1,gres/gpu:h100=1", True),
        ("gres/gpu:a100,gres/gpu:h100", True),
        ("gres/gpu=1", False),
        ("cpu=2", False),
        ("gres/shard=2", False),
        ("gres/gpu_memory=2", False),
    ],
)
def test_what_was_asked_for_each_task_is_its_own(tres: str, own: bool) -> None:
    assert has_own({"SLURM_TRES_PER_TASK": tres, "SLURM_STEP_GPUS": "2,3"}, 3, 2) is own


def test_each_rank_takes_the_first_of_its_own() -> None:
    """--gpus-per-task=2 --ntasks-per-node=2."""
    assert [device.device_index(local_rank, 2, 2, own=True) for local_rank in range(2)] == [0, 0]
    said = device.unused_devices(2, 2, own=True)
    assert tells(said, "2 GPUs", "cuda:1 unused", "--gpus-per-task=1")


@pytest.mark.parametrize(
    ("uuids", "shared", "known"),
    [("ab", "", "b"), ("aa", "", ""), ("a" * 4, "", ""), ("ab", "1", ""), ("ab", "0", "b")],
)
def test_a_uuid_of_several_is_no_claim(
    monkeypatch: pytest.MonkeyPatch, uuids: str, shared: str, known: str
) -> None:
    """As ROCm and MIG have it; NCCL_MULTI_RANK_GPU_ENABLE=1 lets several ranks use one GPU."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shared)
    made_up = Torch(len(uuids))
    made_up.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=uuids[index])
    monkeypatch.setitem(sys.modules, "torch", made_up)
    assert device.identity(1) == known


class Torch(SimpleNamespace):
    """As much of torch as the choice needs, with any number of GPUs; notes the current device."""

    def __init__(self, visible: int) -> None:
        super().__init__(current=None, device=lambda *parts: ":".join(map(str, parts)))
        self.cuda = SimpleNamespace(device_count=lambda: visible, set_device=self._set)

    def _set(self, number: str) -> None:
        self.current = number


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Torch:
    made_up = Torch(request.param)
    monkeypatch.setitem(sys.modules, "torch", made_up)
    return made_up


@pytest.mark.parametrize(
    ("torch", "asked", "given"),
    [
        (1, ("auto", 3, 4), ("cuda:0", "nccl", "")),
        (4, ("nccl", 2, 4), ("cuda:2", "nccl", "")),
        (4, ("gloo", 1, 4), ("cuda:1", "gloo", "")),
        (0, ("auto", 1, 4), ("cpu", "gloo", "")),
        (0, ("gloo", 1, 4), ("cpu", "gloo", "")),
        (8, ("auto", 0, 1), ("cuda:0", "nccl", device.unused_devices(1, 8))),
    ],
    indirect=["torch"],
)
@pytest.mark.parametrize(
    "devices", ["GPU-2ef1a2f3-7c9d-4f6c-8a93-0b0b6a4c9a2e", "MIG-GPU-2ef1a2f3/7/0", "7"]
)
def test_select_device_sets_the_current_one_and_warns(
    torch: Torch,
    asked: tuple[str, int, int],
    given: tuple[object, str, str],
    devices: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Visible devices are counted and never parsed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    current = None if given[0] == "cpu" else given[0]
    assert device.select_device(*asked) == given
    assert torch.current == current


@pytest.mark.parametrize(
    ("torch", "backend", "said"),
    [
        (0, "nccl", r"backend nccl, and torch sees no GPU; expected .* -> .*--backend gloo"),
        (1, "ncll", "backend 'ncll'; expected one of nccl, gloo, auto -> "),
    ],
    indirect=["torch"],
)
def test_a_backend_that_cannot_be_had_is_refused(torch: Torch, backend: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        device.select_device(backend, 0, 1)


@pytest.mark.slow
def test_two_ranks_that_see_the_same_gpu_are_named() -> None:
    """Such as eight tasks that were all given the first one."""
    source = (
        "from torch.distributed import HashStore\nfrom srunddp.bootstrap.process_group.device"
        " import claim_gpu\nstore = HashStore()\nfor node, gpu, rank in (('n1', 'GPU-a', 0), ('n1',"
        " 'GPU-b', 1), ('n2', 'GPU-a', 2), ('n1', 'GPU-a', 0)):\n    claim_gpu(store, node, gpu,"
        " rank)\nclaim_gpu(store, 'n1', 'GPU-a', 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert (
        "ConfigError: ranks 0 and 3 on n1 have the same GPU, GPU-a; expected a GPU for each rank"
        in done.stderr
    )
