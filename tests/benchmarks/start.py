"""From srun's start to the first collective, and to its end

On the six-node cluster of the tests, whose nodes share this machine's cores, each way starts the
same program: it joins a Gloo group and makes one all-reduce. `exit` is the time from srun's start
until srun has ended, `collective` the time until the last rank has made the all-reduce, `CPU` the
CPU time of the whole machine until srun has ended.

- *bare srun* is `srun python` with rank 0's address in the script
- *import only* is `srun python` that imports torch and ends by `os._exit`: what no launcher can
  save
- *two steps* starts the next step as soon as the first has ended, in one allocation
- the others are started as their documentation says for Slurm, mpi4py and ezpz with Open MPI 4.1
  and Slurm's PMIx
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import psutil

from tests.benchmarks.benchmark import FAILED, Case, Limit, NotMeasuredError, Sample
from tests.benchmarks.runner import EZPZ, INTEROP
from tests.cluster.cluster import Cluster, Settings
from tests.conftest import PROGRAMS, ROOT
from tests.slurm.conftest import data_network, site_mpi

PROGRAM = str(PROGRAMS / "first_collective.py")
LIMIT = 150.0
BIN = ROOT / ".venv" / "bin"
PEERS_BIN = INTEROP / "bin"
# Of several networks Open MPI would mix two.
MPI = {"OMPI_MCA_btl_tcp_if_include": "10.88.0.0/16", **site_mpi()}
WORDS = dict.fromkeys(("srunddp", "torchrun", "ft_launcher"), "env") | {
    "bare srun": "bare",
    "import only": "import",
}
ACCELERATE_DEFAULTS = ("--mixed_precision=no", "--dynamo_backend=no")  # which it would print
AGENTS = ("torchrun", "ft_launcher", "accelerate")
PEERS = ("ft_launcher", "accelerate", "fabric", "lightning", "idr_torch", "mpi4py", "ezpz")
ONE_EACH = ("srunddp", "bare srun", "torchrun", "import only")
# Nodes, ranks of each, repeats.
SIZES = ((2, 1, ONE_EACH, 7), (6, 1, ONE_EACH, 7), (6, 8, ("srunddp", "torchrun"), 3))
LIMITS = (
    Limit("exit", "torchrun", 0.30),
    Limit("exit", "bare srun", 0.75),
    Limit("exit", "import only", 1.10),
)


@dataclass(frozen=True)
class Start:
    """A program on so many nodes, with so many ranks on each."""

    cluster: Cluster
    nodes: int
    each: int

    def measure(self, way: str, repeat: int, steps: int = 1) -> Sample:
        """Of one start, or of some steps one after the other in an allocation."""
        options = self._options(way)
        ports = range(20000 + 20 * repeat, 20000 + 20 * repeat + steps)
        commands = [["srun", *options, *self._command(way, str(port))] for port in ports]
        together = ["salloc", *options[:2], "sh", "-c", " && ".join(map(shlex.join, commands))]
        self.cluster.await_completing()
        cpu = machine_cpu()
        began = time.monotonic()
        try:
            command = together if steps > 1 else commands[0]
            done = self.cluster.run(*command, env=self._variables(way), timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired as error:
            self.cluster.cancel_all()
            raise NotMeasuredError(f"not over after {LIMIT:.0f} s") from error
        metrics = {"exit": time.monotonic() - began, "CPU": machine_cpu() - cpu}
        made = [
            json.loads(line)["at"]
            for line in done.stdout.splitlines()
            if line.startswith('{"rank"')
        ]
        if done.returncode or len(made) != self.nodes * self.each * steps * (way != "import only"):
            print(done.stdout[-500:], done.stderr[-3000:], file=sys.stderr)
            return dict.fromkeys(metrics, FAILED)
        return metrics | ({"collective": max(made) - began} if made and steps == 1 else {})

    def _options(self, way: str) -> list[str]:
        each = 1 if way in AGENTS else self.each
        mpi = "--mpi=pmix" if way in ("mpi4py", "ezpz") else "--mpi=none"
        # ezpz writes a file into the working folder.
        return [
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={each}",
            mpi,
            f"--chdir={self.cluster.shared}",
        ]

    def _variables(self, way: str) -> dict[str, str]:
        if way != "srunddp":
            own = {"PYTHONPATH": str(EZPZ), **MPI}
        else:
            own = {}
        return (
            activated(self.cluster)
            | own
            | ({"MASTER_ADDR": "node01"} if way in ("fabric", "lightning") else {})
        )

    def _command(self, way: str, port: str) -> list[str]:
        agent = [f"--nnodes={self.nodes}", f"--nproc-per-node={self.each}", "--rdzv-backend=c10d"]
        agent += [f"--rdzv-endpoint=node01:{port}", f"--rdzv-id={port}"]
        launch = [
            "sh",
            "-c",
            'exec "$0" launch --machine_rank=$SLURM_PROCID "$@"',
            str(BIN / "accelerate"),
        ]
        launch += [
            f"--num_machines={self.nodes}",
            f"--num_processes={self.nodes * self.each}",
            "--multi_gpu",
        ]
        launch += ["--main_process_ip=node01", f"--main_process_port={port}", *ACCELERATE_DEFAULTS]
        starters = {
            "srunddp": [str(ROOT / "bin" / "srunddp"), "--quiet"],
            "torchrun": [str(BIN / "torchrun"), *agent],
            "ft_launcher": [str(PEERS_BIN / "ft_launcher"), *agent],
            "accelerate": launch,
            "mpi4py": [str(BIN / "python"), "-m", "mpi4py"],
        }
        python = PEERS_BIN if way in ("fabric", "lightning", "idr_torch", "ezpz") else BIN
        return [*starters.get(way, [str(python / "python")]), PROGRAM, WORDS.get(way, way), port]


def activated(cluster: Cluster) -> dict[str, str]:
    """The variables as after `source .venv/bin/activate`, with the cluster's ifaces.conf."""
    variables = {
        "VIRTUAL_ENV": str(BIN.parent),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    return variables | {"SRUNDDP_IFACES": str(cluster.shared / "ifaces.conf")}


def machine_cpu() -> float:
    """Seconds of CPU that all processes of this machine have used."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def cases(quick: bool) -> Iterator[Case]:
    with Cluster(Settings(open_management=True)) as cluster:
        data_network(cluster)
        for nodes, each, ways, repeats in SIZES[: 1 if quick else None]:
            start = Start(cluster, nodes, each)
            name = f"{nodes} nodes, {each} {'rank' if each == 1 else 'ranks'} each"
            measures = {way: partial(start.measure, way) for way in ways}
            yield Case(name, measures, 1 if quick else repeats, LIMITS if each == 1 else ())
        if not quick:
            start = Start(cluster, 2, 1)
            peers = [way for way in ("srunddp", *PEERS) if way != "ezpz" or EZPZ.exists()]
            others = {way: partial(start.measure, way) for way in peers}
            yield Case("other ways, 2 nodes, 1 rank each", others, 3)
            two = {
                way: partial(start.measure, way, steps=2)
                for way in ("srunddp", "bare srun", "torchrun")
            }
            yield Case("two steps, 2 nodes, 1 rank each", two, 3)
