"""Rank 0's script ends a second after all others'; each says when its script ended, and when its
exit handlers ran.

``early_end.py FOLDER``: that is where the others tell rank 0 that their scripts have ended.
"""

import atexit
import json
import os
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
OTHERS = range(1, int(os.environ["WORLD_SIZE"]))
FOLDER = Path(sys.argv[1])
TIMES: dict[str, float] = {}


def tell() -> None:
    # In one write: two ranks' lines must not mix.
    sys.stdout.write(json.dumps({"rank": RANK, **TIMES, "exit": time.monotonic()}) + "\n")


atexit.register(tell)
if RANK == 0:
    while not all((FOLDER / f"ended.{rank}").exists() for rank in OTHERS):
        time.sleep(0.01)
    time.sleep(1)  # in which one that does not wait for this rank would run its exit handlers
TIMES["end"] = time.monotonic()
if RANK:
    (FOLDER / f"ended.{RANK}").touch()
