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
CLOSED = "raise RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer')"
HANGS = "it hangs in load_batch (train.py:"


@pytest.mark.parametrize(
    ("does", "code", "cause"),
    [
        (("after(1); os.abort()", "load_batch()", "after(1); os.abort()"), 124, HANGS),
        ((f"after(2); {CLOSED}", "after(2); os.abort()", "reduce()"), 134, "killed by SIGABRT"),
    ],
    ids=["hangs", "aborts"],
)
def test_the_rank_that_the_others_waited_for_is_named(
    tmp_path: Path, does: tuple[str, ...], code: int, cause: str
) -> None:
    """Other cases are in test_coordinator.py, with messages and times."""
    write(tmp_path / "torch" / "distributed" / "collective.py", COLLECTIVE)
    ended = run(tmp_path, SCENE + "\n".join(f"if RANK == {rank}: {what}" for rank, what in enumerate(does)))
    named(ended, 1, code, cause)
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
