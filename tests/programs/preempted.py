"""A loop of its own that can be preempted; its checkpoint is a text.

preempted.py FOLDER [STEPS]   goes on from FOLDER's newest checkpoint; without STEPS never ends at
first, and soon then
"""

import os
import sys
import time
from pathlib import Path

import srunddp
from srunddp.train import Preemption, PreemptionConfig

PACE = 0.02  # seconds a step
ATTEMPT = os.environ.get("SLURM_RESTART_COUNT", "0")


def write(path: Path, text: str) -> None:
    """Whole or not there."""
    new = path.with_name(f".{path.name}.tmp")
    new.write_text(text)
    new.replace(path)


def load(folder: Path) -> int:
    """The step of the newest checkpoint, which has to be whole."""
    paths = sorted(folder.glob("step-*.pt"))
    if not paths:
        return 0
    (step,) = set(paths[-1].read_text().splitlines())
    return int(step)


def main(folder: Path, steps: int = 0) -> None:
    settings = PreemptionConfig(lead_seconds=float(os.environ.get("LEAD", "120")))
    with srunddp.init("gloo") as world, Preemption(world, settings) as preemption:
        first = load(folder)
        steps = steps or (first + 5 if first else 1_000_000)
        for step in range(first + 1, steps + 1):
            time.sleep(PACE)
            write(folder / f"at.{ATTEMPT}.{world.rank}", f"{os.getpid()} {first} {step}")
            if preemption.should_stop():
                path = folder / f"step-{step:08d}.pt"
                if world.rank == 0:
                    write(path, f"{step}\n" * 1000)
                preemption.stop(step, path)
        if world.rank == 0:
            print(f"done from step {first} to {steps}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
