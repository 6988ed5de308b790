"""``--monitor`` takes no word of the script's, and each start of a run has a folder of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from srunddp.report.locate import find
from srunddp.run.cli import run
from srunddp.util.click_types import MONITOR_SECONDS
from tests.support.starting import slurm, srunddp, write


@pytest.mark.parametrize(
    ("words", "seconds", "script", "arguments"),
    [
        (["--monitor", "train.py"], MONITOR_SECONDS, "train.py", ()),
        (["--monitor=0.5", "train.py", "--monitor"], 0.5, "train.py", ("--monitor",)),
        (["--log-dir", "--monitor", "train.py"], None, "train.py", ()),
        (
            ["--log-dir=a", "--quiet", "--monitor", "-m", "train", "x"],
            MONITOR_SECONDS,
            "train",
            ("x",),
        ),
        (["--monitor", "--", "train.py"], MONITOR_SECONDS, "train.py", ()),
        (["train.py", "--monitor"], None, "train.py", ("--monitor",)),
    ],
)
def test_monitor_takes_no_word_of_the_script_s(
    words: list[str], seconds: float | None, script: str, arguments: tuple[str, ...]
) -> None:
    given = run.make_context("run", words).params
    assert (given["monitor"], given["script"], given["arguments"]) == (seconds, script, arguments)


def test_files_of_a_run_say_how_it_went(tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        "import srunddp\nfor _ in range(3): srunddp.heartbeat()\nraise SystemExit(7)",
    )
    done = srunddp("run", "--quiet", "--monitor", "train.py", "--epochs=2", folder=tmp_path)
    assert done.returncode == 7
    folder = tmp_path / "logs" / "run" / "monitor.0"
    (marks,) = folder.glob("*.rank0.marks.csv")
    found = [line.split(",")[1:] for line in marks.read_text().splitlines()[1:]]
    assert found == [["process", ""], ["meeting", ""], ["met", ""], ["step", ""], ["end", "7"]]
    (steps,) = folder.glob("*.rank0.steps.csv")
    assert steps.read_text().splitlines()[-1].split(",")[1] == "3"
    metadata = json.loads((folder / "run.json").read_text())
    expected = {"world_size": 1, "script": ["train.py", "--epochs=2"], "seconds": MONITOR_SECONDS}
    assert metadata | expected == metadata


def test_the_node_and_its_tasks_are_sampled_while_the_script_runs(tmp_path: Path) -> None:
    script = (
        "import time\n"
        "from pathlib import Path\n"
        "def is_sampled(kind):\n"
        "    files = Path('logs/run/monitor.0').glob(f'*.{kind}.csv')\n"
        "    return any(len(file.read_text().splitlines()) > 2 for file in files)\n"
        "end = time.monotonic() + 60\n"
        "while not all(map(is_sampled, ('node', 'tasks'))) and time.monotonic() < end:\n"
        "    time.sleep(0.05)\n"
        "raise SystemExit(0 if time.monotonic() < end else 'there are no samples')\n"
    )
    done = srunddp(
        "run", "--quiet", "--monitor=0.2", write(tmp_path / "train.py", script), folder=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_tasks_of_an_array_have_a_folder_each(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "")
    for job in ("4711", "4712"):
        done = srunddp("run", "--quiet", "--monitor", "train.py", folder=tmp_path, SLURM_JOB_ID=job)
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("logs/*")) == ["4711", "4712"]
    folder, _ = find("4711", str(tmp_path / "logs"), None)
    assert folder == tmp_path / "logs" / "4711" / "monitor.0"


def test_an_earlier_run_s_description_is_not_left(tmp_path: Path) -> None:
    """Each start of a requeued job has a folder of its own."""
    write(tmp_path / "train.py", "")
    words = ("run", "--quiet", "--monitor", "--monitor-dir=here", "--timeout=0.5", "train.py")
    restarts = {"SLURM_RESTART_COUNT": "2"}
    assert srunddp(*words, folder=tmp_path, **slurm(0, 1, **restarts)).returncode == 0
    (file,) = tmp_path.glob("here/*/monitor.2/run.json")
    found = json.loads(file.read_text())
    assert (found["world_size"], found["restarts"]) == (1, 2)
    done = srunddp(*words, folder=tmp_path, **slurm(0, 2, **restarts))  # the other one never comes
    assert done.returncode not in (0, 78), done.stderr
    assert not file.exists()


def test_a_rank_that_alone_cannot_write_its_files_says_so_itself(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "")
    world = slurm(1, 2)
    words = ("run", "--quiet", "--monitor", "--timeout=0.5", "train.py")
    srunddp(*words, folder=tmp_path, **world)
    (file,) = tmp_path.glob("logs/*/monitor.0/*.rank1.steps.csv")
    file.unlink()
    os.mkfifo(file)
    done = srunddp(*words, folder=tmp_path, **world)
    assert (done.returncode, done.stdout) == (78, "")
    assert f"--monitor-dir: {file.relative_to(tmp_path)} cannot be written" in done.stderr
