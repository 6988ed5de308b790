"""Subgroups: the default group is bound to no device, so that ranks may make groups that not all
belong to.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import ranks
from tests.gpu.ranks import ran
from tests.gpu.requirements import need_nccl_ranks

BOUND = """
world = srunddp.init()
print(world.backend, dist.distributed_c10d._get_default_group().bound_device_id)
world.close()
"""
HANDED_OVER = """
world = srunddp.init(device_id=True)
total = ones(world)
dist.all_reduce(total)
print(dist.distributed_c10d._get_default_group().bound_device_id, total.sum().item())
world.close()
"""
ASKED_FOR = """
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=device)
total = torch.ones(4, device=device)
dist.all_reduce(total)
print(dist.distributed_c10d._get_default_group().bound_device_id, total.sum().item())
dist.destroy_process_group()
"""
GROUPS = """
world = srunddp.init(timeout=datetime.timedelta(seconds=60))
sums = []
for backend in (None, "gloo", None):
    for members in ([0], [1], [0, 1]):
        group = dist.new_group(members, backend=backend)
        if RANK in members:
            total = torch.ones(1, device="cpu" if backend else world.device)
            dist.all_reduce(total, group=group)
            sums.append(int(total.item()))
dist.barrier()
print(sums)
world.close()
"""


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_default_group_is_bound_to_no_device(backend: str, tmp_path: Path) -> None:
    chosen = ranks.BACKEND if backend == "nccl" else backend
    assert ran(tmp_path, BOUND, size=1, backend=chosen) == [f"{chosen} None\n"]


@pytest.mark.parametrize(
    "script", [HANDED_OVER, ASKED_FOR], ids=["by srunddp.init", "by init_process_group"]
)
def test_a_device_is_handed_over_where_the_script_says_so(script: str, tmp_path: Path) -> None:
    assert ran(tmp_path, script, size=1) == ["cuda:0 4.0\n"]


def test_ranks_on_gpus_make_subgroups_of_nccl_and_gloo(tmp_path: Path) -> None:
    """In a bound world those who are no members would wait for a split of the communicator."""
    variables = need_nccl_ranks(2)
    assert ran(tmp_path, GROUPS, variables=variables, limit=120) == ["[1, 2, 1, 2, 1, 2]\n"] * 2


def test_gloo_makes_subgroups_on_a_node_with_gpus(tmp_path: Path) -> None:
    script = GROUPS.replace("world.device)", '"cpu")')
    assert ran(tmp_path, script, backend="gloo", limit=120) == ["[1, 2, 1, 2, 1, 2]\n"] * 2
