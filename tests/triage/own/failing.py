"""A training that fails in the way that its first argument names, on the rank of the second; with
--restarts, only after another failure in the first start.
"""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

import srunddp

WAY = sys.argv[1]
CULPRIT = int(sys.argv[2])
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
START = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
LIMIT = 60.0  # seconds; the others wait no longer, should nobody end them


def say(text: str) -> None:
    if not WAY.startswith("mute"):
        print(f"rank {RANK}: {text}", flush=True)


def wait_for_all() -> None:
    Path(f"ready.{START}.{RANK}").touch()
    while len(list(Path().glob(f"ready.{START}.*"))) < WORLD:
        time.sleep(0.02)


def load_sample(path: str) -> bytes:
    return Path(path).read_bytes()


def all_reduce() -> None:
    import torch
    from torch import distributed

    distributed.all_reduce(torch.zeros(1))


def hang() -> None:
    time.sleep(LIMIT)


def wait_for_peers() -> None:
    time.sleep(LIMIT)


def fail() -> None:  # noqa: C901
    match WAY:
        case "exception" | "mute-exception" | "collective":
            raise ValueError("bad sample in shard 7")
        case "exit-code":
            sys.exit(3)
        case "os-exit":
            os._exit(7)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "memory":
            raise MemoryError
        case "no-module":
            importlib.import_module("einops_of_nobody")
        case "no-file":
            load_sample("/data/shard-7.tar")
        case "disk-full":
            raise OSError(28, "No space left on device", "/scratch/step-3.pt")
        case "stalled":
            hang()
        case "supervisor-killed":
            os.kill(os.getppid(), signal.SIGKILL)
            hang()


def main() -> None:
    if WAY in ("collective", "left-early"):
        from torch import distributed

        distributed.init_process_group("gloo")
    for step in range(3):
        say(f"step {step}")
        srunddp.heartbeat()
    wait_for_all()
    if WAY == "well":
        return
    if "--fails-before" in sys.argv and START == "0":
        if RANK == 0:
            raise KeyError("learning_rate")
        wait_for_peers()
    if RANK == CULPRIT:
        fail()
    if WAY == "left-early" and RANK == CULPRIT:
        return
    if WAY in ("collective", "left-early"):
        all_reduce()
    wait_for_peers()


main()
