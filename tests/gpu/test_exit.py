"""The end of a script on GPUs: groups that nobody destroyed, work under way, and a teardown that never returns."""

from __future__ import annotations

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
# What threads of NCCL's process group say where rank 0's store has gone before them, and C++ where a thread fails.
TROUBLE = re.compile(r"should dump|TCPStore|Broken pipe|Connection reset|terminate called|Traceback|Fatal Python")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("end", ENDS)
def test_a_script_that_ends_so_ends_with_zero_and_no_word(end: str, size: int, tmp_path: Path) -> None:
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
