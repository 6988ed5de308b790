from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from srunddp.bootstrap.environment import slurm
from srunddp.errors import ConfigError
from tests.conftest import ROOT
from tests.support.launchers import (
    JOB,
    PID,
    batch_body,
    interactive_step,
    nested_in_pty_shell,
    pty_shell,
    step,
)
from tests.support.starting import LONG


@pytest.mark.parametrize(
    ("counts", "expanded"),
    [
        ("4", [4]),
        ("4(x2)", [4, 4]),
        ("2(x2),1", [2, 2, 1]),
        ("3,1(x2)", [3, 1, 1]),
        ("8(x2),4", [8, 8, 4]),
        ("2(x1)", [2]),
        ("128(x1000)", [128] * 1000),
        ("", []),
    ],
)
def test_task_counts_are_unfolded(counts: str, expanded: list[int]) -> None:
    assert slurm.task_counts(counts) == expanded
    assert slurm.task_counts(slurm.fold_counts(expanded)) == expanded


@pytest.mark.parametrize(
    "counts", ["x", "4(x", "4(x2", "4x2", "(x2)", "4(2)", "-1", "4,,2", "4 (x2)", "4(x2)3", "4.0"]
)
def test_wrong_task_counts_are_shown_with_their_variable(counts: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"SLURM_STEP_TASKS_PER_NODE={counts!r}")):
        slurm.task_counts(counts)


RESERVED = {
    "batch": 0xFFFFFFFB,
    "interactive": 0xFFFFFFFA,
    "extern": 0xFFFFFFFC,
    "pending": 0xFFFFFFFD,
}
# Some print them negative.
RESERVED_IDS = [str(number - wrap) for number in RESERVED.values() for wrap in (0, 1 << 32)]


@pytest.mark.parametrize(
    ("variables", "in_step", "in_allocation"),
    [
        (step(), True, True),
        # Salloc's name for the job, which later steps inherit.
        (step(SLURM_JOB_NAME="interactive"), True, True),
        (batch_body(), False, True),
        (JOB, False, True),  # salloc's shell
        *((step(SLURM_STEP_ID=number), False, True) for number in RESERVED_IDS),
        (interactive_step(), False, True),
        ({}, False, False),
        *(
            (step(**{name: ""}), False, True)
            for name in (slurm.RANK, slurm.LOCAL_RANK, slurm.WORLD_SIZE, slurm.STEP_ID)
        ),
    ],
)
def test_a_step_is_told_from_an_allocation(
    variables: dict[str, str], in_step: bool, in_allocation: bool
) -> None:
    assert (slurm.in_step(variables), slurm.in_allocation(variables)) == (in_step, in_allocation)


def test_typed_into_a_pty_shell_is_told_from_srun_pty() -> None:
    assert slurm.read_step(pty_shell(), PID).typed
    assert not slurm.read_step(nested_in_pty_shell(), PID).typed
    assert not slurm.read_step(step(SLURM_PTY_PORT="40001"), PID).typed
    assert slurm.read_step(step(SLURM_PTY_PORT="40001"), PID).direct


TYPED = (
    "import os; from srunddp.bootstrap.environment import slurm;"
    " print(slurm.is_interactive_shell(os.environ['TASK']))"
)


@pytest.mark.parametrize(
    ("shell", "terminal", "typed"),
    [("bash --norc -i", True, True), ("bash", True, False), ("bash -m", False, False)],
    ids=["a-shell-at-a-terminal", "a-script-at-a-terminal", "no-terminal"],
)
def test_typed_command_has_terminal_and_process_group(
    shell: str, terminal: bool, typed: bool, tmp_path: Path
) -> None:
    (tmp_path / "lines").write_text(f'export TASK=$$\n{sys.executable} -c "{TYPED}"\nexit\n')
    command = f"{shell} {tmp_path / 'lines'}" if shell != "bash --norc -i" else shell
    words = ["script", "-qec", command, "/dev/null"] if terminal else command.split()
    done = subprocess.run(
        words,
        cwd=ROOT,
        input=(tmp_path / "lines").read_text(),
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert str(typed) in done.stdout.split(), done.stdout + done.stderr


def test_only_the_steps_own_variables_are_read() -> None:
    """The step runs on a part of the job: nodes 2 and 3 of three."""
    found = slurm.read_step(step(3), PID)
    assert found.nodes == ("node02", "node03")
    assert found.tasks_per_node == (2, 2)
    assert (found.rank, found.world_size) == (3, 4)
    assert found.ranks_here == (2, 3)


def test_reserved_ports_restarts_and_a_host_file_are_read() -> None:
    """In a federation the job's number has ten digits."""
    changes = {
        "SLURM_RESTART_COUNT": "2",
        "SLURM_JOB_ID": "4294967295",
        "SLURM_HOSTFILE": "/home/me/hosts",
    }
    found = slurm.read_step(step(SLURM_STEP_RESV_PORTS="12021-12022,12040", **changes), PID)
    assert found.reserved_ports == (12021, 12022, 12040)
    assert (found.id, found.distribution, found.layout()) == ("4294967295.0.2", "arbitrary", {})
    assert slurm.read_step(step(), PID).id == "1207.0.0"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_PROCID", "-1"),
        ("SLURM_PROCID", "1e3"),
        ("SLURM_PROCID", "0x1"),
        ("SLURM_STEP_NUM_TASKS", "4(x2)"),
        ("SLURM_STEP_NODELIST", "node[1-"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2"),
        ("SLURM_GTIDS", "0,x"),
        ("SLURM_STEP_RESV_PORTS", "12021-"),
        ("SLURM_JOB_ID", "1207;ls"),
        ("SLURM_JOB_ID", "$(ls)"),
        ("SLURM_RESTART_COUNT", "x"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x65537)"),
        ("SLURM_PROCID", "4"),  # of 4
        ("SLURM_GTIDS", "2,3"),  # without rank 0
    ],
)
def test_a_wrong_step_variable_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        slurm.read_step(step(**{name: value}), PID)
    assert name in str(caught.value)
    assert value in str(caught.value)


LAYOUTS = [
    ("block", "2(x2)", "a[1-2]", ["a1", "a1", "a2", "a2"]),
    ("block", "3,1(x2)", "a[1-3]", ["a1", "a1", "a1", "a2", "a3"]),
    ("block:cyclic,Pack", "2,1", "a[1-2]", ["a1", "a1", "a2"]),
    ("cyclic", "2(x2)", "a[1-2]", ["a1", "a2", "a1", "a2"]),
    ("cyclic", "4,1(x2)", "a[1-3]", ["a1", "a2", "a3", "a1", "a1", "a1"]),
    ("cyclic:block", "1,3", "a[1-2]", ["a1", "a2", "a2", "a2"]),
    ("", "1(x3)", "c,a,b", ["c", "a", "b"]),
    ("arbitrary", "2(x2)", "a[1-2]", []),
    ("plane=2", "2(x2)", "a[1-2]", []),
    ("block", "2", "a[1-2]", []),
    ("block", "", "a[1-2]", []),
    ("block", "999999999(x2)", "a[1-2]", []),  # and no list of a thousand million ranks
]


@pytest.mark.parametrize(("distribution", "counts", "nodes", "by_rank"), LAYOUTS)
def test_the_layout_says_the_node_of_each_rank(
    distribution: str, counts: str, nodes: str, by_rank: list[str]
) -> None:
    ranks = str(len(by_rank) or 4)
    changes = {
        "SLURM_DISTRIBUTION": distribution,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_STEP_NUM_TASKS": ranks,
    }
    found = slurm.read_step(step(SLURM_STEP_NODELIST=nodes, SLURM_GTIDS="", **changes), PID)
    assert found.layout() == dict(enumerate(by_rank))


@pytest.mark.parametrize(
    ("components", "spans"),
    [
        (("node[02-03]", "node04"), False),  # srun --het-group=0
        (("node02", "node03"), True),  # srun without it, or --het-group=0,1
        (("node[02-03]", "node[02-03]"), True),  # nobody can tell
        ((), True),
    ],
)
def test_a_step_within_one_component_is_as_any_other(
    components: tuple[str, ...], spans: bool
) -> None:
    """SLURM_HET_SIZE is in the environment of every step of a heterogeneous allocation."""
    groups = {
        f"SLURM_JOB_NODELIST_HET_GROUP_{number}": nodes for number, nodes in enumerate(components)
    }
    found = slurm.read_step(step(SLURM_HET_SIZE="2", **groups), PID)
    assert (found.heterogeneous, bool(found.layout())) == (spans, not spans)
