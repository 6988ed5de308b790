"""A restart within the job: the GPU of a rank that was killed is free again, and a warm worker can
use it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.ranks import run
from tests.gpu.requirements import need_nccl_ranks

SCRIPT = """
world = srunddp.init()
free, all_of_it = torch.cuda.mem_get_info() if torch.cuda.is_available() else (1, 1)
assert free > 0.5 * all_of_it, (free, all_of_it)
held = torch.empty(int(0.3 * free), dtype=torch.uint8, device=world.device)
total = ones(world)
dist.all_reduce(total)
assert total.tolist() == [float(SIZE)] * 4
srunddp.heartbeat()
time.sleep(8)
if srunddp.restart_count() < 2:
    if RANK == SIZE - 1:
        os.kill(os.getpid(), 9)
    time.sleep(100)
"""


@pytest.mark.parametrize("size", [1, 2])
def test_the_next_worker_has_the_gpu_of_the_last(size: int, tmp_path: Path) -> None:
    done = run(
        tmp_path,
        SCRIPT,
        "--restarts=2",
        size=size,
        variables=need_nccl_ranks(size),
        limit=240,
    )
    assert done.codes == [0] * size, done.text
