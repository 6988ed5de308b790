"""From srun's start to the first collective: srunddp against bare ``srun python`` with the same process group.

Two nodes of the test cluster, one rank each. The runs of both kinds alternate; the figure of a kind is its
minimum. Wall is that of the slowest rank, CPU the sum over ranks and, under srunddp, their supervisors.

    python -m tests.benchmarks.start [RUNS [CHECKOUT]]   with another checkout of srunddp, as of an earlier version
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.cluster.nodes import NODES
from tests.conftest import PROGRAMS, ROOT

RUNS = 15
PROGRAM = str(PROGRAMS / "first_collective.py")


def measure(cluster: Cluster, words: list[str], ifaces: str) -> tuple[float, float]:
    # As after `source .venv/bin/activate`.
    variables = {
        "VIRTUAL_ENV": str(ROOT / ".venv"),
        "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
        "STARTED": str(time.monotonic()),
        "SRUNDDP_IFACES": ifaces,
        "GLOO_SOCKET_IFNAME": NODES[0].data_interface,
        "OMP_NUM_THREADS": "1",
    }
    done = cluster.run("srun", "-N2", "-n2", "--nodelist=node[01-02]", *words, env=variables)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 2, done.stdout + done.stderr
    return max(report["wall"] for report in reports), sum(report["cpu"] for report in reports)


def main() -> None:
    runs = int(sys.argv[1]) if sys.argv[1:] else RUNS
    # Both kinds load compiled modules, as an installed package does.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    launchers = {"srunddp": ROOT} | ({"other": Path(sys.argv[2]).resolve()} if sys.argv[2:] else {})
    figures: dict[str, list[tuple[float, float]]] = {"bare": [], **{kind: [] for kind in launchers}}
    with Cluster() as cluster:
        ifaces = cluster.shared / "ifaces.conf"
        ifaces.write_text('- nodes: node[01-02]\n  interface: ens1f1\n  address: "{node}-data"\n')
        for run in range(runs):
            python = str(ROOT / ".venv" / "bin" / "python")
            kinds = {
                "bare": [python, PROGRAM, "bare", NODES[0].data, str(29500 + run)],
            } | {kind: [str(root / "bin" / "srunddp"), "--quiet", PROGRAM] for kind, root in launchers.items()}
            for kind in sorted(kinds, reverse=bool(run % 2)):
                figures[kind].append(measure(cluster, kinds[kind], str(ifaces)))
    for index, name in enumerate(("wall", "CPU")):
        best = {kind: min(figure[index] for figure in taken) for kind, taken in figures.items()}
        middle = {kind: statistics.median(figure[index] for figure in taken) for kind, taken in figures.items()}
        print(f"{name}, {runs} runs each: " + ", ".join(f"{kind} {best[kind]:.2f} s" for kind in figures))
        for other in [kind for kind in figures if kind != "srunddp"]:
            ratios = best["srunddp"] / best[other], middle["srunddp"] / middle[other]
            print(f"  srunddp to {other}: {ratios[0]:.3f}, of medians {ratios[1]:.3f}")


if __name__ == "__main__":
    main()
