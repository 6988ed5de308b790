"""GPUs before a job: what NCCL would refuse, or use slowly, is found without CUDA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from srunddp.check.checks.gpus import CHECK, GpuFacts
from srunddp.check.finding import Severity
from srunddp.util import numa_nodes
from srunddp.util.nvml import Device, look
from tests.conftest import ROOT
from tests.support.facts import tells
from tests.support.made_up_site import LOCAL_RANK_1, changed, reported, seen, subject, travelled
from tests.support.starting import python

GIB = 1 << 30
FAIL = Severity.FAIL
WARN = Severity.WARN


def gpu(uuid: str, **changes: Any) -> Device:
    known: dict[str, Any] = {
        "parent": "",
        "name": "NVIDIA H100",
        "total": 80 * GIB,
        "free": 79 * GIB,
        "numa": 0,
    }
    return Device(**{"uuid": uuid, "address": "0000:17:00.0", **known, **changes})  # type: ignore[typeddict-item]


A = gpu("GPU-a")
B = gpu("GPU-b")
C = gpu("GPU-c")
WELL = GpuFacts(
    driver="580.95.05",
    cuda="13.0",
    count=2,
    models=["NVIDIA H100"],
    devices=[A, B],
    present=True,
    numa=[0],
)
NONE = GpuFacts(missing="NVML Shared Library Not Found", numa=[0])


def both(**changes: Any) -> dict[int, dict[str, Any]]:
    """Of node03."""
    return {4: changes, 5: changes}


ALONE = "each rank sees its own GPU alone: no P2P and no NVLink among those of the node"
SLICES = {rank: {"devices": [gpu(f"MIG-{rank}", parent="GPU-a")], "count": 1} for rank in (4, 5)}
ONE_GPU = "two ranks with one GPU, GPU-a"
TOO_FEW = "0 GPUs are visible to local rank 1, and 2 ranks share this node"
NO_GPU = "no GPU is visible, but other nodes have GPUs"
FOUND: dict[str, tuple[dict[int, dict[str, Any]], list[tuple[Severity, str, tuple[int, ...]]]]] = {
    "nothing": ({}, []),
    "one GPU twice": (both(devices=[A, A]), [(FAIL, ONE_GPU, (4, 5))]),
    "one for both": (both(devices=[A]), [(FAIL, ONE_GPU, (4, 5))]),
    "too few for one": ({5: {"devices": []}}, [(FAIL, TOO_FEW, (5,))]),
    "none on a node": (both(devices=[], count=0), [(FAIL, NO_GPU, ())]),
    "an error": ({4: {"error": "GPU is lost", "devices": []}}, [(FAIL, "NVML: GPU is lost", ())]),
    "no library": (
        both(missing="no NVML", devices=[], count=0),
        [*[(FAIL, "/dev/nvidia0 is there, and NVML is not: no NVML", ())] * 2, (FAIL, NO_GPU, ())],
    ),
    "named wrongly": (
        {4: {"wanted": "0,1,7", "unknown": "7"}},
        [(WARN, "7 in CUDA_VISIBLE_DEVICES=0,1,7: CUDA ignores it and all after it", ())],
    ),
    "taken": (
        {4: {"devices": [gpu("GPU-a", free=60 * GIB), B]}},
        [(WARN, "20.0 of 80.0 GiB of the GPU's memory are taken", (4,))],
    ),
    "full": (
        {5: {"devices": [A, gpu("GPU-b", free=3 * GIB)]}},
        [(FAIL, "77.0 of 80.0 GiB of the GPU's memory are taken", (5,))],
    ),
    "full, and nobody uses it": ({4: {"devices": [A, gpu("GPU-b", free=0)]}}, []),
    "alone": (
        {4: {"devices": [A], "count": 1}, 5: {"devices": [B], "count": 1}},
        [(WARN, ALONE, (4, 5))],
    ),
    "hidden by a variable alone": (
        {4: {"devices": [A], "wanted": "0"}, 5: {"devices": [B], "wanted": "1"}},
        [],
    ),
    "without P2P": (
        both(separate=[["GPU-a", "GPU-b", "chipset not supported"]]),
        [(WARN, "no P2P among GPUs of a node: chipset not supported", (4, 5))],
    ),
    "without P2P to one that nobody uses": (
        both(devices=[A, B, C], separate=[["GPU-a", "GPU-c", "no"]]),
        [],
    ),
    "slices of one GPU": (
        SLICES,
        [
            (
                FAIL,
                (
                    "ranks with MIG instances of one GPU, GPU-a, which NCCL takes for one GPU used"
                    " twice"
                ),
                (4, 5),
            )
        ],
    ),
    "slices that may share": ({rank: each | {"shared": True} for rank, each in SLICES.items()}, []),
    "driver": (both(driver="570.1", cuda="12.8"), [(WARN, "NVIDIA driver 570.1 (CUDA 12.8)", ())]),
    "model": (
        both(devices=[gpu("GPU-a", name="NVIDIA A100"), gpu("GPU-b", name="NVIDIA A100")]),
        [(WARN, "GPU NVIDIA A100", (4, 5))],
    ),
    "far CPUs": ({5: {"numa": [1, 2]}}, [(WARN, "CPUs on NUMA node 1,2, and the GPU on 0", (5,))]),
    "some CPUs near": ({5: {"numa": [0, 1]}}, []),
    "no NUMA": ({5: {"numa": [], "devices": [A, gpu("GPU-b", numa=-1)]}}, []),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_wrong_with_a_node_s_gpus_is_found_there(name: str) -> None:
    changes, expected = FOUND[name]
    findings = list(CHECK.evaluate(changed(WELL, changes)))
    assert reported(findings) == [
        (level, found, ("node03",), ranks) for level, found, ranks in expected
    ]
    if name in ("one GPU twice", "alone"):
        assert findings[0].hint.startswith("start with --gpus-per-node=2 --gpu-bind=none")


def test_gpus_that_one_rank_leaves_idle_are_said() -> None:
    """And a variable that names a GPU where there is none."""
    findings = CHECK.evaluate(seen([WELL], per_node=1))
    ((level, found, nodes, ranks),) = reported(findings)
    assert (level, nodes, ranks) == (WARN, ("node01",), (0,))
    assert tells(found, "2 visible GPUs", "1 stay idle")
    named = {0: {"wanted": "0"}, 2: {"wanted": ""}, 4: {"wanted": "NoDevFiles"}}
    ((level, found, nodes, ranks),) = reported(CHECK.evaluate(changed(NONE, named)))
    assert (level, nodes, ranks) == (WARN, ("node01",), ())
    assert tells(found, "CUDA_VISIBLE_DEVICES=0", "no GPU")


def test_what_nvml_says_of_a_node_is_collected(fake_nvml: Callable[..., None]) -> None:
    first = {"uuid": "GPU-a", "total": 80 * GIB, "free": 79 * GIB, "separate": [1]}
    fake_nvml(
        first,
        {"uuid": "GPU-b", "address": "00000000:CA:00.0", "failing": {"nvmlDeviceGetMemoryInfo": 3}},
    )
    facts = travelled(CHECK, subject({"CUDA_VISIBLE_DEVICES": "1,0"}))
    assert (facts.driver, facts.cuda, facts.count, facts.models) == (
        "580.95.05",
        "12.8",
        2,
        ["NVIDIA H100"],
    )
    assert (facts.wanted, facts.error, facts.missing) == ("1,0", "", "")
    second, first_again = facts.devices
    assert (second["uuid"], second["address"], second["total"]) == ("GPU-b", "0000:ca:00.0", 0)
    assert first_again["free"] == 79 * GIB
    assert facts.separate == []
    assert look(None).separate == [["GPU-a", "GPU-b", "chipset not supported"]]
    fake_nvml({"uuid": "GPU-m", "instances": [{"uuid": "MIG-0"}, {"uuid": "MIG-1"}]})
    assert [(device["uuid"], device["parent"]) for device in look("MIG-1").devices] == [
        ("MIG-1", "GPU-m")
    ]


def test_one_gpu_of_two_ranks_is_found_through_nvml(fake_nvml: Callable[..., None]) -> None:
    """As where a node lists one GPU twice, and where a variable shows both ranks the same one."""
    fake_nvml({"uuid": "GPU-a"}, {"uuid": "GPU-a"})
    ranks = seen(travelled(CHECK, subject(variables)) for variables in ({}, LOCAL_RANK_1))
    assert reported(CHECK.evaluate(ranks)) == [(FAIL, ONE_GPU, ("node01",), (0, 1))]
    fake_nvml({"uuid": "GPU-a"}, {"uuid": "GPU-b"})
    ranks = seen(travelled(CHECK, subject({"CUDA_VISIBLE_DEVICES": "GPU-b"})) for _ in range(2))
    ((level, found, nodes, both),) = reported(CHECK.evaluate(ranks))
    assert (level, nodes, both) == (FAIL, ("node01",), (0, 1))
    assert tells(found, "GPU-b")


@pytest.mark.parametrize(
    ("machine", "missing", "error"),
    [
        ({"error": 18}, "", "RM has detected an NVML/RM version mismatch."),
        ({"error": 9}, "Driver Not Loaded", ""),
        (
            {"gpus": [{"uuid": "GPU-a", "failing": {"nvmlDeviceGetHandleByIndex": 15}}]},
            "",
            "GPU is lost",
        ),
    ],
)
def test_an_error_of_nvml_is_not_taken_for_a_node_without_gpus(
    fake_nvml: Callable[..., None], machine: dict[str, Any], missing: str, error: str
) -> None:
    fake_nvml(**machine)
    view = look(None)
    assert (view.missing, view.error, view.devices) == (missing, error, [])


def test_numa_nodes_are_read_where_linux_tells_them(tmp_path: Path) -> None:
    for name, cpus in {"node0": "0-3,8-11\n", "node1": "4-7\n", "node2": "\n"}.items():
        (tmp_path / "devices/system/node" / name).mkdir(parents=True)
        (tmp_path / "devices/system/node" / name / "cpulist").write_text(cpus)
    device = tmp_path / "bus/pci/devices/0000:17:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert numa_nodes.numa_node_of_device("0000:17:00.0", tmp_path) == 1
    assert numa_nodes.numa_node_of_device("0000:18:00.0", tmp_path) == -1
    assert [
        numa_nodes.numa_nodes_of_cpus(cpus, tmp_path) for cpus in ({3, 8}, {7}, {1, 5}, {99})
    ] == [
        [0],
        [1],
        [0, 1],
        [],
    ]


def test_neither_torch_nor_cuda_is_touched(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from srunddp.bootstrap.environment.detect import detect\n"
        "from srunddp.check.checks import cpus, gpus, paths, versions\n"
        "from srunddp.check.finding import CheckContext\n"
        "me = CheckContext(environment=detect({}))\n"
        "for check in (cpus, gpus, paths): check.collect(me)\n"
        "print(open('/proc/self/maps').read().count('libcuda'), {'torch'} & {*sys.modules})\n"
    )
    done = python("-c", code, folder=tmp_path, PYTHONPATH=f"{ROOT}")
    assert (done.stdout, done.stderr) == ("0 set()\n", "")


def test_the_summary_counts_each_gpu_once() -> None:
    nodes = [
        replaced
        for uuid in ("a", "c")
        for replaced in [[gpu(f"GPU-{uuid}1"), gpu(f"GPU-{uuid}2")]] * 2
    ]
    ranks = changed(WELL, {rank: {"devices": devices} for rank, devices in enumerate(nodes)}, 4)
    assert CHECK.summary(ranks) == "4 NVIDIA H100, driver 580.95.05"
    assert CHECK.summary(changed(NONE, {})) == "no GPU"


def test_a_broken_gpu_fails_the_check_and_a_slow_one_is_a_warning(
    fake_nvml: Callable[..., None],
) -> None:
    """NVML is made up, and no real GPU has been tried."""
    heat = {"trace": [{"reasons": 0x20}]}
    capped = {"trace": [{"reasons": 0x4}]}
    fake_nvml(
        {"uuid": "GPU-a", "remapped": [0, 1, 0, 1], "errors": 0},
        {"uuid": "GPU-b", "remapped": [0, 1, 1, 0], "errors": 2, **heat},
        {"uuid": "GPU-c", "remapped": [3, 1, 0, 0], "retired": 0, "errors": 0, **capped},
        {"uuid": "GPU-d", "failing": {"nvmlDeviceGetMemoryInfo": 15}},
    )
    ranks = seen(travelled(CHECK, subject({})) for _ in range(2))
    found = [each for each in reported(CHECK.evaluate(ranks)) if each[1].startswith("GPU ")]
    assert found == [
        (FAIL, "GPU 0 (GPU-a): a row of its memory could not be retired", ("node01",), ()),
        (
            WARN,
            "GPU 1 (GPU-b): 2 uncorrected memory errors (ECC) since the driver was loaded",
            ("node01",),
            (),
        ),
        (
            WARN,
            "GPU 1 (GPU-b): rows or pages of its memory are retired at the next reset",
            ("node01",),
            (),
        ),
        (WARN, "GPU 1 (GPU-b): slowed by heat now", ("node01",), ()),
        (FAIL, "GPU 3 (GPU-d): it does not answer any more", ("node01",), ()),
    ]
