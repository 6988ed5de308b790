"""Faults of GPUs are named when a rank fails. NVML is made up: nothing here has seen a real GPU."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from srunddp.report.advice import notes
from srunddp.report.run import read
from srunddp.report.summarize import summary_of
from tests.conftest import PROGRAMS, ROOT
from tests.support.starting import NODE, python
from tests.support.worlds import run, world

GPUS = [{"uuid": f"GPU-{letter}", "errors": 1, "remapped": [0, 0, 0, 0]} for letter in "abcd"]
# In the script: what happens to the GPUs, and then a failure.
HELPERS = """
import json
NVML = os.environ["FAKE_NVML"]

def xid(gpu, number, **more):
    with open(NVML + ".xids", "a") as file:
        file.write(json.dumps({"gpu": gpu, "xid": number, **more}) + chr(10))

def becomes(gpu, **what):
    Path(NVML + ".new").write_text(json.dumps({gpu: what}))
    Path(NVML + ".new").rename(NVML + ".now")

def wait_for_watch():
    # Until the first rank's process has registered.
    import glob
    while True:
        for comm in glob.glob("/proc/[0-9]*/comm"):
            try:
                if Path(comm).read_text() == "srunddp-gpus" + chr(10):
                    stat = Path(comm).with_name("stat").read_text().rpartition(")")[2].split()
                    if stat[1] == Path("supervisor.0").read_text():
                        time.sleep(1.0)
                        return
            except OSError:
                pass
        time.sleep(0.01)

def wait_for_figures():
    # Until the first rank's other process has read those of the start.
    while not Path(NVML + ".shut").exists():
        time.sleep(0.01)
"""


def nvml(folder: Path, *gpus: dict[str, Any], **more: str) -> dict[str, str]:
    """The variables of a node with these GPUs, of which the job has all."""
    file = folder / "nvml.json"
    file.write_text(json.dumps({"driver": "580.95.05", "cuda": 13000, "gpus": gpus or GPUS}))
    return {
        "FAKE_NVML": str(file),
        "PYTHONPATH": str(PROGRAMS / "nvml"),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(gpus or GPUS)))),
        **more,
    }


def fault_lines(text: str) -> list[str]:
    return re.findall(r"^srunddp: (GPU \d+ \(.*)$", text, re.MULTILINE)


PATIENT = {"gpus_answer_within": 30.0, "gpus_told_within": 31.0}  # for a busy machine
WATCHED = [("--restarts", "1"), ("--monitor=1s",)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("options", WATCHED)
def test_an_xid_is_named_with_its_gpu_and_node(
    tmp_path: Path, options: tuple[str, ...], rank: int
) -> None:
    script = (
        f"{HELPERS}\nif RANK == {rank} and not Path('again').exists():\n"
        "    wait_for_watch()\n    xid(3, 79)\n    time.sleep(0.5)\n    Path('again').touch()\n"
        "    raise RuntimeError('CUDA error')\n"
        "if not Path('again').exists():\n    rest()"
    )
    variables = nvml(tmp_path)
    ended = run(tmp_path, script, *options, "--log-dir=logs", size=2, variables=variables)
    line = f"GPU 3 (GPU-d) of {NODE}: Xid 79, fallen off the bus"
    assert line in fault_lines(ended.text), ended.text
    [found] = json.loads(next(tmp_path.rglob("failure*.json")).read_text())["gpu_faults"]
    assert (found["index"], found["uuid"], found["xid"]) == (3, "GPU-d", 79)
    assert (found["node"], found["kind"]) == (NODE, "hardware")
    for folder in tmp_path.rglob("monitor.0"):
        [note] = notes(summary_of(read(folder)))
        assert note.rule == "gpu fault"
        assert f"GPU 3 (GPU-d) of {NODE}: Xid 79; fallen off the bus" in note.found
        assert f"--exclude={NODE}" in note.hint


def test_the_programs_own_xid_is_named_as_such(tmp_path: Path) -> None:
    script = (
        f"{HELPERS}\nif RANK == 1:\n    wait_for_watch()\n    xid(1, 31)\n    time.sleep(0.5)\n"
        "    raise RuntimeError('CUDA error')\nrest()"
    )
    ended = run(tmp_path, script, "--monitor=1s", size=2, variables=nvml(tmp_path))
    [line] = fault_lines(ended.text)
    assert line == (
        f"GPU 1 (GPU-b) of {NODE}: Xid 31, access to memory that is not mapped; most likely the"
        " program's own fault, not the GPU's"
    )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("becomes", "what"),
    [
        ("failing={'nvmlDeviceGetMemoryInfo': 15}", "it does not answer any more"),
        ("remapped=[0, 1, 0, 1]", "a row of its memory could not be retired"),
        ("remapped=[0, 1, 1, 0]", "rows or pages of its memory are retired at the next reset"),
        ("trace=[{'reasons': 0x40}]", "slowed by heat, by its hardware now"),
    ],
)
def test_what_stays_is_found_at_a_failure(
    tmp_path: Path, becomes: str, what: str, size: int
) -> None:
    """Without a process that watches."""
    variables = nvml(tmp_path, {"uuid": "GPU-a"}, {"uuid": "GPU-b"})
    script = (
        f"{HELPERS}\nif RANK == SIZE - 1:\n    becomes(1, {becomes})\n    raise SystemExit(9)\n"
        "rest()"
    )
    ended = run(tmp_path, script, size=size, variables=variables)
    assert f"GPU 1 (GPU-b) of {NODE}: {what}" in fault_lines(ended.text), ended.text
    assert ended.codes == [9] * size


@pytest.mark.parametrize(
    ("options", "noted"), [(("--monitor=1s",), "wait_for_watch"), ((), "wait_for_figures")]
)
@pytest.mark.parametrize("size", [1, 2])
def test_memory_errors_count_from_the_start(
    tmp_path: Path, size: int, options: tuple[str, ...], noted: str
) -> None:
    """GPU 3 has had an error before. Without a watch, a process has read that at the start."""
    script = (
        f"{HELPERS}\nif RANK == SIZE - 1:\n    {noted}()\n    becomes(2, errors=3)\n"
        "    raise RuntimeError('CUDA error')\nrest()"
    )
    ended = run(tmp_path, script, *options, size=size, variables=nvml(tmp_path), limits=PATIENT)
    what = "2 uncorrected memory errors (ECC) since the start of the run"
    assert fault_lines(ended.text) == [f"GPU 2 (GPU-c) of {NODE}: {what}"], ended.text


def test_a_driver_that_does_not_answer_delays_the_end_for_three_seconds(tmp_path: Path) -> None:
    variables = nvml(tmp_path, {"uuid": "GPU-a", "hangs": True})
    script = "if RANK == 1:\n    raise ValueError('boom')\nrest()"
    with world(tmp_path, script, size=2, variables=variables) as it:
        it.workers()
        began = time.monotonic()
        ended = it.wait()
    assert ended.codes == [1, 1]
    assert "ValueError: boom" in ended.text
    assert fault_lines(ended.text) == []
    # 3 s, and what the end of a run may take on a busy machine.
    assert time.monotonic() - began < 3 + 15


@pytest.mark.parametrize("size", [1, 2])
def test_a_driver_that_does_not_answer_at_the_start_delays_nothing(
    tmp_path: Path, size: int
) -> None:
    """Its process is ended with the run."""
    variables = nvml(tmp_path, {"uuid": "GPU-a", "hangs": True})
    began = time.monotonic()
    ended = run(tmp_path, "Path('done').touch()", size=size, variables=variables)
    assert ended.codes == [0] * size
    assert "GPU" not in ended.text
    assert time.monotonic() - began < 60  # the driver hangs for 600 s


def test_a_fault_of_another_jobs_gpu_is_not_named(tmp_path: Path) -> None:
    variables = nvml(tmp_path) | {"CUDA_VISIBLE_DEVICES": "0,1"}
    script = (
        f"{HELPERS}\nif RANK == 1:\n    wait_for_watch()\n    xid(3, 79)\n"
        "    becomes(2, errors=9)\n    time.sleep(0.5)\n    raise RuntimeError('boom')\nrest()"
    )
    ended = run(tmp_path, script, "--monitor=1s", size=2, variables=variables)
    assert fault_lines(ended.text) == [], ended.text


@pytest.mark.parametrize("options", [(), *WATCHED])
def test_nothing_is_named_in_a_healthy_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    ended = run(tmp_path, "pass", *options, size=2, variables=nvml(tmp_path))
    assert ended.codes == [0, 0]
    assert "GPU" not in ended.text
    for folder in tmp_path.rglob("monitor.0"):
        assert summary_of(read(folder)).gpu_faults == ()


def test_no_process_asks_on_a_node_without_gpus(tmp_path: Path) -> None:
    """The variable that Slurm sets for a job without GPUs."""
    variables = nvml(tmp_path) | {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}
    script = (
        f"{HELPERS}\nif RANK == 1:\n    becomes(1, remapped=[0, 1, 0, 1])\n"
        "    raise SystemExit(9)\nrest()"
    )
    ended = run(tmp_path, script, "--restarts=1", size=2, variables=variables)
    assert fault_lines(ended.text) == []


def test_a_supervisor_without_gpus_imports_nothing_for_them(tmp_path: Path) -> None:
    """Its start is what all ranks wait for."""
    modules = "srunddp.run.launch srunddp.run.supervise srunddp.supervisor.coordinator"
    program = (
        f"import importlib, sys\nfor name in '{modules}'.split():\n"
        "    importlib.import_module(name)\n"
        "words = ('gpu', 'nvml', 'xid')\n"
        "print([name for name in sys.modules if any(word in name for word in words)])"
    )
    assert python("-c", program, folder=tmp_path, PYTHONPATH=str(ROOT)).stdout == "[]\n"
