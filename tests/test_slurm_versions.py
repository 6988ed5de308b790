"""Each row of the table of Slurm's versions in docs/admin.md has a test."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.support.promises import find_tests

# By a row's version and words of what differs.
SHOWN_BY = {
    ("22.05, 23.02", "does not take over sbatch's `--cpus-per-task`"): (
        "tests/bootstrap/environment/test_cpus.py::test_only_fewer_cpus_than_asked_for_are_a_sign",
        "tests/sbatch/test_golden.py::test_the_command_writes_the_script_of_the_golden_file",
    ),
    ("23.02", "if a node is lost, srun ends with 1"): (
        "tests/slurm/test_spare_nodes.py::test_a_training_survives_the_loss_of_a_node",
        "tests/slurm/test_spare_nodes.py::test_out_of_spare_nodes_the_run_ends",
    ),
    ("23.11", "takes it over by `SLURM_TRES_PER_TASK=cpu=N`"): (
        "tests/bootstrap/environment/test_cpus.py::test_since_slurm_23_11_srun_knows_the_jobs_option",
    ),
    ("23.11", "`--gpus-per-task=2`"): (
        "tests/bootstrap/process_group/test_device.py::test_own_gpus_are_told_from_all",
        "tests/bootstrap/process_group/test_device.py::test_what_was_asked_for_each_task_is_its_own",
        "tests/bootstrap/process_group/test_device.py"
        "::test_what_srun_has_bound_to_each_task_is_its_own",
    ),
    ("24.05", "during `GraceTime`"): (
        "tests/sbatch/test_render.py"
        "::test_where_slurm_requeues_a_preempted_job_that_ends_it_does_not_wait",
        "tests/slurm/test_preemption.py"
        "::test_a_preempted_job_has_its_checkpoint_and_goes_on_once_requeued",
    ),
    ("24.11", "OOMKillStep"): (
        "tests/supervisor/test_coordinator.py"
        "::test_where_the_kernel_kills_a_whole_step_memory_is_named",
        "tests/sbatch/test_render.py"
        "::test_with_restarts_slurm_leaves_srunddp_there_when_memory_runs_out",
        "tests/check/checks/test_launch.py"
        "::test_whether_slurm_ends_a_whole_step_for_memory_is_known",
        "tests/slurm/test_control_groups.py"
        "::test_where_slurm_ends_a_whole_step_memory_and_the_option_are_named",
    ),
    ("25.05", "DUE to SIGNAL Killed"): (
        "tests/triage/test_rules.py::test_slurmstepds_lines_since_slurm_25_05_say_the_same",
        "tests/triage/test_rules.py::test_slurm_26_05_is_understood",
    ),
    ("26.05", "SLUID"): (
        "tests/util/test_cgroup.py::test_cpu_time_and_memory_are_those_of_the_whole_job",
    ),
    ("22.05 to 26.05", "options of sbatch"): (
        "tests/sbatch/test_cli.py::test_every_option_of_sbatch_gets_through_by_its_names",
    ),
}


def rows() -> list[tuple[str, str]]:
    """Version, and what differs."""
    page = (ROOT / "docs" / "admin.md").read_text()
    section = page.partition("## Versions of Slurm\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(version.removeprefix("| "), differs) for version, differs, _ in cells[1:]]


@pytest.mark.slow
def test_each_row_has_tests_that_are_there() -> None:
    known = find_tests(ROOT)
    left = dict(SHOWN_BY)
    for version, differs in rows():
        (key,) = [each for each in left if each[0] == version and each[1] in differs]
        assert [test for test in left.pop(key) if test not in known] == []
    assert not left
