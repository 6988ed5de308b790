"""Record real runs of srunddp that fail in known ways, for ``tests/triage/test_own_runs.py``::

    python -m tests.triage.record_runs [NAME...]

needs a machine that can start the cluster of ``tests.cluster``. Each run is written to
``tests/triage/own/NAME``, with what is true of it in ``expected.yaml``.
"""

import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from tests.cluster.cluster import Cluster
from tests.slurm.conftest import SRUNDDP, data_network

OWN = Path(__file__).parent / "own"
PROGRAM = OWN / "failing.py"
KEPT = ("*.log", "*.json", "*.marks.csv", "slurm-*.out", "result")


@dataclass(frozen=True)
class Way:
    """A way to end.

    Attributes:
        name: The program's argument.
        cause: The id of the cause that triage has to name; None if the run ends well.
        rank: The rank at fault; None if there is none.
        restarts: Whether another failure comes first, on rank 0, after which all start anew.
        options: Options of ``srunddp run``.
    """

    name: str
    cause: str | None
    rank: int | None
    restarts: bool = False
    options: tuple[str, ...] = ()

    @property
    def node(self) -> str | None:
        """The node of the rank: two ranks run on each."""
        return None if self.rank is None else f"node0{self.rank // 2 + 1}"


WAYS = (
    Way("well", None, None),
    Way("exception", "script-error", 2),
    Way("mute-exception", "script-error", 1, restarts=True),
    Way("collective", "script-error", 3),
    Way("exit-code", "script-error", 1),
    Way("os-exit", "script-error", 3, restarts=True),
    Way("killed", "rank-killed", 2),
    Way("crash", "rank-killed", 1, restarts=True),
    Way("memory", "host-out-of-memory", 3),
    Way("no-module", "module-missing", 2),
    Way("no-file", "file-missing", 3, restarts=True),
    Way("disk-full", "disk-full", 1, restarts=True),
    Way("stalled", "rank-stalled", 2, restarts=True, options=("--stall-timeout=5s",)),
    Way("supervisor-killed", "rank-killed", 3),
    Way(
        "left-early",
        "collective-mismatch",
        2,
        restarts=True,
        options=("--stall-timeout=5s",),
    ),
)


def record(cluster: Cluster, way: Way, *, with_logs: bool) -> None:
    """Make one run, and write its files to ``tests/triage/own``."""
    name = f"{way.name}-{'logs' if with_logs else 'terminal'}"
    folder = cluster.shared / name
    folder.mkdir()
    shutil.copy(PROGRAM, folder / "train.py")
    options = list(way.options)
    if with_logs:
        options += ["--log-dir=logs", "--monitor=1s"]
    elif way.cause is None:
        options.append("--result=result")  # else nothing tells of a good end
    words = ["train.py", way.name, str(-1 if way.rank is None else way.rank)]
    if way.restarts:
        options.append("--restarts=1")
        words.append("--fails-before")
    layout = ("-N2", "--ntasks-per-node=2", "--nodelist=node01,node02", f"--chdir={folder}")
    done = cluster.run(
        "srun",
        *layout,
        f"--output={folder}/slurm-%j.out",
        SRUNDDP,
        "run",
        *options,
        *words,
        env={"SRUNDDP_IFACES": str(cluster.shared / "ifaces.conf"), "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    print(f"{name}: {done.returncode}", flush=True)
    (output,) = folder.glob("slurm-*.out")
    with output.open("a") as file:
        file.write(done.stderr)  # srun's own words, which a batch job's output has too
    keep(folder, OWN / name, cluster.shared)
    truth = {each: value for each, value in asdict(way).items() if each in ("cause", "rank")}
    truth["node"] = way.node
    text = yaml.safe_dump(truth, sort_keys=False)
    (OWN / name / "expected.yaml").write_text(text, encoding="utf-8")


def keep(folder: Path, to: Path, shared: Path) -> None:
    """Copy the files that triage reads, without the paths of this machine."""
    shutil.rmtree(to, ignore_errors=True)
    for path in sorted({path for each in KEPT for path in folder.rglob(each)}):
        target = to / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8", errors="replace")
        text = text.replace(str(folder), "/project").replace(str(shared), "/shared")
        text = re.sub(r"/\S+?(?=/lib/python3)", "/env", text)
        target.write_text(text, encoding="utf-8")


def main(names: list[str]) -> None:
    with Cluster() as cluster:
        data_network(cluster)
        for way in WAYS:
            if not names or way.name in names:
                record(cluster, way, with_logs=True)
                record(cluster, way, with_logs=False)


if __name__ == "__main__":
    main(sys.argv[1:])
