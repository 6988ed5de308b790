"""Signals: what the launcher sends reaches the script, also while its GPU computes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.gpu.ranks import started, wait_for
from tests.gpu.requirements import need_slurm_gpus
from tests.gpu.site import STARTS_WITHIN, job

HANDLER = """
got = []
signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
world = srunddp.init()
say("handles", os.environ.get("SLURM_JOB_ID", ""))
end = time.time() + 120
while not got and time.time() < end:
    busy(0.1)
    synchronize()
    time.sleep(0.01)
time.sleep(2.0)  # one that comes twice is seen
print("got", got)
world.close()
"""


def test_a_signal_to_srunddp_reaches_a_script_with_a_busy_gpu(tmp_path: Path) -> None:
    with started(tmp_path, HANDLER, size=1) as it:
        wait_for(it, "handles.0")
        subprocess.run(["kill", "-USR1", str(it.ranks[0].pid)], check=True)
        done = it.wait()
    assert done.codes == [0], done.text
    assert done.printed == ["got [10]\n"]


@pytest.mark.gpu(0)
def test_what_scancel_sends_reaches_every_rank_once(shared_folder: Path) -> None:
    config = need_slurm_gpus(2)
    with job(shared_folder, HANDLER, "--nodes=1", "--ntasks=2", "--gpus-per-node=2") as process:
        handles = [shared_folder / f"handles.{rank}" for rank in range(2)]
        end = time.monotonic() + STARTS_WITHIN
        while not all(file.exists() for file in handles):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, "the job did not start"
            time.sleep(0.5)
        number = handles[0].read_text()
        subprocess.run(["scancel", "--signal=USR1", number], check=True, timeout=60)
        text = process.communicate(timeout=120)[0]
    assert process.returncode == 0, text
    assert text.count("got [10]") == 2, f"{config.get('ProctrackType')}: {text}"
