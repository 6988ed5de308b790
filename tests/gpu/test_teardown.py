"""After a failure: what a rank has on a GPU is given back before srunddp ends, and a culprit may
finish its own end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.gpu.ranks import run, started, wait_for
from tests.gpu.requirements import need_tool
from tests.support.worlds import is_gone, named

HELD = 0.35  # of the GPU's memory, by each rank
PINNED = HOST = 8 << 30  # bytes
CORE_WITHIN = 60.0

HOLDS = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
world = srunddp.init()
if torch.cuda.is_available():
    whole = torch.cuda.get_device_properties(world.device).total_memory
    held = torch.ones(int(whole * {HELD}), dtype=torch.uint8, device=world.device)
    pinned = torch.ones({PINNED}, dtype=torch.uint8, pin_memory=True)
busy(1000)
say("holds")
wait_for("fail")
if RANK == 1:
    raise RuntimeError("out of ideas")
rest()
"""


def test_no_process_and_no_memory_is_left_on_the_gpu_at_the_end(tmp_path: Path) -> None:
    """Rank 0 does not heed SIGTERM and computes, so that it is killed with all that it holds."""
    need_tool("nvidia-smi")
    before = used_mib()
    with started(tmp_path, HOLDS, backend="gloo") as it:
        wait_for(it, "holds.0", "holds.1")
        workers = it.workers()
        (tmp_path / "fail").touch()
        done = it.wait()
        left = [pid for pid in workers if not is_gone(pid)]
        after = used_mib()
        computing = asked("compute-apps=pid")
    named(done, 1, 1, "RuntimeError: out of ideas")
    assert left == []
    assert not {str(pid) for pid in workers} & set(computing)
    assert after - before < 512, f"{before} MiB before, {after} MiB after"


def used_mib() -> int:
    """Of all GPUs together."""
    return sum(map(int, asked("gpu=memory.used")))


def asked(what: str) -> list[str]:
    command = [need_tool("nvidia-smi"), f"--query-{what}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


UPLOADS = """
world = srunddp.init()
total = ones(world, 1 << 20)

def upload():
    busy(1)
    synchronize()
    time.sleep(4)
    say("uploaded", total.sum().item())

if RANK == SIZE - 1:
    atexit.register(upload)
    raise RuntimeError("out of ideas")
rest()
"""


@pytest.mark.parametrize("size", [1, 2])
def test_who_fails_may_finish_what_it_does_at_exit(size: int, tmp_path: Path) -> None:
    done = run(tmp_path, UPLOADS, size=size, backend="gloo")
    assert done.codes == [1] * size, done.text
    assert (tmp_path / f"uploaded.{size - 1}").read_text() == str(float(1 << 20))


ABORTS = f"""
world = srunddp.init()
total = ones(world, 1 << 20)
if RANK == 1:
    if torch.cuda.is_available():
        held = torch.ones({HOST}, dtype=torch.uint8, pin_memory=True)
    busy(1000)
    say("aborts", time.time())
    os.abort()
rest()
"""


def test_a_crash_that_leaves_a_core_is_told_soon(tmp_path: Path) -> None:
    """The kernel writes the whole process to a file first, and only then is its end known."""
    unlimited = ["bash", "-c", 'ulimit -c unlimited; exec "$@"', "bash"]
    with started(tmp_path, ABORTS, backend="gloo", below={1: unlimited}) as it:
        done = it.wait()
        took = time.time() - float((tmp_path / "aborts.1").read_text())
    size = sum(core.stat().st_size for core in tmp_path.glob("core*"))
    for core in tmp_path.glob("core*"):
        core.unlink()
    named(done, 1, 128 + signal.SIGABRT, "killed by SIGABRT")
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    print(
        f"told and ended {took:.1f} s after the abort; core {size / 2**30:.1f} GiB, core_pattern"
        f" {pattern}"
    )
    assert took < CORE_WITHIN, f"{took:.0f} s, {os.cpu_count()} CPUs, core_pattern {pattern}"
