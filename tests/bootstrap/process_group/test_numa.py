"""--bind=auto on a made-up sysfs: two NUMA nodes of four cores with two threads each, and two GPUs
at each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from srunddp.bootstrap.environment.detect import detect
from srunddp.bootstrap.process_group.numa import plan
from tests.conftest import PROGRAMS, ROOT
from tests.support.starting import python, slurm, write

NODES = {
    "0000:17:00.0": (0, "0-3,8-11"),
    "0000:2a:00.0": (0, "0-3,8-11"),
    "0000:ca:00.0": (1, "4-7,12-15"),
}
NODES["0000:da:00.0"] = NODES["0000:ca:00.0"]
GPUS = [
    {"uuid": f"GPU-{number}", "address": f"0000{address}"} for number, address in enumerate(NODES)
]
OWN = {"CUDA_VISIBLE_DEVICES": "GPU-2"}
MIXED = [GPUS[0], {**GPUS[1], "name": "NVIDIA A100"}]
ALL = "0-15"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for address, (node, cpus) in NODES.items():
        write(tmp_path / f"sys/bus/pci/devices/{address}/numa_node", f"{node}\n")
        write(tmp_path / f"sys/bus/pci/devices/{address}/local_cpulist", f"{cpus}\n")
    for cpu in range(16):
        siblings = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        write(siblings, f"{cpu % 8},{cpu % 8 + 8}\n")
    write(tmp_path / "sys/devices/system/cpu/online", f"{ALL}\n")
    return tmp_path / "sys"


def planned(
    sysfs: Path, rank: int = 0, size: int = 4, *, mask: Iterable[int] = range(16), **more: str
) -> tuple[str, str]:
    environ = slurm(rank, size, **more)
    found = plan(detect(environ, pid=0), environ, set(mask), sysfs)
    return found.value, "; ".join((found.why, *found.not_chosen))


def test_ranks_of_a_numa_node_share_its_cores(sysfs: Path, fake_nvml: Callable[..., None]) -> None:
    fake_nvml(*GPUS)
    shares = ["CPUs 0-1,8-9", "CPUs 2-3,10-11", "CPUs 4-5,12-13", "CPUs 6-7,14-15"]
    assert [planned(sysfs, rank)[0] for rank in range(4)] == shares
    why = (
        "cuda:2 at 0000:ca:00.0 is on NUMA node 1, 2 of 4 cores, as 2 of the node's ranks have GPUs"
        " there"
    )
    others = "CPUs 0-3,8-11: on other NUMA nodes; CPUs 6-7,14-15: for other ranks with GPUs there"
    assert planned(sysfs, 2) == (shares[2], f"{why}; {others}")
    assert [planned(sysfs, rank, 3)[0] for rank in (0, 2)] == ["CPUs 0-1,8-9", "CPUs 4-7,12-15"]
    # Of a job that has half of the node.
    write(sysfs / "fs/cgroup/cpuset.cpus.effective", "2-5,10-13")
    own = [planned(sysfs, rank, mask=(2, 3, 4, 5, 10, 11, 12, 13))[0] for rank in range(4)]
    assert own == ["CPUs 2,10", "CPUs 3,11", "CPUs 4,12", "CPUs 5,13"]


SHARED = (
    "cuda:0 at 0000:ca:00.0 is on NUMA node 1, all 4 cores, which other ranks may use too; CPUs"
    " 0-3,8-11: on other"
)


@pytest.mark.parametrize(
    ("gpus", "variables", "value", "why"),
    [
        (GPUS, OWN, "CPUs 4-7,12-15", SHARED),
        (
            GPUS,
            {"SLURM_CPUS_PER_TASK": "4"},
            "CPUs 0-1,8-9",
            "cuda:0 at 0000:17:00.0 is on NUMA node 0, 2 of 4",
        ),
        (
            GPUS,
            {"SLURM_CPUS_PER_TASK": "5"},
            "unchanged",
            "cuda:0 at 0000:17:00.0: 5 CPUs per task were asked",
        ),
        (
            GPUS,
            {"CUDA_VISIBLE_DEVICES": ""},
            "unchanged",
            "no GPU is visible: see CUDA_VISIBLE_DEVICES",
        ),
        (
            GPUS,
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            "unchanged",
            "2 GPUs are visible to local rank 0, and 4 ranks share",
        ),
        (
            GPUS,
            {"SLURM_LOCALID": "4"},
            "unchanged",
            "which of 4 GPUs this rank will use is not known: how many ranks",
        ),
        (
            MIXED,
            {},
            "unchanged",
            "which of 2 GPUs this rank will use is not known: CUDA numbers different models by",
        ),
        (
            [{"uuid": "GPU-9", "address": "00000000:99:00.0"}],
            {},
            "unchanged",
            "cuda:0 at 0000:99:00.0: its NUMA node",
        ),
    ],
)
def test_what_is_chosen_and_what_stays_has_its_reason(
    gpus: list[Any],
    variables: dict[str, Any],
    value: str,
    why: str,
    sysfs: Path,
    fake_nvml: Callable[..., None],
) -> None:
    fake_nvml(*gpus)
    found = planned(sysfs, **variables)
    assert (found[0], found[1][: len(why)]) == (value, why)


def test_an_existing_binding_and_a_quota_stay(sysfs: Path, fake_nvml: Callable[..., None]) -> None:
    assert planned(sysfs, mask=range(8)) == ("unchanged", "bound before srunddp: CPUs 0-7 of 0-15")
    assert planned(sysfs) == ("unchanged", "no GPU is visible: NVML Shared Library Not Found")
    write(sysfs / "fs/cgroup/cpu.max", "800000 100000")
    assert planned(sysfs)[1].startswith(
        "the control group's quota of 8 CPUs is for all ranks together"
    )


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs that are not bound")
def test_the_script_has_the_chosen_cpus(sysfs: Path, fake_nvml: Callable[..., None]) -> None:
    mask = sorted(os.sched_getaffinity(0))
    fake_nvml(GPUS[0])
    write(sysfs / "devices/system/cpu/online", ",".join(map(str, mask)))
    write(sysfs / "bus/pci/devices/0000:17:00.0/local_cpulist", f"{mask[1]}")
    write(sysfs.parent / "train.py", "import os; print(os.sched_getaffinity(0))")
    code = (
        "import pathlib, sys; from srunddp.bootstrap.process_group import numa; numa.SYSFS ="
        f" pathlib.Path('{sysfs}')"
    )
    code += "; from srunddp.cli import main; sys.argv[1:] = ['--bind=auto', 'train.py']; main()"
    path = f"{PROGRAMS / 'nvml'}:{ROOT}"
    done = python(
        "-c", code, folder=sysfs.parent, PYTHONPATH=path, FAKE_NVML=os.environ["FAKE_NVML"]
    )
    assert (done.returncode, done.stdout) == (0, f"{{{mask[1]}}}\n"), done.stderr
    assert (
        f"rank 0: --bind=auto: CPUs {mask[1]}: cuda:0 at 0000:17:00.0 is on NUMA node 0, 1 of 1"
        in done.stderr
    )
