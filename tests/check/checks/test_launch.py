"""How the ranks were started: one process where many were meant, a script that does not parse, MPI
without a world.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from srunddp.check.checks import launch
from srunddp.check.checks.launch import CHECK, LaunchFacts, evaluate, summary
from srunddp.check.finding import Severity
from tests.support.facts import tells
from tests.support.made_up_site import LOCAL_RANK_1, changed, reported, subject, travelled
from tests.support.starting import LONG, slurm, write

WELL = LaunchFacts(
    launcher="Slurm", channel="slurm", world_size=12, allocated=0, script="", uses_mpi=False, mpi=""
)


def facts(tmp_path: Path, text: str, variables: dict[str, str] | None = None) -> LaunchFacts:
    """Of a script with this text."""
    return travelled(CHECK, subject(variables, write(tmp_path / "train.py", text)))


# What is collected.


def test_the_launcher_and_the_channel_travel() -> None:
    assert travelled(CHECK, subject()) == replace(
        WELL, launcher="none", channel="none", world_size=1
    )
    known = travelled(CHECK, subject(slurm(1, 4)))
    assert (known.launcher, known.channel, known.world_size, known.allocated) == (
        "Slurm",
        "slurm",
        4,
        0,
    )


@pytest.mark.parametrize(
    ("variables", "tasks"),
    [
        ({}, 0),
        ({"SLURM_NTASKS": "8"}, 0),  # without a job it says nothing
        ({"SLURM_JOB_ID": "7"}, 1),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, 8),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, 2),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "16"}, 16),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "eight"}, 1),
        (LOCAL_RANK_1 | {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, 0),  # below another launcher
        # The shell that salloc starts on a node is a step, but none of srun's tasks.
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4"}, 4),
    ],
)
def test_a_process_without_srun_knows_the_tasks_of_its_job(
    variables: dict[str, str], tasks: int
) -> None:
    assert travelled(CHECK, subject(variables)).allocated == tasks


@pytest.mark.parametrize(("value", "known"), [("", False), ("0", False), ("1", True)])
def test_whether_slurm_ends_a_whole_step_for_memory_is_known(value: str, known: bool) -> None:
    variables = slurm(1, 4) | {"SLURM_OOM_KILL_STEP": value}
    assert travelled(CHECK, subject(variables)).oom_kill_step is known


def test_a_syntax_error_is_said_with_file_and_line(tmp_path: Path) -> None:
    assert (
        facts(tmp_path, "import os\nfor x in:\n").script == f"{tmp_path}/train.py:2: invalid syntax"
    )
    assert facts(tmp_path, "x = 1\0").script.startswith(f"{tmp_path}/train.py:1: ")
    assert facts(tmp_path, "# coding: nothing\n").script.startswith(f"{tmp_path}/train.py:1: ")
    too_deep_for_ast = "x = " + "+".join(["1"] * 9999)
    assert facts(tmp_path, too_deep_for_ast).script == ""
    for script in (tmp_path / "gone.py", tmp_path):  # which is another check's
        assert travelled(CHECK, subject(script=script)).script == ""


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("from mpi4py import MPI", True),
        ("import mpi4py.MPI as m", True),
        ("def f():\n    import os, mpi4py", True),
        ("from mpi4py.futures import MPIPoolExecutor", True),
        ("from .mpi4py import x", False),
        ("import mpi4py_fft", False),
        ("# import mpi4py", False),
    ],
)
def test_an_import_of_mpi4py_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, uses: bool
) -> None:
    monkeypatch.setattr(launch, "why_no_mpi", lambda _: "no world")
    known = facts(tmp_path, text)
    assert (known.uses_mpi, known.mpi) == (uses, "no world" if uses else "")
    assert facts(tmp_path, text, LOCAL_RANK_1).mpi == ""  # one rank of each node tries it


@pytest.mark.parametrize(
    ("module", "variables", "said"),
    [
        (
            "def Get_library_version(): return 'Open MPI v5'",
            {},
            "mpi4py uses Open MPI, and none of ",
        ),
        ("def Get_library_version(): return 'Open MPI v5'", {"OMPI_COMM_WORLD_SIZE": "2"}, ""),
        (
            "def Get_library_version(): return 'Odd MPI'",
            {},
            "mpi4py uses an MPI that srunddp does not know",
        ),
        (
            "raise RuntimeError('cannot load libmpi')",
            {},
            "mpi4py cannot be imported: RuntimeError: cannot load libmpi",
        ),
        ("raise ImportError('no mpi4py')", {}, "mpi4py cannot be imported: ImportError: no mpi4py"),
        ("import os; os._exit(3)", {}, "mpi4py cannot be imported: exit code 3"),
        ("import time; time.sleep(600)", {}, "mpi4py cannot be imported: it took more than 1 s"),
    ],
)
def test_what_keeps_a_script_from_mpi_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    variables: dict[str, str],
    said: str,
) -> None:
    write(tmp_path / "mpi4py" / "__init__.py", "class rc: pass\n")
    write(tmp_path / "mpi4py" / "MPI.py", module + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch, "_LIBRARY_WITHIN", 1.0 if "sleep" in module else LONG)
    words = launch.why_no_mpi(variables)
    assert words.startswith(said)
    assert bool(words) == bool(said)
    assert "mpi4py" not in sys.modules


# What is wrong.


def test_where_all_is_well_the_ranks_are_counted_alone() -> None:
    assert reported(evaluate(changed(WELL, {}))) == []
    assert (
        reported(
            evaluate(changed(WELL, {0: {"allocated": 1}, 1: {"uses_mpi": True, "channel": "mpi"}}))
        )
        == []
    )
    assert tells(summary(changed(WELL, {}, ranks=11)), "11 of 12 ranks", "Slurm", "slurm")


@pytest.mark.parametrize(
    ("change", "level", "found"),
    [
        (
            {"allocated": 2},
            Severity.FAIL,
            "one process, in an allocation of Slurm for 2 tasks: it was started without",
        ),
        (
            {"script": "/a/train.py:3: invalid syntax"},
            Severity.FAIL,
            "/a/train.py:3: invalid syntax",
        ),
        (
            {"uses_mpi": True, "mpi": "no world"},
            Severity.FAIL,
            "the script imports mpi4py, and no world",
        ),
        (
            {"uses_mpi": True, "mpi": "none", "channel": "pmi"},
            Severity.FAIL,
            "the script imports mpi4py, and none",
        ),
        (
            {"uses_mpi": True, "channel": "pmi"},
            Severity.WARN,
            "the script imports mpi4py, and the ranks meet over PMI",
        ),
        ({"oom_kill_step": True}, Severity.WARN, "OOMKillStep is on: "),
    ],
)
def test_what_is_wrong_is_named_on_its_node(
    change: dict[str, Any], level: Severity, found: str
) -> None:
    ((known, words, nodes, _),) = reported(evaluate(changed(WELL, {4: change})))
    assert (known, nodes) == (level, ("node03",))
    assert words.startswith(found)
