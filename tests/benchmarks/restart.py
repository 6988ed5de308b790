"""From SIGKILL of a rank to the first all-reduce of all ranks after the restart

Two ranks on this machine. torchrun and ft_launcher (of nvidia-resiliency-ext) have one agent for
each rank, the rendezvous of c10d, and a store of its own for each restart
(`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`), without which few of their restarts succeed. srunddp runs
under MPICH.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.benchmarks.benchmark import FAILED, Case, Limit, Sample
from tests.conftest import PROGRAMS, ROOT

SETTLED = 5.0
LIMIT = 60.0
SRUNDDP = (
    str(ROOT / ".venv-mpich/bin/mpirun"),
    "-n",
    "2",
    str(ROOT / "bin" / "srunddp"),
    "--quiet",
    "--restarts=1",
)
AGENT = (
    "--nnodes=2",
    "--nproc-per-node=1",
    "--max-restarts=1",
    "--rdzv-backend=c10d",
    "--local-addr=127.0.0.1",
)
WAYS = {
    "--restarts": SRUNDDP,
    "torchrun": (str(ROOT / ".venv/bin/torchrun"), *AGENT),
    "ft_launcher": (str(ROOT / ".venv-interop/bin/ft_launcher"), *AGENT),
}


def appear(folder: Path, pattern: str) -> list[Path]:
    """The two ranks' files of that name, when both are whole."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        found = list(folder.glob(pattern))
        if len(found) == 2 and all(path.read_text() for path in found):
            return found
        time.sleep(0.01)
    raise TimeoutError(pattern)


def measure(way: str, repeat: int) -> Sample:
    agents = "--nnodes=2" in WAYS[way]
    if agents:
        endpoint: tuple[str, ...] = (f"--rdzv-endpoint=127.0.0.1:{29400 + repeat}",)
    else:
        endpoint = ()
    environ = os.environ | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as null:
        folder = Path(name)
        words = [*WAYS[way], *endpoint, str(PROGRAMS / "killed.py"), name]
        launchers = [
            subprocess.Popen(words, env=environ, stdout=null, stderr=null)
            for _ in range(1 + agents)
        ]
        try:
            culprit = {path.name: int(path.read_text()) for path in appear(folder, "pid.*.0")}[
                "pid.1.0"
            ]
            time.sleep(SETTLED)
            began = time.time()
            os.kill(culprit, signal.SIGKILL)
            return {
                "wall": max(float(path.read_text()) for path in appear(folder, "reduced.*.1"))
                - began
            }
        except (TimeoutError, ProcessLookupError):  # it has begun anew already
            return {"wall": FAILED}
        finally:
            (folder / "over").write_text("")
            for launcher in launchers:
                launcher.send_signal(signal.SIGTERM)
            for launcher in launchers:
                launcher.wait()


def cases(quick: bool) -> Iterator[Case]:
    names = ("--restarts", "torchrun") if quick else tuple(WAYS)
    ways = {way: partial(measure, way) for way in names}
    limits = (Limit("wall", "torchrun", 0.5), Limit("wall", "ft_launcher", 0.5))
    yield Case("two ranks, --restarts", ways, 1 if quick else 5, limits)
