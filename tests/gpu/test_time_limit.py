"""A collective's time limit: NCCL's watchdog ends the ranks that wait, and the one that hangs is named."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

from tests.gpu.ranks import run
from tests.gpu.requirements import need_nccl_ranks
from tests.support.starting import NODE

HANGS = """
world = srunddp.init(timeout=datetime.timedelta(seconds=20))
total = ones(world)
dist.all_reduce(total)
synchronize()

def load_batch():
    time.sleep(1000)

if RANK == 1:
    load_batch()
dist.all_reduce(total)
synchronize()
rest()
"""


def test_who_hangs_is_named_when_nccls_watchdog_strikes(tmp_path: Path) -> None:
    """And the flight recorders of those who waited are written to their ends."""
    recorder = str(tmp_path / "recorder_")
    variables = need_nccl_ranks(2) | {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": recorder,  # the older name; newer builds read both
    }
    done = run(tmp_path, HANGS, variables=variables)
    first = re.search(r"^srunddp: (rank.*)$", done.text, re.MULTILINE)
    assert first, done.text
    assert first[1].startswith(f"rank 1 on {NODE} "), done.text
    assert "load_batch" in done.text, done.text
    assert 0 not in done.codes
    assert len(set(done.codes)) == 1, done.codes
    written = sorted(tmp_path.glob("recorder_*"))
    assert Path(f"{recorder}0") in written, done.text
    for file in written:
        assert pickle.loads(file.read_bytes())["entries"], file
