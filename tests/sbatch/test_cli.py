"""``srunddp sbatch`` and ``srunddp mpirun`` as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.run.test_cli import one_message
from tests.support.starting import srunddp, write


def stub(folder: Path, name: str, text: str) -> str:
    """A program in PATH; returns that PATH."""
    path = write(folder / "bin" / name, f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return f"{path.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("command", ["sbatch", "mpirun"])
def test_an_unknown_option_names_the_nearest(command: str, tmp_path: Path) -> None:
    done = srunddp(command, "--ndoes=2", "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert "No such option '--ndoes'" in done.stderr
    assert "--nodes" in done.stderr


def test_an_unknown_key_of_a_file_names_the_nearest_with_line_and_column(tmp_path: Path) -> None:
    write(tmp_path / "job.yaml", "script: train.py\ngpus-per-nod: 4\n")
    text = one_message(srunddp("sbatch", "--config=job.yaml", folder=tmp_path))
    assert "job.yaml:2:1: gpus-per-nod is an unknown key; " in text
    assert text.endswith("-> did you mean gpus_per_node?")


@pytest.mark.parametrize(("option", "line"), [("--nodes=two", "nodes: two"), ("--requeue=maybe", "requeue: maybe")])
def test_the_command_line_and_a_file_have_the_same_types(option: str, line: str, tmp_path: Path) -> None:
    write(tmp_path / "job.yaml", f"{line}\n")
    by_option = one_message(srunddp("sbatch", option, "train.py", folder=tmp_path))
    by_file = one_message(srunddp("sbatch", "--config=job.yaml", "train.py", folder=tmp_path))
    assert by_option.removeprefix("--") == by_file.partition("job.yaml:1:")[2].partition(": ")[2]


def test_a_file_may_say_everything_and_the_command_line_wins(tmp_path: Path) -> None:
    text = "script: train.py\narguments: [--lr, 1e-3, 'a b']\nnodes: 2\nrequeue: true\ntime: 10:15\nmodules: [A/1, B]\n"
    write(tmp_path / "job.yaml", text)
    script = srunddp("sbatch", "--config=job.yaml", folder=tmp_path).stdout
    for line in ("#SBATCH --nodes=2", "#SBATCH --requeue", "#SBATCH --time=10:15", "module load A/1 B"):
        assert f"\n{line}\n" in script
    assert "run train.py --lr 1e-3 'a b' ||" in script
    options = ("--nodes=3", "--requeue=false", "--time=none", "other.py", "--epochs=1")
    script = srunddp("sbatch", "--config=job.yaml", *options, folder=tmp_path).stdout
    assert "#SBATCH --nodes=3\n" in script
    assert "#SBATCH --requeue" not in script
    assert "#SBATCH --time" not in script
    assert script.endswith("run other.py --epochs=1\n")


def test_a_flag_takes_nothing_that_follows_it_and_the_scripts_options_are_its_own(tmp_path: Path) -> None:
    script = srunddp("sbatch", "--requeue", "train.py", "--requeue", "--nodes=7", "--help", folder=tmp_path).stdout
    assert "#SBATCH --requeue\n" in script
    assert "#SBATCH --nodes=1\n" in script
    assert "train.py --requeue --nodes=7 --help ||" in script


def test_the_help_names_every_option_with_its_sentence(tmp_path: Path) -> None:
    done = srunddp("sbatch", "--help", folder=tmp_path)
    assert done.returncode == 0
    for option in ("--gpus-per-node", "--container-image", "--requeue", "--submit", "--salloc", "--config FILE"):
        assert option in done.stdout


def test_the_active_environment_is_taken_and_said(tmp_path: Path) -> None:
    venv = tmp_path / "active"
    for name in ("python", "srunddp"):
        write(venv / "bin" / name, "").chmod(0o755)
    # bin/srunddp would go on in that environment's Python.
    done = srunddp(
        "sbatch", "train.py", folder=tmp_path, VIRTUAL_ENV=str(venv), SRUNDDP_PYTHON=str(venv / "bin/python")
    )
    assert f"srunddp: note: no environment is named: {venv}, which is active here\n" in done.stderr
    assert f"export VIRTUAL_ENV={venv}\n" in done.stdout
    assert "No environment was named" in done.stdout
    assert done.stdout.endswith("  srunddp run train.py\n")


def test_without_an_environment_the_nodes_start_this_very_srunddp(tmp_path: Path) -> None:
    command = srunddp("sbatch", "train.py", folder=tmp_path).stdout.splitlines()[-1].split()[0]
    assert os.access(command, os.X_OK)
    assert command.endswith("/bin/srunddp")


def test_what_is_not_there_is_said_and_what_is_wrong_is_refused(tmp_path: Path) -> None:
    done = srunddp("sbatch", "--venv=gone", "--ifaces=none.conf", "train.py", folder=tmp_path)
    for line in ("train.py is not seen here", "--ifaces none.conf is not seen here", "--venv gone is not seen here"):
        assert f"srunddp: note: {line}\n" in done.stderr
    (tmp_path / "venv").mkdir()
    text = one_message(srunddp("sbatch", "--venv=venv", "train.py", folder=tmp_path))
    assert text.startswith("--venv venv has no bin/python; expected a virtual environment")


def test_what_is_exported_for_sbatch_is_said_as_it_wins(tmp_path: Path) -> None:
    done = srunddp("sbatch", "train.py", folder=tmp_path, SBATCH_PARTITION="debug")
    assert "SBATCH_PARTITION=debug is exported, which wins over the script's own line at sbatch\n" in done.stderr


def test_submit_makes_the_log_folder_gives_sbatch_the_script_and_prints_the_number(tmp_path: Path) -> None:
    path = stub(tmp_path, "sbatch", 'cat >given; echo "$*" >words; ls -d logs >folder; echo "4711;cluster"')
    done = srunddp("sbatch", "--submit", "train.py", folder=tmp_path, PATH=path)
    assert (done.returncode, done.stdout) == (0, "4711\n")
    assert (tmp_path / "words").read_text() == "--parsable\n"
    assert (tmp_path / "folder").read_text() == "logs\n"
    printed = srunddp("sbatch", "train.py", folder=tmp_path, PATH=path).stdout
    assert (tmp_path / "given").read_text() == printed.replace("sbatch train.py", "sbatch --submit train.py")


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account", 78),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", 69),
    ],
)
def test_a_refusal_of_slurm_is_one_line_with_its_words(said: str, code: int, tmp_path: Path) -> None:
    path = stub(tmp_path, "sbatch", f'echo "{said}" >&2; exit 1')
    done = srunddp("sbatch", "--submit", "train.py", folder=tmp_path, PATH=path)
    assert done.returncode == code
    (line,) = [line for line in done.stderr.splitlines() if "note: " not in line]
    assert line.startswith(f"srunddp: error: sbatch: {said.removeprefix('sbatch: error: ')}; expected ")


def test_without_slurm_submit_says_so(tmp_path: Path) -> None:
    done = srunddp("sbatch", "--submit", "train.py", folder=tmp_path, PATH="/nowhere")
    assert done.returncode == 69
    assert "srunddp: error: no sbatch in PATH; expected Slurm -> submit it on a login node\n" in done.stderr


def test_salloc_is_given_the_options_and_the_script(tmp_path: Path) -> None:
    program = "import json, sys; json.dump(sys.argv[1:], open('given', 'w'))"
    path = stub(tmp_path, "salloc", f'exec /usr/bin/env python3 -c "{program}" "$@"')
    options = ("--salloc", "--nodes=2", "--job-name=a $(b)", "train.py")
    assert srunddp("sbatch", "--submit", *options, folder=tmp_path, PATH=path).returncode == 0
    given = json.loads((tmp_path / "given").read_text())
    assert given[:5] == ["--job-name=a $(b)", "--nodes=2", "--ntasks-per-node=1", "bash", "-c"]
    text = given[5].replace("sbatch --submit", "sbatch")
    assert text == srunddp("sbatch", *options, folder=tmp_path, PATH=path).stdout


def test_the_script_is_one_that_bash_reads(tmp_path: Path) -> None:
    done = srunddp("sbatch", "--monitor=5", "--requeue", "--preflight", "train.py", folder=tmp_path)
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0


def test_what_sbatch_says_besides_is_passed_on_and_the_number_is_found_among_greetings(tmp_path: Path) -> None:
    path = stub(tmp_path, "sbatch", "printf 'sbatch: caf\\351 is closed\\n' >&2; echo welcome; echo '4711;cluster'")
    done = srunddp("sbatch", "--submit", "train.py", folder=tmp_path, PATH=path)
    assert (done.returncode, done.stdout) == (0, "4711\n")
    assert "srunddp: note: sbatch: caf\N{REPLACEMENT CHARACTER} is closed\n" in done.stderr


def test_nothing_of_the_job_that_the_shell_is_in_reaches_the_next(tmp_path: Path) -> None:
    path = stub(tmp_path, "sbatch", "env >variables; echo 1")
    srunddp("sbatch", "--submit", "train.py", folder=tmp_path, PATH=path, SLURM_CPUS_PER_TASK="7", SLURM_CONF="/c")
    given = (tmp_path / "variables").read_text()
    assert "SLURM_CONF=/c\n" in given
    assert "SLURM_CPUS_PER_TASK" not in given


def test_a_conda_environment_is_found_by_its_name_not_by_a_folder_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    script = srunddp("sbatch", "--conda=train", "train.py", folder=tmp_path).stdout
    assert script.splitlines()[-1].split()[0] == "srunddp"
    assert "unset VIRTUAL_ENV" in script


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ("--log-dir=~/logs", "--log-dir '~/logs'; expected a path without ~"),
        ("--env=UID=5", "--env UID; expected no variable of bash's"),
        ("--env=code=5", "--env code; expected no variable of bash's or the script's own"),
    ],
)
def test_what_the_shell_would_read_otherwise_is_refused(option: str, found: str, tmp_path: Path) -> None:
    assert found in one_message(srunddp("sbatch", option, "train.py", folder=tmp_path))


def test_a_log_folder_is_left_out_of_what_is_staged_however_it_is_written(tmp_path: Path) -> None:
    options = ("--venv=venv", "--stage", "--log-dir=./logs [1]/", "train.py")
    script = srunddp("sbatch", *options, folder=tmp_path).stdout
    assert "--exclude '/logs [[]1]')" in script


def test_an_interactive_script_that_is_no_file_says_so_and_allocates_nothing(tmp_path: Path) -> None:
    script = srunddp("sbatch", "--salloc", "train.py", folder=tmp_path).stdout
    path = stub(tmp_path, "salloc", "touch allocated")
    done = subprocess.run(["bash"], input=script, cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (78, "this script has to be a file: bash FILE\n")
    assert not (tmp_path / "allocated").exists()


def test_a_full_standard_output_is_one_message(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, str(ROOT / "bin" / "srunddp"), "sbatch", "train.py"]
        done = subprocess.run(words, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 74
    assert done.stderr.splitlines()[-1].startswith("srunddp: error: standard output: No space left on device")
