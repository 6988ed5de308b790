"""A rank that hangs is named when the others run into a collective's time limit; one that aborts of itself is, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.supervisor.test_suspended import COLLECTIVE
from tests.support.starting import write
from tests.support.worlds import named, run

# Its path is what tells that a rank waits for others. All are where they are to be before the first one fails.
SCENE = """
import importlib.util
spec = importlib.util.spec_from_file_location("collective", "torch/distributed/collective.py")
collective = importlib.util.module_from_spec(spec)
spec.loader.exec_module(collective)

def load_batch():
    say("busy")
    while True: time.sleep(0.05)

def reduce():
    say("busy")
    collective.all_reduce()

def after(*ranks):
    wait_for(*(f"busy.{rank}" for rank in ranks))
    time.sleep(0.2)
"""
LIMIT = "raise RuntimeError('[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation')"
CLOSED = "raise RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer')"
HANGS = "it hangs in load_batch (train.py:"
# What each rank does, and who is to be named with which code and cause.
SCENES = {
    "one limit, one waits": ((f"after(1, 2); {LIMIT}", "load_batch()", "reduce()"), (1, 124, HANGS)),
    "two limits": ((f"after(1); {LIMIT}", "load_batch()", f"after(1); {LIMIT}"), (1, 124, HANGS)),
    "two limits, one closed": ((f"after(1); {LIMIT}", "load_batch()", f"after(1); {CLOSED}"), (1, 124, HANGS)),
    "as NCCL's watchdogs": (("after(1); os.abort()", "load_batch()", "after(1); os.abort()"), (1, 124, HANGS)),
    "an abort, the others wait": (("reduce()", "after(0, 2); os.abort()", "reduce()"), (1, 134, "killed by SIGABRT")),
    "an abort, the others work": (
        ("load_batch()", "after(0, 2); os.abort()", "load_batch()"),
        (1, 134, "killed by SIGABRT"),
    ),
    "an abort, its echo, one works": (
        (f"after(2); {CLOSED}", "after(2); os.abort()", "load_batch()"),
        (1, 134, "killed by SIGABRT"),
    ),
    "an error, the others work": ((f"after(1, 2); {CLOSED}", "load_batch()", "load_batch()"), (0, 1, "RuntimeError")),
    "a limit, the others wait": ((f"after(1, 2); {LIMIT}", "reduce()", "reduce()"), (0, 1, "RuntimeError")),
}


@pytest.mark.parametrize("scene", SCENES)
def test_the_rank_that_the_others_waited_for_is_named(tmp_path: Path, scene: str) -> None:
    does, (rank, code, cause) = SCENES[scene]
    write(tmp_path / "torch" / "distributed" / "collective.py", COLLECTIVE)
    ended = run(tmp_path, SCENE + "\n".join(f"if RANK == {rank}: {what}" for rank, what in enumerate(does)))
    named(ended, rank, code, cause)
    assert (", in load_batch\n" in ended.text) == (code == 124), "its stack"


GLOO = """
from datetime import timedelta
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
x = torch.ones(4)
dist.all_reduce(x)
def load_batch():
    while True: time.sleep(0.05)
if RANK == 2: load_batch()
dist.all_reduce(x)
"""


def test_a_rank_that_hangs_is_named_upon_the_time_limit_of_gloo(tmp_path: Path) -> None:
    ended = run(tmp_path, GLOO)
    named(ended, 2, 124, HANGS)
    assert "Timed out waiting 5000ms" in ended.verdicts[0].cause
