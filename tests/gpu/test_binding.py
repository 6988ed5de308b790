"""--bind=auto with a real GPU: the script runs next to it, and CUDA works after NVML was asked
before the fork.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from srunddp.util.hostlist import numbers_of
from tests.gpu.ranks import plain, ran
from tests.gpu.requirements import need_gpus

# Torch's own word on where the GPU is, and not NVML's.
SHOWS = """
import json, os, torch
own = torch.cuda.get_device_properties(0)
address = f"{own.pci_domain_id:04x}:{own.pci_bus_id:02x}:{own.pci_device_id:02x}.0"
total = torch.ones(4, device="cuda").sum().item()
print(json.dumps([address, sorted(os.sched_getaffinity(0)), total]))
"""


def test_a_rank_runs_on_the_cpus_next_to_its_gpu(tmp_path: Path) -> None:
    need_gpus()
    address, mask, _ = json.loads(plain(tmp_path, SHOWS).stdout)
    device = Path("/sys/bus/pci/devices", address)
    known = (device / "numa_node").is_file() and int((device / "numa_node").read_text()) >= 0
    if not known or len(mask) < (os.cpu_count() or 1):
        pytest.skip(
            f"needs a GPU whose NUMA node is known and all CPUs, found {address} and {len(mask)}"
            " CPUs"
        )
    near = numbers_of((device / "local_cpulist").read_text().strip()) & set(mask)
    (bound,) = ran(tmp_path, SHOWS, "--bind=auto", size=1)
    assert json.loads(bound) == [address, sorted(near), 4.0]
