"""Networks beside the GPUs': an Ethernet that goes away for a while, several rails, and NCCL's own
transports.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.rails import ifaces, switch, two_nodes, within
from tests.gpu.ranks import PREAMBLE, plain, run, started, wait_for
from tests.gpu.requirements import need_gpus, need_infiniband, need_nccl_ranks, need_slurm_gpus
from tests.gpu.site import STARTS_WITHIN, command
from tests.support.starting import write
from tests.support.worlds import TOGETHER, Ended

PORT = 29617
AWAY = 15.0  # seconds
INFO = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH"}
SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
}

TRAINS = """
world = srunddp.init()
total, steps = ones(world), 0
stop = torch.zeros(1, device=world.device)
while not stop.item():
    stop.fill_(float(Path("stop").exists() and RANK == 0))
    dist.all_reduce(total)
    dist.all_reduce(stop)
    synchronize()
    total.fill_(1.0)
    steps += 1
    if steps == 20:
        say("trains")
    time.sleep(0.01)
print(steps > 20)
world.close()
"""


@pytest.mark.parametrize("over", ["the bus", "InfiniBand"])
def test_15_s_without_the_lines_network_end_nothing(over: str, tmp_path: Path) -> None:
    """The ranks train by NCCL without it; the line's default for a lost connection is 60 s."""
    done = flap(over, tmp_path)
    assert (done.codes, done.printed) == ([0, 0], ["True\n"] * 2)


def test_a_network_away_for_longer_than_lost_after_ends_the_run(tmp_path: Path) -> None:
    assert flap("the bus", tmp_path, "--lost-after", "5").codes == [69, 69]


def flap(over: str, folder: Path, *options: str) -> Ended:
    """Take the only network of two nodes away amid a training; how it ended."""
    variables = need_nccl_ranks(2)
    if over == "InfiniBand":
        need_gpus(2)
        need_infiniband()
        variables = variables | {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "IB"}
    with two_nodes(1) as names:
        below = within(names, 1, PORT, variables)
        conf = str(ifaces(folder, "r0"))
        with started(folder, TRAINS, "--ifaces", conf, *options, below=below) as it:
            wait_for(it, "trains.0", "trains.1")
            for name in names.values():
                switch(name, 0, "down")
            time.sleep(AWAY)
            for name in names.values():
                switch(name, 0, "up")
            (folder / "stop").touch()
            done = it.wait()
    print(done.text)
    return done


def test_ranks_meet_and_train_over_rails_with_strict_filtering(tmp_path: Path) -> None:
    """Each rail a subnet; a packet with one rail's source on another is dropped."""
    over_two_rails(tmp_path, "[r0, r1]", need_nccl_ranks(4) | SOCKETS, size=4, strict=True)


@pytest.mark.parametrize(("exported", "used"), [("=r0,r1", ["r0", "r1"]), ("", ["r0"])])
def test_nccls_sockets_use_what_the_user_exported_or_one(
    exported: str, used: list[str], tmp_path: Path
) -> None:
    """The interface that srunddp exports limits NCCL to one; several names of the user's own
    stay.
    """
    variables = need_nccl_ranks(2) | SOCKETS | INFO
    if exported:
        variables |= {"NCCL_SOCKET_IFNAME": exported, "GLOO_SOCKET_IFNAME": "r0"}
    done = over_two_rails(tmp_path, "r0", variables)
    lines = re.findall(r"NET/Socket : Using (.*)", "".join(done.printed) + done.text)
    assert lines, "NCCL did not say which interfaces it uses"
    assert [re.findall(r"\]([\w.]+):", line) for line in lines] == [used] * len(lines)


def over_two_rails(
    folder: Path, interface: str, variables: dict[str, str], *, size: int = 2, strict: bool = False
) -> Ended:
    """A training of a few steps on two nodes, with this interface in ifaces.conf."""
    (folder / "stop").touch()
    with two_nodes(2, strict=strict) as names:
        below = within(names, size // 2, PORT, variables)
        conf = str(ifaces(folder, interface))
        done = run(
            folder, TRAINS.replace("steps > 20", "True"), "--ifaces", conf, size=size, below=below
        )
    assert done.codes == [0] * size, done.text
    return done


@pytest.mark.gpu(0)
def test_a_site_with_several_rails_trains_over_all_of_them(shared_folder: Path) -> None:
    rails = need_infiniband(2)
    need_slurm_gpus(2)
    write(shared_folder / "train.py", TOGETHER + PREAMBLE + TRAINS.replace("steps > 20", "True"))
    (shared_folder / "stop").touch()
    conf = ifaces(shared_folder, f"[{', '.join(rails)}]")
    words = command("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--gpu-bind=none")
    words[-1:] = ["--ifaces", str(conf), words[-1]]
    done = subprocess.run(
        words, cwd=shared_folder, capture_output=True, text=True, timeout=STARTS_WITHIN
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True") == 4


BANDWIDTH = """
import os, time
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
values = torch.ones(64 << 20, device="cuda")
for step in range(25):
    if step == 5:
        torch.cuda.synchronize()
        began = time.perf_counter()
    dist.all_reduce(values)
torch.cuda.synchronize()
seconds = (time.perf_counter() - began) / 20
size = dist.get_world_size()
dist.destroy_process_group()
print("busbw", values.nbytes / seconds * 2 * (size - 1) / size / 1e9, flush=True)
"""


TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "--no-python",
)


def test_nccl_goes_the_same_ways_as_fast_as_without_srunddp(tmp_path: Path) -> None:
    """NVLink, NVLS and all: srunddp touches none of it."""
    need_gpus(2)
    done = run(tmp_path, BANDWIDTH, variables=INFO, limit=120)
    other = plain(tmp_path, BANDWIDTH, *TORCHRUN, **INFO)
    assert (done.codes, other.returncode) == ([0, 0], 0), done.text + other.stderr
    ours = "".join(done.printed) + done.text
    theirs = other.stdout + other.stderr
    assert ways(ours) == ways(theirs) != set()
    figures = busbw(ours), busbw(theirs)
    print(f"busbw {figures[0]:.1f} GB/s below srunddp, {figures[1]:.1f} GB/s without")
    assert figures[0] > 0.9 * figures[1]


def ways(text: str) -> set[str]:
    """How NCCL's ranks reach each other, and whether there is NVLS."""
    found = re.findall(r"via (\S+)|(NVLS multicast support is (?:not )?available)", text)
    return {way or nvls for way, nvls in found}


def busbw(text: str) -> float:
    return min(map(float, re.findall(r"busbw (\S+)", text)))
