"""From SIGKILL of a rank to the first all-reduce of all ranks after the restart: srunddp against torchrun.

Two ranks: of torchrun one agent each, with its c10d rendezvous, and a store of its own for each restart, without which
few of its restarts succeed; srunddp under MPICH's mpirun, without and with ``--warm-restarts``. The ways alternate.

    python -m tests.benchmarks.restart [RUNS]
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import PROGRAMS, ROOT

SETTLED, LIMIT = 5.0, 60.0
SRUNDDP = (str(ROOT / ".venv-mpich/bin/mpirun"), "-n", "2", str(ROOT / "bin" / "srunddp"), "--quiet", "--restarts=1")
WAYS = {
    "torchrun": (str(ROOT / ".venv/bin/torchrun"), "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"),
    "--restarts": SRUNDDP,
    "--warm-restarts": (*SRUNDDP, "--warm-restarts"),
}


def command(way: str, port: int) -> list[str]:
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1")
    return [*WAYS[way], *(rendezvous if way == "torchrun" else ())]


def appear(folder: Path, pattern: str) -> list[Path]:
    """The two ranks' files of that name, when both are whole."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        found = list(folder.glob(pattern))
        if len(found) == 2 and all(path.read_text() for path in found):
            return found
        time.sleep(0.01)
    raise TimeoutError(pattern)


def measure(way: str, port: int) -> float:
    """Seconds; infinite where the ranks did not come back."""
    environ = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as null:
        folder = Path(name)
        words = [*command(way, port), str(PROGRAMS / "killed.py"), name]
        launchers = [
            subprocess.Popen(words, env=environ, stdout=null, stderr=null) for _ in range(2 if way == "torchrun" else 1)
        ]
        try:
            appear(folder, "pid.*.0")
            time.sleep(SETTLED)
            began = time.time()
            os.kill(int((folder / "pid.1.0").read_text()), signal.SIGKILL)
            return max(float(path.read_text()) for path in appear(folder, "reduced.*.1")) - began
        except TimeoutError:
            return float("inf")
        finally:
            (folder / "over").write_text("")
            for launcher in launchers:
                launcher.send_signal(signal.SIGTERM)
            for launcher in launchers:
                launcher.wait()


def main() -> None:
    runs = int(sys.argv[1]) if sys.argv[1:] else 5
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for run in range(runs):
        for way in sorted(WAYS, reverse=bool(run % 2)):
            taken[way].append(measure(way, 29400 + run))
    base = statistics.median(taken["torchrun"])
    for way, seconds in taken.items():
        each = ", ".join(f"{one:.2f}" for one in seconds)
        median = statistics.median(seconds)
        print(f"{way}: {each}; median {median:.3f} s, {median / base:.3f} of torchrun's")


if __name__ == "__main__":
    main()
