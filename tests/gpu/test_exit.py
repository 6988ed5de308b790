"""How ranks on GPUs end: with groups or work left, by a teardown that never returns, and by NCCL's
watchdog.
"""

from __future__ import annotations

import pickle
import re
import time
from pathlib import Path

import pytest

from tests.gpu.ranks import run
from tests.gpu.requirements import need_nccl_ranks
from tests.support.starting import NODE

BEGIN = """
world = srunddp.init()
total = ones(world, 1 << 24)
for _ in range(3):
    dist.all_reduce(total)
synchronize()
"""
ENDS = {
    "nobody destroyed the group": "",
    "one rank is early": "if RANK != SIZE - 1:\n    time.sleep(5)\n",
    "work is under way": "work = dist.all_reduce(total, async_op=True)\n",
    "its gpu computes": "busy(5)\n",
    "all destroyed it": "world.close()\n",
}
# What threads of NCCL's process group say where rank 0's store has gone before them, and C++ where
# a thread fails.
TROUBLE = re.compile(
    r"should dump|TCPStore|Broken pipe|Connection reset|terminate called|Traceback|Fatal Python"
)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("end", ENDS)
def test_a_script_that_ends_so_ends_with_zero_and_no_word(
    end: str, size: int, tmp_path: Path
) -> None:
    variables = need_nccl_ranks(size)
    done = run(tmp_path, BEGIN + ENDS[end], size=size, variables=variables, limit=120)
    assert done.codes == [0] * size, done.text
    assert not TROUBLE.findall(done.text), done.text


NEVER_ENDS = """
world = srunddp.init()
world.close()

def wait_for_the_gpu():
    synchronize()
    time.sleep(1000)

if RANK == 1:
    busy(1000)
    atexit.register(wait_for_the_gpu)
print("through")
"""


def test_a_rank_that_is_over_and_does_not_end_is_named_and_ended(tmp_path: Path) -> None:
    """After 60 s, and --grace more."""
    started = time.monotonic()
    done = run(tmp_path, NEVER_ENDS, "--grace", "5", backend="gloo", limit=150)
    assert time.monotonic() - started > 60
    assert f"rank 1 on {NODE}" in done.text, done.text
    assert "wait_for_the_gpu" in done.text, done.text


HANGS = """
world = srunddp.init(timeout=datetime.timedelta(seconds=20))
total = ones(world)
dist.all_reduce(total)
synchronize()

def load_batch():
    time.sleep(1000)

if RANK == 1:
    load_batch()
dist.all_reduce(total)
synchronize()
rest()
"""


def test_who_hangs_is_named_when_nccls_watchdog_strikes(tmp_path: Path) -> None:
    """And the flight recorders of those who waited are written to their ends."""
    recorder = str(tmp_path / "recorder_")
    variables = need_nccl_ranks(2) | {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": recorder,  # the older name; newer builds read both
    }
    done = run(tmp_path, HANGS, variables=variables)
    first = re.search(r"^srunddp: (rank.*)$", done.text, re.MULTILINE)
    assert first, done.text
    assert first[1].startswith(f"rank 1 on {NODE} "), done.text
    assert "load_batch" in done.text, done.text
    assert 0 not in done.codes
    assert len(set(done.codes)) == 1, done.codes
    written = sorted(tmp_path.glob("recorder_*"))
    assert Path(f"{recorder}0") in written, done.text
    for file in written:
        assert pickle.loads(file.read_bytes())["entries"], file
