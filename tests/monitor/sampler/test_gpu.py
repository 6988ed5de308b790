"""The job's GPUs by a simulated NVML: each once, by UUID; what a GPU does not know is empty."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from srunddp.monitor.sampler.gpu import Gpus
from srunddp.util.sample_files import GPUS
from tests.conftest import PROGRAMS, ROOT
from tests.support.sampled import supervised
from tests.support.starting import until

FAKE = PROGRAMS / "nvml"
GIB = 1 << 30
BUSY: dict[str, Any] = {
    "utilization": 97,
    "memory_utilization": 40,
    "used": 60 * GIB,
    "power": 650_250,
    "energy": 1_000_500,
    "temperature": 61,
    "clocks": {"1": 1755, "2": 2619},
    "reasons": 0x4 | 0x40,
    "nvlink": [100, 200],
    "pcie": [1000, 2000],
}
ROW = {
    "utilization_percent": "97",
    "memory_bytes": str(60 * GIB),
    "memory_limit_bytes": str(80 * GIB),
    "memory_bandwidth_percent": "40",
    "power_w": "650.250",
    "energy_j": "1000.500",
    "temperature_c": "61",
    "sm_clock_mhz": "1755",
    "memory_clock_mhz": "2619",
    "throttled": "power_cap+hardware_thermal",
    "pcie_received_bytes_per_s": "1024000",
    "pcie_sent_bytes_per_s": "2048000",
    "nvlink_received_bytes": "102400",
    "nvlink_sent_bytes": "204800",
    **dict.fromkeys(("sm_percent", "occupancy_percent", "tensor_percent", "dram_percent"), ""),
}
Put = Callable[..., Gpus]


@pytest.fixture
def fake(fake_nvml: Callable[..., None]) -> Put:
    """And chooses all of the GPUs, or those that are wanted."""

    def put(*gpus: dict[str, Any], wanted: str | None = None, **machine: Any) -> Gpus:
        fake_nvml(*gpus, **machine)
        found = Gpus(5.0)
        found.choose({wanted})
        return found

    return put


def sampled(gpus: Gpus) -> list[dict[str, str]]:
    return [
        dict(zip(GPUS.names, line.split(","), strict=True))
        for line in gpus.rows("7.000").splitlines()
    ]


def test_all_that_nvml_says_is_in_the_row(fake: Put) -> None:
    (row,) = sampled(fake({"uuid": "GPU-a", "name": "NVIDIA A100, 80GB", "trace": [BUSY]}))
    assert (
        row == {"time": "7.000", "uuid": "GPU-a", "index": "0", "name": "NVIDIA A100  80GB"} | ROW
    )


def test_an_idle_gpu_is_not_throttled(fake: Put) -> None:
    gpus = fake(
        {
            "uuid": "GPU-a",
            "trace": [BUSY, BUSY | {"utilization": 3, "reasons": 1, "energy": 1_100_500}],
        }
    )
    rows = [sampled(gpus)[0] for _ in range(3)]
    assert [row["utilization_percent"] for row in rows] == ["97", "3", "3"]
    assert [row["energy_j"] for row in rows] == ["1000.500", "1100.500", "1100.500"]
    assert rows[1]["throttled"] == ""


def test_activity_of_newer_gpus_is_counted_between_two_samples(fake: Put) -> None:
    gpm = {"2": 80.5, "3": 42.25, "5": 33.0, "10": 61.0, "20": 12.5, "21": 2.0}
    gpus = fake(
        {"uuid": "GPU-h", "trace": [BUSY | {"gpm": gpm}, BUSY | {"gpm": gpm | {"2": 10.0}}]}
    )
    first = sampled(gpus)[0]
    second = sampled(gpus)[0]
    assert (first["sm_percent"], first["utilization_percent"]) == ("", "97")
    wanted = ("sm_percent", "occupancy_percent", "tensor_percent", "dram_percent")
    assert [second[column] for column in wanted] == ["10.00", "42.25", "33.00", "61.00"]
    assert (second["pcie_sent_bytes_per_s"], second["pcie_received_bytes_per_s"]) == (
        "13107200",
        "2097152",
    )


def test_only_the_job_s_gpus_are_asked_each_once(fake: Put) -> None:
    gpus = fake(*({"uuid": f"GPU-{letter}", "trace": [BUSY]} for letter in "abcd"), wanted="")
    assert gpus.choose({"0", "GPU-c"})
    assert {row["uuid"] for row in sampled(gpus)} == {"GPU-a", "GPU-c"}
    gpus.choose({"0", "GPU-c", "2,3"})
    assert sorted(row["uuid"] for row in sampled(gpus)) == ["GPU-a", "GPU-c", "GPU-d"]
    assert {row["uuid"]: row["index"] for row in sampled(gpus)} == {
        "GPU-a": "0",
        "GPU-c": "2",
        "GPU-d": "3",
    }


def test_a_job_that_is_shown_none_has_none(fake: Put) -> None:
    gpus = fake({"uuid": "GPU-a", "trace": [BUSY]}, wanted="")
    assert not gpus.choose({"", "-1", "NoDevFiles", "7"})
    assert sampled(gpus) == []


def test_a_mig_instance_is_a_row_of_its_own(fake: Put) -> None:
    own = {"used": 5 * GIB, "utilization": 50, "memory_utilization": 20, "gpm": {"2": 70.0}}
    slices = [
        {"uuid": f"MIG-{number}", "instance": number + 7, "trace": [own]} for number in range(2)
    ]
    gpus = fake({"uuid": "GPU-m", "trace": [BUSY], "instances": slices}, wanted="MIG-1")
    sampled(gpus)
    (row,) = sampled(gpus)
    assert (row["uuid"], row["memory_bytes"]) == ("MIG-1", str(5 * GIB))
    # The whole GPU's power is not one instance's.
    assert (row["power_w"], row["energy_j"], row["pcie_sent_bytes_per_s"]) == ("", "", "")
    assert row["sm_percent"] == "70.00"


def test_what_a_gpu_does_not_know_is_empty_and_not_asked_again(
    fake: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {
        "utilization": 9,
        "memory_utilization": 1,
        "used": 0,
        "temperature": 40,
        "clocks": {"1": 1, "2": 2},
    }
    gpus = fake({"uuid": "GPU-a", "trace": [few]})
    import pynvml

    asked: list[str] = []
    say = pynvml._said

    def said(handle: dict[str, Any], what: str) -> Any:
        asked.append(what)
        return say(handle, what)

    monkeypatch.setattr(pynvml, "_said", said)
    (row,) = sampled(gpus)
    empty = {column for column in ROW if not row[column]}
    assert empty >= {
        "power_w",
        "energy_j",
        "throttled",
        "nvlink_sent_bytes",
        "pcie_sent_bytes_per_s",
        "sm_percent",
    }
    assert (row["utilization_percent"], row["sm_clock_mhz"]) == ("9", "1")
    assert {"power", "energy", "pcie", "reasons"} <= {*asked}
    asked.clear()
    sampled(gpus)
    assert not {"power", "energy", "pcie", "reasons"} & {*asked}
    assert "temperature" in asked


@pytest.mark.parametrize("function", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"])
def test_a_gpu_that_is_lost_has_an_empty_row(fake: Put, function: str) -> None:
    gpus = fake(
        {"uuid": "GPU-a", "trace": [BUSY], "failing": {function: 15}},
        {"uuid": "GPU-b", "trace": [BUSY]},
    )
    for _ in range(2):
        lost, well = sampled(gpus)
        assert (lost["uuid"], {lost[column] for column in ROW}) == ("GPU-a", {""})
        assert {column: well[column] for column in ROW} == ROW
    # One that was lost before keeps its place.
    before = {"uuid": "GPU-a", "failing": {"nvmlDeviceGetHandleByIndex": 15}}
    gpus = fake(before, {"uuid": "GPU-b", "trace": [BUSY]}, wanted="1")
    assert [row["uuid"] for row in sampled(gpus)] == ["GPU-b"]


@pytest.mark.parametrize(
    ("failing", "other"),
    [
        ({"nvmlDeviceGetPowerUsage": 999}, ["power_w"]),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 13}, []),
    ],
    ids=["one error", "the names of older drivers"],
)
def test_another_error_leaves_one_field_empty(
    fake: Put, failing: dict[str, int], other: list[str]
) -> None:
    gpus = fake({"uuid": "GPU-a", "trace": [BUSY], "failing": failing})
    for _ in range(2):
        (row,) = sampled(gpus)
        assert [column for column in ROW if row[column] != ROW[column]] == other


def test_without_nvml_there_are_none(fake: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(error=18)
    assert not Gpus(5.0).choose({None})
    monkeypatch.delenv("FAKE_NVML")
    assert not Gpus(5.0).choose({None})


def test_the_sampler_writes_their_file_where_there_are_some(fake: Put, tmp_path: Path) -> None:
    fake({"uuid": "GPU-a", "trace": [BUSY]}, {"uuid": "GPU-b", "trace": [BUSY]})
    wanted: dict[str, Any] = {
        "FAKE_NVML": str(tmp_path / "nvml.json"),
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONPATH": f"{FAKE}:{ROOT}",
    }
    (tmp_path / "with").mkdir()
    with supervised(tmp_path / "with", **wanted) as job:
        until(lambda: len(job.rows("gpus")) > 1)
        assert {row["uuid"] for row in job.rows("gpus")} == {"GPU-b"}
        assert job.rows("node")
    (tmp_path / "without").mkdir()
    with supervised(tmp_path / "without", **wanted | {"CUDA_VISIBLE_DEVICES": ""}) as job:
        until(lambda: len(job.rows("node")) > 1)
        assert not (tmp_path / "without" / "n1.gpus.csv").exists()
