"""Profilers and debuggers see below srunddp what they see in plain Python, which is asked in the
same test.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.gpu.ranks import LIMIT, alone, plain, variables_here
from tests.gpu.requirements import need_tool
from tests.support.starting import LONG, bare, until, write

COMPUTE = """
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
values = torch.ones(256, 256, device=device)

def compute():
    global values
    for _ in range(20):
        values = values @ values / 256
    if device == "cuda":
        torch.cuda.synchronize()
"""
PROFILED = (
    COMPUTE
    + """
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

compute()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
    compute()
averages = profiler.key_averages()
print(sum(event.count for event in averages if event.device_type == DeviceType.CUDA))
"""
)
SPINNING = """
import os
from pathlib import Path
import torch

Path("pid").write_text(str(os.getpid()))
Path("pid").rename("spins")
while not Path("stop").exists():
    if torch.cuda.is_available():
        torch.cuda._sleep(int(2e9))
        torch.cuda.synchronize()
"""
ABORTING = "import os\n\nos.abort()\n"


@pytest.mark.parametrize("worker", ["", "exec"])
def test_torchs_profiler_sees_the_kernels_of_a_rank(worker: str, tmp_path: Path) -> None:
    expected = plain(tmp_path, PROFILED)
    assert int(expected.stdout) >= 20, expected.stderr
    found = alone(tmp_path, PROFILED, **({"SRUNDDP_WORKER": worker} if worker else {}))
    assert found.stdout == expected.stdout, found.stderr


def test_nsys_sees_the_kernels_of_a_worker_by_exec(tmp_path: Path) -> None:
    """SRUNDDP_WORKER=exec is for this: nsys follows no process between its fork and its exec."""
    nsys = need_tool("nsys")
    before = (nsys, "profile", "--trace=cuda,nvtx", "--sample=none", "--force-overwrite=true")
    done = plain(tmp_path, COMPUTE + "compute()\n", *before, "--output=plain")
    expected = kernels(nsys, tmp_path / "plain.nsys-rep")
    if not expected:
        pytest.skip(
            "needs an nsys that traces kernels of plain Python, and it said:"
            f" {last_line(done.stderr)}"
        )
    done = alone(tmp_path, COMPUTE + "compute()\n", *before, "--output=ours", SRUNDDP_WORKER="exec")
    assert done.returncode == 0, done.stderr
    assert kernels(nsys, tmp_path / "ours.nsys-rep") == expected, done.stderr


def kernels(nsys: str, report: Path) -> int:
    """How many launches of kernels a report of nsys has."""
    command = [
        nsys,
        "stats",
        "--report",
        "cuda_gpu_kern_sum",
        "--format",
        "csv",
        "--force-export=true",
        str(report),
    ]
    done = subprocess.run(
        command, env=bare(variables_here()), capture_output=True, text=True, timeout=LIMIT
    )
    lines = done.stdout.splitlines()
    head = next((number for number, line in enumerate(lines) if "Instances" in line), len(lines))
    return sum(int(row["Instances"]) for row in csv.DictReader(lines[head:]) if row["Instances"])


@pytest.mark.parametrize("worker", ["", "exec"])
def test_cuda_gdb_sees_the_kernel_of_a_running_rank(worker: str, tmp_path: Path) -> None:
    gdb = need_tool("cuda-gdb")
    with spinning(tmp_path / "plain", "plain.py", variables={}) as pid:
        expected = shown(gdb, pid)
    if "spin" not in expected:
        pytest.skip(
            "needs a cuda-gdb that sees kernels of plain Python, and it said:"
            f" {last_line(expected)}"
        )
    srunddp = (str(ROOT / "bin" / "srunddp"), "--quiet", "plain.py")
    with spinning(
        tmp_path / "ours", *srunddp, variables={"SRUNDDP_WORKER": worker} if worker else {}
    ) as pid:
        assert "spin" in shown(gdb, pid)


def test_cuda_gdb_follows_srunddp_into_a_worker_by_exec(tmp_path: Path) -> None:
    gdb = need_tool("cuda-gdb")
    orders = (
        "set follow-fork-mode child",
        "set startup-with-shell off",
        "run",
        "info inferiors",
        "backtrace 30",
    )
    before = (gdb, "-batch", *(word for order in orders for word in ("-ex", order)), "--args")
    expected = plain(tmp_path, ABORTING, *before)
    if "SIGABRT" not in expected.stdout:
        pytest.skip(
            f"needs a cuda-gdb that runs plain Python, and it said: {last_line(expected.stderr)}"
        )
    found = alone(tmp_path, ABORTING, *before, SRUNDDP_WORKER="exec")
    assert "SIGABRT" in found.stdout, found.stdout + found.stderr


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


@contextmanager
def spinning(folder: Path, *command: str, variables: dict[str, str]) -> Iterator[int]:
    """Python with this command keeps the GPU busy; the process that does. It has ended in the
    end.
    """
    write(folder / "plain.py", SPINNING)
    environ = bare(variables_here(variables))
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environ, stdin=subprocess.DEVNULL
    ) as process:
        try:
            until((folder / "spins").exists)
            yield int((folder / "spins").read_text())
            (folder / "stop").touch()
            assert process.wait(timeout=LONG) == 0
        finally:
            process.kill()


def shown(gdb: str, pid: int) -> str:
    """What cuda-gdb says of a process's kernels; it lets go of the process in the end."""
    command = [gdb, "-batch", "-p", str(pid), "-ex", "info cuda kernels"]
    done = subprocess.run(
        command, env=bare(variables_here()), capture_output=True, text=True, timeout=LIMIT
    )
    return done.stdout + done.stderr
