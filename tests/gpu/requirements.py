"""What a check needs of the machine; one that does not find it is skipped, and says what it needs
and what is there.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# With which newer versions of NCCL take several ranks on one GPU.
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": "0"}
_TWO_RANKS = """
import sys, torch, torch.distributed as dist
file = "file://" + sys.argv[1]
dist.init_process_group("nccl", init_method=file, rank=int(sys.argv[2]), world_size=2)
total = torch.ones(1, device="cuda")
dist.all_reduce(total)
assert total.item() == 2
dist.destroy_process_group()
"""
_CUDA = (
    "/usr/local/cuda/bin",
    "/opt/nvidia/nsight-systems-cli/bin",
    "/opt/nvidia/nsight-systems/bin",
)


def gpus() -> int:
    """How many GPUs torch sees; by NVML, so that processes that are forked later can use CUDA."""
    import torch

    return torch.cuda.device_count()


def need_gpus(count: int = 1) -> None:
    if gpus() < count:
        pytest.skip(f"needs {_counted(count, 'GPU')}, found {gpus()}")


def need_nccl_ranks(count: int) -> dict[str, str]:
    """The variables with which NCCL takes so many ranks here: none where each has a GPU of its
    own.
    """
    need_gpus()
    if gpus() >= count:
        return {}
    need_shared_gpu(count)
    return SHARED


def need_shared_gpu(instead_of: int = 2) -> None:
    """NCCL takes two ranks on one GPU, which does for so many GPUs."""
    need_gpus()
    if not _shares_a_gpu():
        pytest.skip(
            f"needs {instead_of} GPUs, found {gpus()}, which this NCCL does not share between ranks"
        )


@functools.cache
def _shares_a_gpu() -> bool:
    """Tried, not read off a version: the driver may refuse as well."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "meeting"))
        quiet = subprocess.DEVNULL
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _TWO_RANKS, meeting, str(rank)],
                env=os.environ | SHARED | {"NCCL_SOCKET_IFNAME": "lo"},
                stdout=quiet,
                stderr=quiet,
            )
            for rank in range(2)
        ]
        try:
            return [rank.wait(timeout=120) for rank in ranks] == [0, 0]
        except subprocess.TimeoutExpired:
            return False
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def need_tool(name: str) -> str:
    """The path of a program, also where CUDA's toolkit is not in PATH."""
    if found := shutil.which(
        name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", *_CUDA])
    ):
        return found
    pytest.skip(f"needs {name}, found none")


def need_infiniband(count: int = 1) -> list[str]:
    """The network interfaces of active InfiniBand ports."""
    found = [
        interface.name
        for state in Path("/sys/class/infiniband").glob("*/ports/*/state")
        if "ACTIVE" in state.read_text()
        and "InfiniBand" in state.with_name("link_layer").read_text()
        for interface in state.parents[2].joinpath("device", "net").glob("*")
    ]
    if len(found) < count:
        pytest.skip(f"needs {_counted(count, 'active InfiniBand port')}, found {len(found)}")
    return sorted(found)


def need_slurm() -> dict[str, str]:
    """What `scontrol show config` says of this site."""
    if not shutil.which("scontrol"):
        pytest.skip("needs a Slurm site, found no scontrol")
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        pytest.skip("needs a Slurm site, and scontrol said nothing within 60 s")
    if done.returncode:
        pytest.skip(
            f"needs a Slurm site, and scontrol said: {done.stderr.strip().rpartition(chr(10))[2]}"
        )
    pairs = (line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def need_slurm_gpus(count: int) -> dict[str, str]:
    """The same, of a site with nodes that have so many GPUs."""
    config = need_slurm()
    gres = subprocess.run(
        ["sinfo", "-h", "-o", "%G"], capture_output=True, text=True, timeout=60
    ).stdout
    most = max(map(int, re.findall(r"\bgpu:(?:[^,:(]+:)?(\d+)", gres)), default=0)
    if most < count:
        pytest.skip(f"needs a Slurm site with {_counted(count, 'GPU')} on a node, found {most}")
    return config


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
