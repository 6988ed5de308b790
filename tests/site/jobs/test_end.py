"""What a job script leaves behind: nothing, however it ends; and the exit code of the training."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from srunddp.site.jobs import script
from srunddp.site.jobs.job import Job
from srunddp.site.jobs.parts import Written
from tests.run.starting import until
from tests.site.jobs.carried_out import carry_out

# srun of a monitor lasts for ever; that of the training until it is told to end, with a code.
SRUN = """#!/bin/bash
case "$*" in
*--overlap*)
  until [ "$1" = bash ]; do shift; done
  echo $$ >>"$FOLDER/monitors"
  exec "$@" ;;
*" check "*) exit "${CHECK:-0}" ;;
esac
echo $$ >"$FOLDER/training"
trap 'sleep 0.5; echo saved >>"$FOLDER/events"; exit 143' TERM
until [ -e "$FOLDER/end" ]; do sleep 0.02; done
exit "$(cat "$FOLDER/end")"
"""
SRUNDDP = '#!/bin/bash\necho "$*" >>"$FOLDER/events"\necho /staged/srunddp\n'
MONITOR = "#!/bin/bash\nexec /bin/sleep 1000\n"
SLEEP = '#!/bin/bash\n[ "$1" != 600 ] || { echo "sleep $1" >>"$FOLDER/events"; exit 0; }\nexec /bin/sleep "$1"\n'


def started(folder: Path, **fields: object) -> subprocess.Popen[bytes]:
    job = Job(script="train.py", monitor=1, stage=True, venv="venv", gres="gpu:1", **fields)  # type: ignore[arg-type]
    (folder / "job.sh").write_text(script.render(job, Written(("srunddp", "sbatch"))))
    programs = {"srun": SRUN, "srunddp": SRUNDDP, "sleep": SLEEP, "top": MONITOR, "nvidia-smi": MONITOR}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environ = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "FOLDER": str(folder),
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "7",
        "CHECK": os.environ.get("CHECK", "0"),
    }
    # A session of its own, as a batch script has.
    return subprocess.Popen(["bash", "job.sh"], cwd=folder, env=environ, start_new_session=True)


def monitors(folder: Path) -> list[int]:
    path = folder / "monitors"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def at_work(folder: Path) -> None:
    until(lambda: len(monitors(folder)) == 2 and (folder / "training").exists())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left(folder: Path) -> list[int]:
    """Of the monitors, after as long as a signal may take."""
    end = time.monotonic() + 5
    while (alive := [pid for pid in monitors(folder) if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return alive


def events(folder: Path) -> list[str]:
    return (folder / "events").read_text().splitlines()[1:]


def test_the_warning_of_all_steps_does_not_end_the_monitors(tmp_path: Path) -> None:
    """Slurm sends the signal of --signal to theirs as well."""
    with started(tmp_path, requeue=True) as process:
        at_work(tmp_path)
        until(lambda: all(b"/bin/sleep" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in monitors(tmp_path)))
        for pid in monitors(tmp_path):
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGUSR2)
        time.sleep(0.1)
        assert all(map(is_alive, monitors(tmp_path)))
        (tmp_path / "end").write_text("0")
        assert process.wait(30) == 0
    assert left(tmp_path) == []


@pytest.mark.parametrize("requeue", [False, True])
@pytest.mark.parametrize("code", [0, 7])
def test_the_monitors_and_the_staged_copy_end_with_the_training(tmp_path: Path, requeue: bool, code: int) -> None:
    with started(tmp_path, requeue=requeue) as process:
        at_work(tmp_path)
        (tmp_path / "end").write_text(str(code))
        assert process.wait(30) == code
    assert left(tmp_path) == []
    assert events(tmp_path) == ["stage clean"]


@pytest.mark.parametrize("requeue", [False, True])
def test_upon_sigterm_they_end_after_the_ranks_have_saved(tmp_path: Path, requeue: bool) -> None:
    """As scancel and scontrol requeue send it, to the script and its srun; no reason to wait for more.

    Slurm starts no step in such a job, and ends the one that keeps the copies by itself.
    """
    with started(tmp_path, requeue=requeue) as process:
        at_work(tmp_path)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(30) == 143
    assert left(tmp_path) == []
    assert events(tmp_path) == ["saved"]


def test_before_it_waits_for_its_preemption_all_is_cleaned_up(tmp_path: Path) -> None:
    """Slurm sends SIGTERM to the ranks alone, and takes a job that ends by itself then for done."""
    with started(tmp_path, requeue=True) as process:
        at_work(tmp_path)
        os.kill(int((tmp_path / "training").read_text()), signal.SIGTERM)
        assert process.wait(30) == 143
    assert left(tmp_path) == []
    assert events(tmp_path) == ["saved", "stage clean", "sleep 600"]


def test_a_preflight_that_fails_ends_the_job_and_the_monitors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECK", "69")
    with started(tmp_path, preflight=True, requeue=True) as process:
        assert process.wait(30) == 69
    assert not (tmp_path / "training").exists()
    assert left(tmp_path) == []
    assert events(tmp_path) == ["stage clean"]


@pytest.mark.parametrize("code", [1, 75, 143])
def test_the_scripts_exit_code_is_that_of_the_training(tmp_path: Path, code: int) -> None:
    plain = script.render(Job(script="train.py"), Written(("srunddp",)))
    assert carry_out(plain, tmp_path, CODE_srun=str(code)).code == code
    (tmp_path / "again").mkdir()
    requeued = script.render(Job(script="train.py", requeue=True), Written(("srunddp",)))
    called = carry_out(requeued, tmp_path / "again", CODE_srun=str(code))
    assert called.code == code
    assert called.of("sleep") == ([["600"]] if code == 143 else [])


def test_a_module_that_is_not_there_ends_the_job_before_the_training(tmp_path: Path) -> None:
    text = script.render(Job(script="train.py", modules=("no/such",)), Written(("srunddp",)))
    called = carry_out(text, tmp_path, CODE_module="1")
    assert called.code == 1
    assert called.of("srun") == []


@pytest.mark.parametrize("fields", [{"modules": ("a",)}, {"conda": "train"}], ids=str)
def test_functions_of_a_site_that_read_unset_variables_do_not_end_the_job(
    fields: dict[str, object], tmp_path: Path
) -> None:
    text = script.render(Job(script="train.py", **fields), Written(("srunddp",)))  # type: ignore[arg-type]
    function = "() {  : $NOT_SET_ANYWHERE\n}"
    called = carry_out(text, tmp_path, **{"BASH_FUNC_module%%": function, "BASH_FUNC_conda%%": function})
    assert (called.code, called.errors) == (0, "")
    assert len(called.of("srun")) == 1
