"""Six nodes on which a rank is killed every minute

A loop that saves itself each 50 steps of 0.2 s, for about ten minutes; every 60 s the worker of a
rank that is drawn at random gets SIGKILL. `lost` is the time that made no step that counts, over
all time. torchrun and ft_launcher have a store of its own for each restart. The weights at the end
must be those of a run in which nothing was killed.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.benchmark import FAILED, Case, Sample
from tests.cluster.cluster import Cluster
from tests.cluster.nodes import NODES
from tests.conftest import PROGRAMS, ROOT
from tests.slurm.conftest import data_network

RANKS = 6
PACE = 0.2
EVERY = 60.0
MOST = 100
STEPS = 2500
SRUNDDP = (str(ROOT / "bin" / "srunddp"), "--quiet", f"--restarts={MOST}")
AGENT = (
    f"--max-restarts={MOST}",
    f"--nnodes={RANKS}",
    "--nproc-per-node=1",
    "--rdzv-backend=c10d",
    f"--rdzv-endpoint={NODES[0].name}-data:29500",
)
WAYS = {
    "--restarts": SRUNDDP,
    "torchrun": (),
    "ft_launcher": (),
}
# The interface of the data network, which has another name on one node; srunddp knows it from
# ifaces.conf.
HOST = """
name='s/^[0-9]*: \\([^ ]*\\) *inet 10\\.88\\..*/\\1/p'
export GLOO_SOCKET_IFNAME=$(ip -o -4 addr | sed -n "$name")
# It does not find out itself by this network's names.
[ $SLURM_PROCID = 0 ] && is_host=true || is_host=false
exec "$0" --local-addr=$SLURMD_NODENAME-data --rdzv-conf=is_host=$is_host "$@"
"""


def command(way: str) -> list[str]:
    if WAYS[way]:
        return [*WAYS[way]]
    folder = ".venv" if way == "torchrun" else ".venv-interop"
    return ["sh", "-c", HOST, str(ROOT / folder / "bin" / way), *AGENT]


def start(cluster: Cluster, way: str, folder: Path, steps: int, pace: float) -> Any:
    folder.mkdir()
    environ = {
        "SRUNDDP_IFACES": str(data_network(cluster)),
        "VIRTUAL_ENV": str(ROOT / ".venv"),
        "PYTHONPATH": str(ROOT),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
    }
    words = [*command(way), str(PROGRAMS / "kept_steps.py"), str(folder), str(steps), str(pace)]
    errors = (folder / "errors").open("w")
    return cluster.popen(
        "srun", "-N6", "-n6", *words, env=environ, stdout=subprocess.DEVNULL, stderr=errors
    )


def kill_one(folder: Path, draw: random.Random) -> None:
    rank = draw.randrange(RANKS)
    try:
        os.kill(int((folder / f"pid.{rank}").read_text()), signal.SIGKILL)
    except (OSError, ValueError) as error:
        print(f"{folder}: not killed: {error}", flush=True)


def measure(cluster: Cluster, steps: int, way: str, repeat: int) -> Sample:
    draw = random.Random(repeat)
    kills = 0
    folder = cluster.shared / f"{way.strip('-')}-{repeat}"
    process = start(cluster, way, folder, steps, PACE)
    began = time.monotonic()
    due = began + EVERY / 2
    limit = began + 2.0 * steps * PACE + 120.0
    while process.poll() is None and time.monotonic() < limit:
        time.sleep(0.1)
        if time.monotonic() >= due:
            due = due + EVERY
            kills = kills + 1
            kill_one(folder, draw)
    took = time.monotonic() - began
    code = process.poll()
    cluster.cancel_all()
    made = [line.split() for line in (folder / "steps").read_text().splitlines()]
    kept = len({step for step, _, _ in made})
    seconds = statistics.median(float(each) for _, each, _ in made)
    print(
        f"{way}: exit code {code}, {kept} of {steps} steps, {kills} kills, {weights(folder)}",
        file=sys.stderr,
    )
    if code != 0 or weights(folder) != weights(cluster.shared / "whole"):
        return {"lost": FAILED, "wall": FAILED}
    return {"lost": 1 - kept * seconds / took, "wall": took}


def weights(folder: Path) -> str:
    found = {path.read_text()[:12] for path in folder.glob("weights.*")}
    return " ".join(sorted(found)) or "none"


def cases(quick: bool) -> Iterator[Case]:
    steps = 300 if quick else STEPS
    with Cluster() as cluster:
        start(cluster, "--restarts", cluster.shared / "whole", steps, 0.0).wait()
        ways = {way: partial(measure, cluster, steps, way) for way in WAYS}
        yield Case("six ranks, --restarts", ways, 1, unit="of all time; s")
