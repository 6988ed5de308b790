"""CUDA_VISIBLE_DEVICES as CUDA reads it, by what NVML says."""

from __future__ import annotations

import pytest

from srunddp.util.cuda_visible import VisibleDevice, visible

A = VisibleDevice(uuid="GPU-a", parent="")
B = VisibleDevice(uuid="GPU-b", parent="")
M0 = VisibleDevice(uuid="MIG-0", parent="GPU-m")
M1 = VisibleDevice(uuid="MIG-1", parent="GPU-m")


@pytest.mark.parametrize(
    ("wanted", "gpus", "expected", "unknown"),
    [
        (None, [[A], [B]], [A, B], ""),
        ("1,0", [[A], [B]], [B, A], ""),
        ("1gpu2", [[A], [B]], [B], ""),
        ("GPU-b", [[A], [B]], [B], ""),
        ("GPU-", [[A], [B]], [], "GPU-"),
        ("GPU-", [[A]], [A], ""),
        ("", [[A], [B]], [], ""),
        ("-1", [[A], [B]], [], ""),
        ("NoDevFiles", [[A], [B]], [], ""),
        ("0,-1,1", [[A], [B]], [A], ""),
        ("0,7,1", [[A], [B]], [A], "7"),
        ("0,GPU-a", [[A], [B]], [], "GPU-a"),
        (" 0 , 1 ", [[A], [B]], [A, B], ""),
        ("MIG-1", [[M0, M1], [B]], [M1], ""),
        ("MIG-1,MIG-0", [[M0, M1]], [M1], ""),
        ("MIG-1,MIG-0,9", [[M0, M1]], [M1], "9"),
        ("0", [[M0, M1]], [M0], ""),
        ("GPU-m", [[M0, M1]], [M0], ""),
        ("GPU-m,MIG-0", [[M0, M1]], [], "MIG-0"),
        (None, [], [], ""),
    ],
)
def test_devices_are_named_by_index_uuid_or_its_beginning(
    wanted: str | None, gpus: list[list[VisibleDevice]], expected: list[VisibleDevice], unknown: str
) -> None:
    assert visible(wanted, gpus) == (expected, unknown)
