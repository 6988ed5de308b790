"""Rank 0's script ends a second after the others'; each says when its script ended, and when its exit handlers ran."""

import atexit
import json
import os
import time

RANK = int(os.environ["RANK"])
TIMES = {}


def tell():
    print(json.dumps({"rank": RANK, **TIMES, "exit": time.monotonic()}), flush=True)


atexit.register(tell)
if RANK == 0:
    time.sleep(1)
TIMES["end"] = time.monotonic()
