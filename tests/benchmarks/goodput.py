"""Six nodes on which a worker is killed every minute: the time of the steps that count, over all time.

srunddp without and with ``--warm-restarts``, and torchrun with a store of its own for each restart, at the same time,
each on a cluster of its own; in turn every 20 s a worker of one of them is killed. The weights at the end are compared
with those of a run in which nothing was killed.

    python -m tests.benchmarks.goodput [MINUTES [FT_LAUNCHER]]   with the path of NVIDIA's ft_launcher
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.nodes import NODES
from tests.conftest import PROGRAMS, ROOT
from tests.slurm.conftest import data_network

RANKS, PACE, EVERY, MOST = 6, 0.2, 60.0, 100
SRUNDDP = (str(ROOT / "bin" / "srunddp"), "--quiet", f"--restarts={MOST}")
AGENT = (
    f"--max-restarts={MOST}",
    f"--nnodes={RANKS}",
    "--nproc-per-node=1",
    "--rdzv-backend=c10d",
    "--rdzv-id=goodput",
)
# The interface of the data network, which has another name on one node; srunddp knows it from ifaces.conf.
HOST = """export GLOO_SOCKET_IFNAME=$(ip -o -4 addr | sed -n 's/^[0-9]*: \\([^ ]*\\) *inet 10\\.88\\..*/\\1/p')
[ $SLURM_PROCID = 0 ] && is_host=true || is_host=false  # which it does not find out itself by this network's names
exec "$0" --local-addr=$SLURMD_NODENAME-data --rdzv-conf=is_host=$is_host "$@"
"""


def command(way: str, ft_launcher: str) -> list[str]:
    if way.startswith("srunddp"):
        return [*SRUNDDP, *(("--warm-restarts",) if "warm" in way else ())]
    program = str(ROOT / ".venv/bin/torchrun") if way == "torchrun" else ft_launcher
    return ["sh", "-c", HOST, program, *AGENT, f"--rdzv-endpoint={NODES[0].name}-data:29500"]


def start(cluster: Cluster, way: str, folder: Path, steps: int, pace: float, ft_launcher: str = "") -> Any:
    folder.mkdir()
    environ = {
        "SRUNDDP_IFACES": str(data_network(cluster)),
        "VIRTUAL_ENV": str(ROOT / ".venv"),
        "PYTHONPATH": str(ROOT),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
    }
    words = [*command(way, ft_launcher), str(PROGRAMS / "kept_steps.py"), str(folder), str(steps), str(pace)]
    errors = (folder / "errors").open("w")
    return cluster.popen("srun", "-N6", "-n6", *words, env=environ, stdout=subprocess.DEVNULL, stderr=errors)


def kill_one(folder: Path, draw: random.Random) -> None:
    rank = draw.randrange(RANKS)
    try:
        os.kill(int((folder / f"pid.{rank}").read_text()), signal.SIGKILL)
    except (OSError, ValueError) as error:
        print(f"{folder}: not killed: {error}", flush=True)


def measure(way: str, steps: int, offset: float, ft_launcher: str) -> None:
    draw, kills = random.Random(way), 0
    with Cluster() as cluster:
        whole, folder = cluster.shared / "whole", cluster.shared / "killed"
        if way == "srunddp":
            start(cluster, way, whole, steps, 0.0).wait()
        process = start(cluster, way, folder, steps, PACE, ft_launcher)
        began = time.monotonic()
        due, limit = began + offset + EVERY / 2, began + 2.0 * steps * PACE + 120.0
        while process.poll() is None and time.monotonic() < limit:
            time.sleep(0.1)
            if time.monotonic() >= due:
                due, kills = due + EVERY, kills + 1
                kill_one(folder, draw)
        took, code = time.monotonic() - began, process.poll()
        if code is None:
            cluster.cancel_all()
        if code != 0:
            print(way, (folder / "errors").read_text()[-3000:], flush=True)
        made = [line.split() for line in (folder / "steps").read_text().splitlines()]
        kept, seconds = len({step for step, _, _ in made}), statistics.median(float(each) for _, each, _ in made)
        print(
            f"{way}: exit code {code}, {kept} of {steps} steps of {seconds:.3f} s, {len(made) - kept} made again, "
            f"{kills} kills, {took:.0f} s, goodput {kept * seconds / took:.3f}, weights {weights(folder)}"
            + (f", and {weights(whole)} where nothing was killed" if whole.exists() else ""),
            flush=True,
        )


def weights(folder: Path) -> str:
    found = {path.read_text()[:12] for path in folder.glob("weights.*")}
    return " ".join(sorted(found)) or "none"


def main() -> None:
    minutes = float(sys.argv[1]) if sys.argv[1:] else 20.0
    ft_launcher = sys.argv[2] if sys.argv[2:] else ""
    ways = ["srunddp", "srunddp warm", "torchrun", *(["ft_launcher"] if ft_launcher else [])]
    if sys.argv[3:]:
        place = int(sys.argv[3])
        measure(ways[place], int(minutes * 60 / (PACE + 0.01) * 0.85), EVERY / len(ways) * place, ft_launcher)
        return
    number = int(os.environ.get("SRUNDDP_TEST_CLUSTER", "20"))
    command = [sys.executable, "-m", "tests.benchmarks.goodput", str(minutes), ft_launcher]
    started = [
        subprocess.Popen([*command, str(place)], env=os.environ | {"SRUNDDP_TEST_CLUSTER": str(number + place)})
        for place in range(len(ways))
    ]
    for each in started:
        each.wait()


if __name__ == "__main__":
    main()
