"""Plans drawn at random, each repeated by its seed, and campaigns of many of them.

    python -m tests.chaos.trials --seed N                  one trial, with all that it said
    python -m tests.chaos.trials --count 200 [--first N]   a campaign, and its table

Ends with 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.chaos.plan import PHASES, SUDDEN, WORLD_SIZE, Fault, Plan
from tests.chaos.run import Result, Site, carry_out, wrong
from tests.cluster.cluster import Cluster
from tests.mpirun.conftest import MPIS
from tests.slurm.conftest import data_network, site_mpi

# Within which nothing may be left; a rank that stands still is given 10 s to go on.
LIMITS = dict.fromkeys(SUDDEN, 2.0) | {"stop": 13.0}
_BY_SRUN = ("none", "pmi2", "pmix")
_WITH_TORCH = 0.1
_MONITORED = ("--monitor=0.2", "--monitor-dir={folder}/monitor")


@dataclass(frozen=True)
class Sites:
    """The test cluster for srun, this machine for mpirun."""

    cluster: Site
    here: Site

    def of(self, plan: Plan) -> Site:
        return self.cluster if plan.by_srun else self.here


def sites(cluster: Cluster, folder: Path) -> Sites:
    return Sites(
        Site(cluster.shared, cluster, data_network(cluster), tuple(site_mpi().items())),
        Site(folder),
    )


def random_plan(seed: int, launchers: Iterable[str] | None = None) -> Plan:
    """The plan of this seed: always the same one for the same launchers; None for all that are
    there.
    """
    draw = random.Random(seed)
    chosen = draw.choice(sorted(launchers or _there()))
    torch = draw.random() < _WITH_TORCH
    fault = Fault(
        rank=draw.randrange(WORLD_SIZE),
        kind=draw.choice(sorted(LIMITS)),
        phase=draw.choice(PHASES),
        delay=round(draw.uniform(0, 1), 3),
    )
    return Plan(
        faults=(fault,),
        launcher=chosen,
        kill=draw.random() < 0.5,
        per_node=draw.choice((1, 2)),
        torch=torch,
        peers=draw.choice(("raise", "block")),
        stubborn=draw.random() < 0.25,
        children=draw.random() < 0.25,
        options=_MONITORED if draw.random() < 0.5 else (),
    )


def try_one(seed: int, where: Sites) -> tuple[dict[str, Any], Result]:
    """Carry out the plan of this seed: a record for the table, and the result."""
    plan = random_plan(seed)
    kind = plan.faults[0].kind
    result = carry_out(plan, where.of(plan))
    figures = {"gone": result.gone, "back": result.back, "code": result.code}
    broken = wrong(plan, result, LIMITS[kind])
    return {"seed": seed, "kind": kind, **figures, "wrong": broken, "plan": asdict(plan)}, result


def _there() -> list[str]:
    return [*_BY_SRUN, *(name for name, mpi in MPIS.items() if os.path.exists(mpi.mpirun))]


def table(records: Sequence[dict[str, Any]]) -> str:
    """One row for each kind of failure, and one for all, in Markdown."""
    kinds = sorted({record["kind"] for record in records})
    rows = [_row(kind, [record for record in records if record["kind"] == kind]) for kind in kinds]
    head = (
        "| failure | trials | right | gone p50 | p95 | max | launcher back p50 | p95 | max |\n"
        + "|---" * 9
        + "|"
    )
    return "\n".join([head, *rows, _row("all", records)])


def _row(name: str, records: Sequence[dict[str, Any]]) -> str:
    cells = [name, str(len(records)), str(sum(not record["wrong"] for record in records))]
    for what in ("gone", "back"):
        # What never ended counts as the longest.
        known = [float("inf") if record[what] is None else record[what] for record in records]
        cells += [f"{quantile(known, part):.2f} s" for part in (0.5, 0.95, 1.0)]
    return f"| {' | '.join(cells)} |"


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that this part of them does not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.trials", description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    first = given.first if given.seed is None else given.seed
    records = []
    with tempfile.TemporaryDirectory(prefix="srunddp-chaos-") as folder, Cluster() as cluster:
        for seed in range(first, first + given.count):
            record, result = try_one(seed, sites(cluster, Path(folder)))
            records.append(record)
            if record["wrong"]:
                said = json.dumps(record)
            else:
                said = f"seed {seed} {record['kind']} {record['gone']} s"
            print(said if given.seed is None else f"{said}\n{result.describe()}", flush=True)
    print(table(records))
    return int(any(record["wrong"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
