"""From srun's start until each rank knows rank 0's address

Without torch. *srunddp* has met all ranks by then, and watches them. *idr_torch* derives the
address from the variables of Slurm, and meets nobody: whether rank 0 is there, and whether its port
is free, turns out later. *mpi4py* broadcasts the address over Open MPI 4.1 and Slurm's PMIx.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from functools import partial

from tests.benchmarks.benchmark import FAILED, Case, Sample
from tests.benchmarks.start import MPI, activated
from tests.cluster.cluster import Cluster, Settings
from tests.conftest import PROGRAMS, ROOT
from tests.slurm.conftest import data_network

PROGRAM = str(PROGRAMS / "address.py")
COMMANDS = {
    "srunddp": ("--mpi=none", str(ROOT / "bin" / "srunddp"), "--quiet", PROGRAM, "env"),
    "idr_torch": ("--mpi=none", str(ROOT / ".venv-interop/bin/python"), PROGRAM, "idr_torch"),
    "mpi4py": ("--mpi=pmix", str(ROOT / ".venv/bin/python"), "-m", "mpi4py", PROGRAM, "mpi4py"),
}


def measure(cluster: Cluster, nodes: int, each: int, way: str, _: int) -> Sample:
    cluster.await_completing()
    began = time.monotonic()
    size = (f"--nodes={nodes}", f"--ntasks-per-node={each}")
    try:
        done = cluster.run("srun", *size, *COMMANDS[way], env=activated(cluster) | MPI, check=False)
    except subprocess.TimeoutExpired:
        # As where Open MPI crashes on one node, and waits on the others.
        cluster.cancel_all()
        return {"wall": FAILED}
    known = [
        json.loads(line)["at"] for line in done.stdout.splitlines() if line.startswith('{"at"')
    ]
    return {"wall": max(known) - began if len(known) == nodes * each else FAILED}


def cases(quick: bool) -> Iterator[Case]:
    with Cluster(Settings(open_management=True)) as cluster:
        data_network(cluster)
        for nodes, each, repeats in [(2, 1, 1)] if quick else [(2, 1, 7), (6, 2, 3)]:
            ways = {way: partial(measure, cluster, nodes, each, way) for way in COMMANDS}
            name = f"{nodes} nodes, {each} {'rank' if each == 1 else 'ranks'} each"
            yield Case(name, ways, repeats)
