"""However a training ends, its job script leaves nothing behind, writes a report, and ends with the
same code.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from srunddp.sbatch.render import render
from srunddp.sbatch.spec import SlurmJob
from tests.support.job_scripts import carry_out
from tests.support.starting import LONG, until

# srun of the training lasts until it is told to end, with a code.
SRUN = """#!/bin/bash
case "$*" in
--version) echo "slurm-wlm ${SLURM:-22.05.8}"; exit ;;
*" check "*) exit "${CHECK:-0}" ;;
esac
trap 'sleep 0.5; echo saved >>"$FOLDER/events"; exit 143' TERM
echo $$ >"$FOLDER/training.new"
mv "$FOLDER/training.new" "$FOLDER/training"
until [ -e "$FOLDER/end" ]; do sleep 0.02; done
exit "$(cat "$FOLDER/end")"
"""
SRUNDDP = """#!/bin/bash
echo "$*" >>"$FOLDER/events"
case "$1" in
stage) echo /staged/srunddp ;;
report) eval "${REPORT:-}" ;;
esac
"""
SLEEP = """#!/bin/bash
[ "$1" = 600 ] || exec /bin/sleep "$1"
echo "sleep $1" >>"$FOLDER/events"
exec /bin/sleep "${PREEMPTED:-0}"
"""
STAGED = {"stage": True, "venv": "venv"}
MONITORED = {"monitor": "1"}
REPORT = "report 7 --monitor-dir=logs"


def text_of(**fields: Any) -> str:
    return render(SlurmJob(script="train.py", **fields), ("srunddp", "sbatch"))


def started(
    folder: Path, variables: dict[str, str] | None = None, **fields: Any
) -> subprocess.Popen[bytes]:
    (folder / "job.sh").write_text(text_of(sbatch_arg=("--gres=gpu:1",), **fields))
    (folder / "events").touch()
    for name, text in {"srun": SRUN, "srunddp": SRUNDDP, "sleep": SLEEP}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "FOLDER": str(folder),
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "7",
    }
    environ = {**job, **(variables or {})}
    # A session of its own, as a batch script has.
    return subprocess.Popen(["bash", "job.sh"], cwd=folder, env=environ, start_new_session=True)


def end_training(folder: Path, code: int) -> None:
    until((folder / "training").exists)
    (folder / "end.new").write_text(str(code))
    (folder / "end.new").rename(folder / "end")


def events(folder: Path) -> list[str]:
    """Without the staging before the training."""
    return [
        line
        for line in (folder / "events").read_text().splitlines()
        if not line.startswith("stage push")
    ]


@pytest.mark.parametrize("requeue", [False, True])
@pytest.mark.parametrize("code", [0, 75])
@pytest.mark.parametrize(
    ("fields", "after"), [({}, []), (STAGED, ["stage clean"]), (MONITORED, [REPORT])], ids=str
)
def test_after_the_training_the_copy_goes_or_the_report_comes(
    tmp_path: Path, requeue: bool, code: int, fields: dict[str, Any], after: list[str]
) -> None:
    with started(tmp_path, requeue=requeue, **fields) as process:
        end_training(tmp_path, code)
        assert process.wait(LONG) == code
    assert events(tmp_path) == after


@pytest.mark.parametrize("requeue", [False, True])
@pytest.mark.parametrize("fields", [STAGED, MONITORED], ids=["stage", "monitor"])
def test_upon_sigterm_it_ends_after_the_ranks_have_saved(
    tmp_path: Path, requeue: bool, fields: dict[str, Any]
) -> None:
    """As scancel and scontrol requeue send it, to the script and its srun; no reason to wait for
    more.

    Slurm starts no step in such a job, and ends the one that keeps the copies by itself.
    """
    with started(tmp_path, requeue=requeue, **fields) as process:
        until((tmp_path / "training").exists)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(LONG) == 143
    assert events(tmp_path) == ["saved"]


@pytest.mark.parametrize(
    ("fields", "after"), [({}, []), (STAGED, ["stage clean"]), (MONITORED, [])], ids=str
)
def test_a_preempted_job_cleans_up_and_waits(
    tmp_path: Path, fields: dict[str, Any], after: list[str]
) -> None:
    """Slurm sends SIGTERM to the ranks alone. Before 24.05 it takes a job that ends by itself then
    for done.

    There is no time for a report: the job's next start writes it.
    """
    with started(tmp_path, {"PREEMPTED": "600"}, requeue=True, **fields) as process:
        until((tmp_path / "training").exists)
        os.kill(int((tmp_path / "training").read_text()), signal.SIGTERM)
        until(lambda: "sleep 600" in events(tmp_path))
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(LONG) == 143
    assert events(tmp_path) == ["saved", *after, "sleep 600"]


@pytest.mark.parametrize("version", ["24.05.0", "26.05.5"])
@pytest.mark.parametrize(
    ("fields", "after"), [({}, []), (STAGED, ["stage clean"]), (MONITORED, [])], ids=str
)
def test_where_slurm_requeues_a_preempted_job_that_ends_it_does_not_wait(
    tmp_path: Path, version: str, fields: dict[str, Any], after: list[str]
) -> None:
    """Nor does it write a report, which may take longer than the job has left."""
    with started(tmp_path, {"SLURM": version}, requeue=True, **fields) as process:
        until((tmp_path / "training").exists)
        os.kill(int((tmp_path / "training").read_text()), signal.SIGTERM)
        assert process.wait(LONG) == 143
    assert events(tmp_path) == ["saved", *after]


def test_a_report_that_fails_leaves_the_exit_code_as_it_is(tmp_path: Path) -> None:
    with started(tmp_path, {"REPORT": "exit 70"}, **MONITORED) as process:
        end_training(tmp_path, 3)
        assert process.wait(LONG) == 3


def test_a_report_does_not_keep_a_job_that_slurm_ends(tmp_path: Path) -> None:
    with started(tmp_path, {"REPORT": "exec /bin/sleep 600"}, **MONITORED) as process:
        end_training(tmp_path, 3)
        until(lambda: REPORT in events(tmp_path))
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(LONG) == 3


@pytest.mark.parametrize(
    ("fields", "after"), [(STAGED, ["stage clean"]), (MONITORED, [])], ids=["stage", "monitor"]
)
def test_a_preflight_that_fails_comes_before_training(
    tmp_path: Path, fields: dict[str, Any], after: list[str]
) -> None:
    with started(tmp_path, {"CHECK": "69"}, preflight=True, requeue=True, **fields) as process:
        assert process.wait(LONG) == 69
    assert not (tmp_path / "training").exists()
    assert events(tmp_path) == after


@pytest.mark.parametrize("container", ["container", "container_image"])
def test_a_report_comes_from_the_container_that_has_srunddp(container: str, tmp_path: Path) -> None:
    text = text_of(nodes=2, ntasks_per_node=4, monitor="2", **{container: "image"})
    training, report = carry_out(text, tmp_path).of("srun")
    assert training[-5:] == ["srunddp", "run", "--monitor=2", "--monitor-dir=logs", "train.py"]
    assert report[-4:] == ["srunddp", "report", "7", "--monitor-dir=logs"]
    assert {"--nodes=1", "--ntasks=1"} <= set(report)
    contained = [
        word for word in training if word.startswith(("apptainer", "--bind", "--container"))
    ]
    assert contained
    assert set(contained) <= set(report)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"script": "train.py"}, "train"),
        ({"script": "of/mine/train.v2.py"}, "train.v2"),
        ({"script": "pkg.train", "module": True}, "train"),
        ({"script": "train", "module": True}, "train"),
        ({"script": "pkg.train", "module": True, "job_name": "mine"}, "mine"),
    ],
    ids=str,
)
def test_a_job_has_the_name_of_what_it_runs(fields: dict[str, Any], name: str) -> None:
    assert f"\n#SBATCH --job-name={name}\n" in render(SlurmJob(**fields), ("srunddp", "sbatch"))


def test_a_module_that_is_not_there_ends_the_job_before_training(tmp_path: Path) -> None:
    called = carry_out(text_of(modules=("no/such",)), tmp_path, CODE_module="1")
    assert called.code == 1
    assert called.of("srun") == []


@pytest.mark.parametrize("fields", [{"modules": ("a",)}, {"conda": "train"}], ids=str)
def test_shell_functions_may_read_variables_that_are_not_set(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    function = "() {  : $NOT_SET_ANYWHERE\n}"
    called = carry_out(
        text_of(**fields),
        tmp_path,
        **{"BASH_FUNC_module%%": function, "BASH_FUNC_conda%%": function},
    )
    assert (called.code, called.errors) == (0, "")
    assert len(called.of("srun")) == 1


SPARED = {"nodes": 4, "ntasks_per_node": 8, "spare_nodes": 1, "restarts": 3}
SPARING = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]


def test_with_spare_nodes_slurm_ends_nothing_when_a_node_is_lost(tmp_path: Path) -> None:
    text = text_of(**SPARED, preflight=True, monitor="2", container="image")
    assert text.startswith(
        "#!/bin/bash\n# train.py on 3 nodes, 8 ranks on each, spare nodes: 1; written by\n"
    )
    assert "\n#SBATCH --nodes=4\n" in text
    assert (
        "\n# Without this, Slurm ends or requeues the whole job when one of its nodes is lost.\n"
        "#SBATCH --no-kill\n" in text
    )
    assert "The first rank that fails ends the others." not in text
    check, training, report = carry_out(text, tmp_path).of("srun")
    assert training[1:4] == SPARING
    words = [
        "--result=",
        "--restarts=3",
        "--spare-nodes=1",
        "--monitor=2",
        "--monitor-dir=logs",
        "train.py",
    ]
    assert [word.partition("/")[0] for word in training[-6:]] == words
    # srun would wait for a task of the check that hangs.
    assert "--kill-on-bad-exit=1" in check
    assert {*check, *report} & {*SPARING, "--spare-nodes=1"} == set()


def test_where_fewer_nodes_are_enough_slurm_ends_nothing_either(tmp_path: Path) -> None:
    text = text_of(nodes=3, ntasks_per_node=2, min_nodes=2, restarts=3, preflight=True)
    assert text.startswith("#!/bin/bash\n# train.py on 3 nodes, 2 ranks on each; written by\n")
    assert "\n#SBATCH --no-kill\n" in text
    check, training = carry_out(text, tmp_path).of("srun")
    assert training[1:4] == SPARING
    assert "--min-nodes=2" in training
    assert "--kill-on-bad-exit=1" in check
    assert not {*check} & {*SPARING, "--min-nodes=2"}


def test_what_is_given_beside_spare_nodes_wins_undoubled(tmp_path: Path) -> None:
    options = {
        "sbatch_arg": ("--no-kill",),
        "srun_arg": ("--wait=9",),
    }
    text = text_of(**SPARED, **options)
    assert text.count("#SBATCH --no-kill") == 1
    training = carry_out(text, tmp_path).training()
    assert [word for word in training if word.startswith("--wait")] == ["--wait=0", "--wait=9"]


@pytest.mark.parametrize(
    ("fields", "exported"),
    [
        ({"restarts": 3}, True),
        (SPARED, True),
        ({}, False),
        ({"restarts": 3, "sbatch_arg": ("--oom-kill-step=1",)}, False),  # as the user says
        ({"restarts": 3, "sbatch_arg": ("--oom-kill-step",)}, False),
    ],
    ids=str,
)
def test_with_restarts_slurm_leaves_srunddp_there_when_memory_runs_out(
    fields: dict[str, Any], exported: bool
) -> None:
    """As a variable: srun before Slurm 24.11 refuses the option, and does not read the variable."""
    lines = render(SlurmJob(script="train.py", **fields), []).splitlines()
    assert ("export SLURM_OOM_KILL_STEP=0" in lines) is exported


def test_restarts_alone_leave_the_first_failure_to_srun(tmp_path: Path) -> None:
    text = text_of(nodes=2, restarts=3)
    assert "--no-kill" not in text
    training = carry_out(text, tmp_path).training()
    assert {"--kill-on-bad-exit=1", "--restarts=3"} <= {*training}
    assert any(word.startswith("--result=") for word in training)


def test_salloc_keeps_an_allocation_that_has_lost_a_node() -> None:
    job = SlurmJob(script="train.py", **SPARED)  # type: ignore[arg-type]
    assert "\n    --no-kill \\\n" in render(job, ("srunddp", "sbatch"), interactive=True)
