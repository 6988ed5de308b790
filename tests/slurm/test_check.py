"""A check before a job names each planted fault, with node, cause and hint, and blames nobody
else.
"""

from __future__ import annotations

import json

import pytest

from tests.chaos.network import link_down, packets_dropped
from tests.cluster.nodes import node
from tests.conftest import PROGRAMS, ROOT
from tests.slurm.conftest import OPEN_MPI, SRUNDDP, SlurmJobRunner
from tests.slurm.planted import (
    SHORT,
    checked,
    full_tmp,
    hidden,
    mtu,
    one_way_dropped,
    own_name_on_loopback,
    slowed,
    with_clock_off,
    with_gpus,
    with_other_torch,
)
from tests.support.facts import tells
from tests.support.starting import write

pytestmark = pytest.mark.slurm

REPORT = str(PROGRAMS / "report.py")
OVER = {
    "SLURM_* alone": (),
    "PMI": ("--mpi=pmi2",),
    "MPI": ("--mpi=pmix",),
}
TWO_EACH = ("-N6", "--ntasks-per-node=2")
ONE_EACH = ("-N3", "--ntasks-per-node=1")  # where three nodes show it as well as six


@pytest.mark.parametrize("channel", ["SLURM_* alone", "PMI", pytest.param("MPI", marks=OPEN_MPI)])
def test_a_healthy_cluster_passes_clean(channel: str, runner: SlurmJobRunner) -> None:
    if channel == "MPI":
        forced: tuple[str, ...] = ("--channel=mpi",)
    else:
        forced = ()
    done = checked(runner, *forced, REPORT, srun=(*TWO_EACH, *OVER[channel]))
    assert (done.code, done.findings) == (0, []), done.errors
    assert done.text.startswith("check of job ")
    assert tells(done.text, "12 of 12 ranks", "6 nodes", "all is well")


def test_the_report_has_a_line_for_each_node(runner: SlurmJobRunner) -> None:
    done = checked(runner, f"--path={ROOT / 'etc'}", REPORT, srun=("-N2", "--ntasks-per-node=1"))
    (text,) = [path.read_text().splitlines() for path in done.folder.glob("preflight.*.txt")]
    assert (
        "node02 launch=ok interface=ok paths=ok versions=ok gpus=ok cpus=ok limits=ok clock=ok"
        " reach=ok" in text
    )


@pytest.mark.gate
def test_faults_beside_the_network_are_named_each_on_its_node(runner: SlurmJobRunner) -> None:
    """Another torch, a full /tmp, a clock that is off, another MTU, a name on loopback: five nodes
    have one each.
    """
    faults = {"node02": with_other_torch(), "node03": full_tmp(runner), "node04": with_clock_off()}
    with mtu(node("node05"), 1400), own_name_on_loopback(node("node06")):
        done = checked(runner, REPORT, faults=faults, srun=("-N6", "--ntasks-per-node=1"))
    assert done.named() == {
        ("FAIL", "versions", "node02"),
        ("FAIL", "limits", "node03"),
        ("WARN", "clock", "node04"),
        ("WARN", "interface", "node05"),
        ("WARN", "interface", "node06"),
    }, done.text
    assert done.code == 69
    assert done.about("versions") == "torch 2.12.1"
    assert done.about("limits") == "0 MiB free in /tmp"
    assert tells(done.about("clock"), "30.0 s ahead")
    assert tells(done.text, "ens1f0", "MTU 1400", "expected 1500", "ip link set ens1f0 mtu 1500")
    assert tells(done.text, "name", "127.0.1.1", "loopback")


def test_a_project_folder_that_a_node_lacks_is_named(runner: SlurmJobRunner) -> None:
    project = runner.cluster.shared / "lab" / "project"
    project.mkdir(parents=True)
    script = write(project / "train.py", "print('trained')\n")
    done = checked(
        runner,
        f"--path={project}",
        str(script),
        faults={"node02": hidden(project.parent)},
        srun=ONE_EACH,
    )
    assert done.named() == {("FAIL", "paths", "node02")}, done.text
    assert done.code == 69
    assert tells(done.text, script, "; expected ", " -> ")
    assert f"{project} is not there" in done.text


def test_one_gpu_that_two_ranks_have_is_named_with_them(runner: SlurmJobRunner) -> None:
    """By a simulated NVML; every node has two GPUs, and one of them the same twice."""
    folder = runner.cluster.shared
    faults = {
        f"node0{number}": with_gpus(folder, f"GPU-{number}a", f"GPU-{number}b")
        for number in range(1, 4)
    }
    faults["node02"] = with_gpus(folder, "GPU-2a", "GPU-2a")
    done = checked(runner, REPORT, faults=faults, srun=("-N3", "--ntasks-per-node=2"))
    assert done.named() == {("FAIL", "gpus", "node02")}, done.text
    assert [each["ranks"] for each in done.findings] == [[2, 3]]
    assert done.code == 69


@pytest.mark.parametrize("channel", ["SLURM_* alone", "PMI"])
def test_a_data_interface_that_is_down_is_named(channel: str, runner: SlurmJobRunner) -> None:
    """Where no other network leads to rank 0, the node says so itself, and rank 0 that it is
    missing.
    """
    with link_down(node("node03")):
        done = checked(
            runner, REPORT, srun=("-N3", "--ntasks-per-node=2", *OVER[channel]), timeout=SHORT
        )
    assert done.code == 69
    words = "interface ens1f0np0 is down on node node03, which has "
    if channel == "PMI":
        assert done.named() == {("FAIL", "interface", "node03")}, done.text
        assert words in done.about("interface")
    else:
        assert done.named() == {("FAIL", "launch", "node03")}, done.text
        assert [each["ranks"] for each in done.findings] == [[4, 5]]
        own = [
            line
            for line in done.errors.splitlines()
            if line.startswith("srunddp: check on node03: ")
        ]
        assert any(words in line for line in own), done.errors


def test_a_wrong_name_in_ifaces_conf_is_named_with_its_line(runner: SlurmJobRunner) -> None:
    text = runner.ifaces.read_text().replace("interface: ens1f0\n", "interface: ens1f9\n")
    wrong = runner.write_ifaces("wrong-name.conf", text)
    done = checked(
        runner,
        REPORT,
        ifaces=wrong,
        srun=("-N2", "-wnode01,node05", "--ntasks-per-node=1", "--mpi=pmi2"),
    )
    assert done.named() == {("FAIL", "interface", "node05")}, done.text
    assert tells(done.about("interface"), f"{wrong}:13:3", "ens1f9", "node05")


@pytest.mark.gate
def test_packets_lost_one_way_name_the_pair_and_the_direction(runner: SlurmJobRunner) -> None:
    with one_way_dropped(node("node03"), node("node05")):
        done = checked(runner, srun=("-N3", "-wnode01,node03,node05", "--ntasks-per-node=1"))
    assert done.named() == {("FAIL", "reach", "node03 -> node05")}, done.text
    assert "random" in done.findings[0]["expected"]


@pytest.mark.parametrize(
    ("hook", "words"),
    [("output", "nothing that it sends from"), ("input", "nothing that others send to")],
)
def test_a_node_that_is_cut_off_is_named_alone(
    hook: str, words: str, runner: SlurmJobRunner
) -> None:
    with packets_dropped(node("node04"), hook):
        done = checked(runner, srun=("-N4", "--ntasks-per-node=1", "--mpi=pmi2"))
    assert done.named() == {("FAIL", "reach", "node04")}, done.text
    assert done.about("reach").startswith(f"{words} 10.88.0.14 reaches "), done.text


def test_one_slow_link_alone_is_named(runner: SlurmJobRunner) -> None:
    with slowed(node("node02"), "50mbit"):
        done = checked(runner, "--collective", srun=("-N4", "--ntasks-per-node=1"))
    assert done.named() == {("WARN", "rate", "node02")}, done.text
    assert done.about("rate").startswith("it sends at most ")
    assert done.code == 0
    assert tells(done.text, "gloo", "32 KiB")


def test_the_smallest_world_of_a_run_is_tested_alone_too(runner: SlurmJobRunner) -> None:
    """By an all-reduce over the first two nodes; srun has what a run needs to lose a node."""
    enough = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
    srun = ("-N3", "--ntasks-per-node=2", *enough)
    done = checked(runner, "--collective", "--min-nodes=2", srun=srun)
    assert (done.code, done.named()) == (0, set()), done.text
    (line,) = [each for each in done.text.splitlines() if each.startswith("ok  fewer-nodes ")]
    assert tells(line, "4 of 6 ranks", "2 of 3 nodes", "first 2 nodes", "gloo", "32 KiB")


def test_a_check_without_srun_in_an_allocation_says_so(runner: SlurmJobRunner) -> None:
    done = runner.batch(
        f"{SRUNDDP} check --output-dir=$SLURM_SUBMIT_DIR/..; echo code $?",
        "-N2",
        "--ntasks-per-node=2",
    )
    assert "code 69" in done.output
    assert tells(done.output, "one process", "Slurm", "4 tasks", "srun")


def test_one_rank_that_lost_what_srun_told_it_is_named(runner: SlurmJobRunner) -> None:
    """Such as below a wrapper that cleans its environment: it is a single process, and rank 0
    misses it.
    """
    cleaned = (
        'if [ "$SLURM_LOCALID" = 1 ]; then exec env -i PATH="$PATH" VIRTUAL_ENV="$VIRTUAL_ENV"'
        ' "$@"; fi'
    )
    done = checked(
        runner,
        REPORT,
        faults={"node02": cleaned},
        srun=("-N3", "--ntasks-per-node=2"),
        timeout=SHORT,
    )
    assert done.code == 69
    assert ("FAIL", "launch", "node02") in done.named(), done.text
    (missing,) = [each for each in done.findings if each["check"] == "launch"]
    assert missing["ranks"] == [3]


def test_mpi_without_its_world_is_named_where_the_script_uses_it(runner: SlurmJobRunner) -> None:
    script = write(runner.cluster.shared / "uses_mpi.py", "from mpi4py import MPI\n")
    done = checked(runner, str(script), srun=("-N2", "--ntasks-per-node=1", "--mpi=none"))
    assert done.named() == {("FAIL", "launch", "node01,node02")}, done.text
    assert done.about("launch").startswith(
        "the script imports mpi4py, and mpi4py uses Open MPI, and none of "
    )
    assert (
        checked(runner, str(script), srun=("-N2", "--ntasks-per-node=1", "--mpi=pmix")).findings
        == []
    )


def test_the_report_is_there_for_programs(runner: SlurmJobRunner) -> None:
    done = checked(runner, srun=("-N2", "--ntasks-per-node=1"))
    (path,) = done.folder.glob("preflight.*.json")
    report = json.loads(path.read_text())
    assert (report["exit_code"], [rank["node"] for rank in report["ranks"]]) == (
        0,
        ["node01", "node02"],
    )
    assert report["ranks"][1]["checks"]["interface"]["facts"]["address"] == "10.88.0.12"
