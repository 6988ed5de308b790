"""What may not be as it is meant is noted, before a script is written. Refusals:
tests/util/wrong_inputs.yaml.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from srunddp.errors import ConfigError, UsageError
from srunddp.sbatch import validate
from srunddp.sbatch.spec import SlurmJob
from tests.support.facts import tells
from tests.support.starting import write


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"env": ("NCCL_SOCKET_IFNAME=ib0",)},
            "NCCL_SOCKET_IFNAME=ib0 is for every node, and wins over ifaces.conf",
        ),
        (
            {"sbatch_arg": ("--gpus-per-node=4",), "ntasks_per_node": 8},
            "more ranks than GPUs on each node, 8 and 4: several ranks share one",
        ),
        (
            {"sbatch_arg": ("--gres=gpu:4",), "ntasks_per_node": 1},
            "fewer ranks than GPUs on each node, 1 and 4",
        ),
        ({"requeue": True}, "--requeue without an argument such as --resume=auto"),
        (
            {"sbatch_arg": ("--gpus-per-node=4",)},
            (
                "no --cpus-per-task: the site's default, often one CPU for a rank and its loader"
                " workers"
            ),
        ),
        (
            {"venv": "gone", "ifaces": "a.conf"},
            "a.conf is not seen here\ngone/bin/python is not seen here",
        ),
        (
            {"sbatch_arg": ("--image=x",)},
            "--image is unknown to srunddp, and passed to sbatch as it is",
        ),
        (
            {"sbatch_arg": ("--x=1", "--ndoes=2")},
            "passed to sbatch as it is; did you mean --nodes?",
        ),
        (
            {"script": "tests/__init__.py", "signal": "USR1@60"},
            "no sign that it catches the signal of USR1@60",
        ),
        (
            {"sbatch_arg": ("--oom-kill-step",), "restarts": 3},
            "--oom-kill-step with --restarts: when memory runs out Slurm ends srunddp as well, and"
            " no restart follows",
        ),
        ({}, "SBATCH_PARTITION=debug is exported, which wins over the script's own line at sbatch"),
    ],
    ids=str,
)
def test_notes_say_what_may_be_meant_otherwise(fields: dict[str, Any], said: str) -> None:
    job = SlurmJob(**{"script": "train.py", **fields})
    validate.check(job, {})
    assert said in "\n".join(validate.notes(job, {"SBATCH_PARTITION": "debug", "SBATCH_QOS": ""}))


def test_nothing_is_noted_of_what_was_not_given() -> None:
    assert list(validate.notes(SlurmJob(script=__file__), {})) == []


@pytest.mark.parametrize(
    ("printed", "noted"),
    [
        ("(null)", True),
        ("(null)\nshard:4", True),
        ("(null)\ngpu:a100:4(S:0-1)", False),
        ("nic:1,gpu:2", False),
        ("", False),  # sinfo does not answer
    ],
)
def test_gpus_that_slurm_does_not_have_are_noted(
    printed: str, noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = write(tmp_path / "sinfo", f"#!/bin/bash\nprintf '{printed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpus = SlurmJob(script=__file__, cpus_per_task=1, sbatch_arg=("--gpus-per-node=8",))
    notes = list(validate.notes(gpus, {}))
    assert [tells(note, "no node has", "8 ranks") for note in notes] == [True] * noted
    assert list(validate.notes(SlurmJob(script=__file__), {})) == []


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (("--time=99:00:00",), "1-00:00:00 in partition gpu"),
        (("--time=1-00:00:00",), ""),
        (("--time=1440",), ""),
        (("--time=1441",), "1-00:00:00"),
        (("--time=2-0", "--partition=urgent,gpu"), "1-00:00:00"),
        (("--time=90:00", "--partition=urgent"), "1:00:00 in partition urgent"),
        (("--time=400-0", "--partition=long"), ""),
        (("--time=400-0", "--partition=unknown"), ""),
        (("--time=often",), ""),
        (("--time=99:00:00", "--time-min=1:00:00"), ""),
        (("--time=99:00:00", "SBATCH_PARTITION=long"), ""),
        (("--time=99:00:00", "SBATCH_CLUSTERS=other"), ""),
        (("--time=99:00:00", "SBATCH_TIMELIMIT=60"), ""),
        (("SBATCH_TIMELIMIT=99:00:00",), "1-00:00:00 in partition gpu"),
        (("--time=90:00", "SBATCH_PARTITION=urgent"), "1:00:00 in partition urgent"),
        (("--time=90:00", "SALLOC_PARTITION=urgent"), ""),
        (("salloc", "--time=90:00", "SALLOC_PARTITION=urgent"), "1:00:00 in partition urgent"),
        (("salloc", "--time=90:00", "SBATCH_PARTITION=urgent"), ""),
        (("salloc", "--time=90:00", "--partition=long", "SALLOC_PARTITION=urgent"), ""),
    ],
    ids=str,
)
def test_a_time_limit_that_no_partition_allows_is_noted(
    words: tuple[str, ...], limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time limit and the partition that count, whatever gives them."""
    options = tuple(word for word in words if word.startswith("-"))
    exported = dict(word.split("=", 1) for word in words if word.startswith(("SB", "SA")))
    interactive = "salloc" in words
    rows = "gpu* 1-00:00:00\\nurgent 1:00:00\\nlong infinite\\n"
    write(tmp_path / "sinfo", f"#!/bin/bash\nprintf '{rows}'\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = SlurmJob(script=__file__, sbatch_arg=options)
    notes = [
        note
        for note in validate.notes(job, exported, interactive=interactive)
        if "is exported" not in note
    ]
    assert [tells(note, limit, "wait") for note in notes] == [True] * bool(limit)


def test_nothing_is_noted_of_a_job_that_says_everything() -> None:
    words = (
        "--gpus-per-node=2",
        "--time=1",
        "--partition=gpu",
        "--mem-per-gpu=1G",
        "--cpus-per-gpu=8",
    )
    job = SlurmJob(script=__file__, sbatch_arg=words, env=("NCCL_DEBUG=INFO",))
    assert list(validate.notes(job, {})) == []


@pytest.mark.parametrize(
    ("word", "count"),
    [
        ("--gpus-per-node=4", 4),
        ("--gpus-per-node=a100:2,v100:1", 3),
        ("--gres=gpu:2080ti:4,tmpfs:100G", 4),
        ("--gres=gpu:1g.5gb:4", 4),
        ("--gres=gpu", 1),
        ("--gres=shard:8", 0),
        ("--exclusive", 0),
    ],
)
def test_gpus_are_counted_in_slurms_words(word: str, count: int) -> None:
    assert SlurmJob(sbatch_arg=(word,)).gpus == count
    # There is one rank for each GPU unless said otherwise.
    assert SlurmJob(sbatch_arg=(word,)).tasks == (count or 1)
    assert SlurmJob(sbatch_arg=(word,), ntasks_per_node=2).tasks == 2


@pytest.mark.parametrize(
    ("fields", "gpus", "tasks", "nodes"),
    [
        ({"sbatch_arg": ("--gpus=a100:8",), "nodes": 2}, 4, 4, 2),
        ({"sbatch_arg": ("--gpus-per-task=2",)}, 2, 1, 1),
        ({"sbatch_arg": ("--gpus-per-task=1",), "ntasks_per_node": 4}, 4, 4, 1),
        ({"sbatch_arg": ("--tres-per-task=cpu=4,gres/gpu:a100=2",)}, 2, 1, 1),
        ({"sbatch_arg": ("--tres-per-task=gres/gpu:1",), "ntasks_per_node": 4}, 4, 4, 1),
        # Slurm decides how many nodes, and ranks on each.
        ({"sbatch_arg": ("--ntasks=8", "--gpus-per-node=4")}, 4, 0, None),
        (
            {"sbatch_arg": ("--ntasks=8", "--gpus-per-node=4"), "nodes": 2, "ntasks_per_node": 4},
            4,
            4,
            2,
        ),
        ({"sbatch_arg": ("--gpus-per-socket=2",)}, 0, 1, 1),
    ],
    ids=str,
)
def test_size_follows_the_options_that_are_passed_on(
    fields: dict[str, Any], gpus: int, tasks: int, nodes: int | None
) -> None:
    job = SlurmJob(script="train.py", **fields)
    assert (job.gpus, job.tasks, job.node_count, job.has_gpus) == (gpus, tasks, nodes, True)


def test_other_resources_of_a_task_are_no_gpus() -> None:
    assert not SlurmJob(script="train.py", sbatch_arg=("--tres-per-task=cpu=4",)).has_gpus


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        (
            "#!/bin/bash\ntorchrun train.py\n",
            "job is a shell script",
            "if it starts torchrun or accelerate: srunddp sbatch --from job",
        ),
        ("a = 1\nfor\n", "job:2: invalid syntax", "correct the script"),
        ("\0", "job:1: source code string cannot contain null bytes", "correct the script"),
        (None, "job is not seen here: No such file", "correct the path"),
        ("#!/usr/bin/env python3\nprint('\\d')\n", None, None),
        ("PK", None, None),
    ],
    ids=str,
)
def test_script_problem_tells_what_cannot_run(
    text: str | None,
    said: str | None,
    hint: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "job").write_text(text)
    problem = validate.script_problem(SlurmJob(script="job"))
    if said is None:
        assert problem is None
    else:
        assert problem is not None
        assert said in problem[0]
        assert problem[1].startswith(str(hint))
    assert validate.script_problem(SlurmJob(script="job", module=True)) is None


SPARED = {"nodes": 2, "ntasks_per_node": 2, "restarts": 1, "spare_nodes": 1}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ""),
        (
            {"nodes": None, "sbatch_arg": ("--ntasks=8",)},
            "--spare-nodes 1 with --nodes unset; expected 2 ranks or more",
        ),
        (
            {"restarts": None},
            "--spare-nodes 1 without --restarts; expected both -> add --restarts=3",
        ),
        (
            {"spare_nodes": 2},
            "--spare-nodes 2 with --nodes 2; expected 2 ranks or more on the others",
        ),
        (
            {"ntasks_per_node": 1},
            "--spare-nodes 1 with --nodes 2; expected 2 ranks or more on the others",
        ),
        ({"spare_nodes": 0}, ""),
        ({"spare_nodes": None, "min_nodes": 2}, ""),
        (
            {"spare_nodes": None, "min_nodes": 2, "restarts": None},
            "--min-nodes 2 without --restarts; expected both -> add --restarts=3",
        ),
        ({"min_nodes": 2}, "--min-nodes 2 of 1 nodes with ranks; expected 1 at most"),
        (
            {"srun_arg": ("--min-nodes=2",)},
            "--srun-arg '--min-nodes=2'; expected --min-nodes, which srunddp sbatch has as well",
        ),
    ],
    ids=str,
)
def test_spare_nodes_need_restarts_and_other_nodes(fields: dict[str, Any], said: str) -> None:
    job = SlurmJob(script="train.py", **SPARED | fields)
    with pytest.raises(ConfigError) if said else contextlib.nullcontext() as raised:
        validate.check(job, {})
    assert raised is None or str(raised.value).startswith(said)


def test_a_wrong_number_of_nodes_is_told_before_what_follows_from_it() -> None:
    fields: dict[str, Any] = {"nodes": 1, "spare_nodes": 2, "restarts": 1, "log_dir": "logs"}
    job = SlurmJob(script="train.py", run_options=("--show-ranks=0",), **fields)
    assert job.world_size == 0
    with pytest.raises(ConfigError, match="--spare-nodes 2 with --nodes 1"):
        validate.check(job, {})


@pytest.mark.parametrize(
    ("fields", "environ", "is_refused"),
    [
        ({}, {}, True),
        ({"log_dir": "logs"}, {}, False),
        ({}, {"SRUNDDP_LOG_DIR": "logs"}, False),
        ({}, {"SRUNDDP_LOG_DIR": ""}, True),
        ({"env": ("SRUNDDP_LOG_DIR=logs",)}, {}, False),
        ({"env": ("SRUNDDP_LOG_DIR=",)}, {"SRUNDDP_LOG_DIR": "logs"}, True),
        ({"setup": ("export SRUNDDP_LOG_DIR=logs",)}, {}, False),
        ({"sbatch_arg": ("--export=NONE",)}, {"SRUNDDP_LOG_DIR": "logs"}, True),
        ({"sbatch_arg": ("--export=A=1,ALL",)}, {"SRUNDDP_LOG_DIR": "logs"}, False),
        ({"sbatch_arg": ("--export=A,SRUNDDP_LOG_DIR",)}, {"SRUNDDP_LOG_DIR": "logs"}, False),
    ],
    ids=str,
)
def test_an_option_that_needs_another_takes_its_variable_too(
    fields: dict[str, Any], environ: dict[str, str], is_refused: bool
) -> None:
    """The job gets the variables of whoever submits it, unless --export says otherwise."""
    job = SlurmJob(script="train.py", run_options=("--show-ranks=0",), **fields)
    with pytest.raises(UsageError) if is_refused else contextlib.nullcontext():
        validate.check(job, environ)


def test_the_monitors_folder_takes_the_monitors_variable() -> None:
    job = SlurmJob(script="train.py", monitor_dir="m")
    validate.check(job, {"SRUNDDP_MONITOR": "5"})
    with pytest.raises(UsageError):
        validate.check(job, {})
