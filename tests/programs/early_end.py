"""Rank 0's script ends a second after the others'; each says when its script ended, and when its exit handlers ran."""

import atexit
import json
import os
import sys
import time

RANK = int(os.environ["RANK"])
TIMES = {}


def tell():
    # In one write: two ranks' lines must not mix.
    sys.stdout.write(json.dumps({"rank": RANK, **TIMES, "exit": time.monotonic()}) + "\n")


atexit.register(tell)
if RANK == 0:
    time.sleep(1)
TIMES["end"] = time.monotonic()
