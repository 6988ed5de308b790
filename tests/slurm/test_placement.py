"""Every rank knows its place, however srun laid the tasks out. No torch: each run takes a fraction
of a second.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.cluster.nodes import NODES
from tests.conftest import PROGRAMS
from tests.slurm.conftest import OPEN_MPI, SRUNDDP, SlurmJobRunner, outcome

REPORT = str(PROGRAMS / "report.py")
pytestmark = pytest.mark.slurm


def check_places(ranks: dict[int, dict[str, object]], world_size: int) -> None:
    assert sorted(ranks) == list(range(world_size))
    assert {report["world_size"] for report in ranks.values()} == {world_size}
    assert len({report["master"] for report in ranks.values()}) == 1
    by_node: dict[object, list[int]] = {}
    for rank, report in sorted(ranks.items()):
        by_node.setdefault(report["node"], []).append(rank)
    for node_rank, mine in enumerate(by_node.values()):
        assert [ranks[rank]["local_rank"] for rank in mine] == list(range(len(mine)))
        assert {ranks[rank]["local_world_size"] for rank in mine} == {len(mine)}
        assert {ranks[rank]["node_rank"] for rank in mine} == {node_rank}


@pytest.mark.parametrize(
    "channel",
    [pytest.param("slurm", marks=pytest.mark.gate), "pmi", pytest.param("mpi", marks=OPEN_MPI)],
)
def test_each_node_has_its_own_interface_in_both_spellings(
    runner: SlurmJobRunner, channel: str
) -> None:
    pmi = {"slurm": "none", "pmi": "pmi2", "mpi": "pmix"}[channel]
    done = runner.srun(
        f"--mpi={pmi}", "-N6", "--ntasks-per-node=2", SRUNDDP, "--channel", channel, REPORT
    )
    assert done.code == 0, done.errors
    ranks = done.by_rank()
    check_places(ranks, 12)
    said = (
        f"srunddp: 12 ranks on 6 nodes, launcher Slurm, channel {channel}, master 10.88.0.11 port "
    )
    assert re.search(rf"^{said}\d+, interface ens1f1", done.errors, re.MULTILINE), done.errors
    wanted = {node.name: node.data_interface for node in NODES}
    for report in ranks.values():
        assert (report["gloo"], report["nccl"]) == (
            wanted[report["node"]],
            "=" + wanted[report["node"]],
        )
    assert ranks[0]["master"].startswith("10.88.0.11 ")


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        pytest.param(["-N3"], 3, id="only-N"),
        pytest.param(["-n3"], 3, id="only-n"),
        pytest.param(["-N2", "--ntasks-per-node=2"], 4, id="per-node"),
        pytest.param(["-N3", "-n5"], 5, id="2+2+1"),
        pytest.param(["-N2", "-n5", "-m", "cyclic"], 5, id="cyclic"),
        pytest.param(["-N2", "-n6", "-m", "plane=2"], 6, id="plane"),
    ],
)
def test_any_layout_gives_the_right_places(
    runner: SlurmJobRunner, options: list[str], world_size: int
) -> None:
    done = runner.srun(*options, SRUNDDP, "--quiet", REPORT)
    assert done.code == 0, done.errors
    check_places(done.by_rank(), world_size)


def test_an_arbitrary_layout_is_refused_and_works_over_pmi(runner: SlurmJobRunner) -> None:
    hosts = runner.cluster.shared / "hosts"
    hosts.write_text("node03\nnode01\n")
    env = {"SLURM_HOSTFILE": str(hosts)}
    # Without -N, which srun of Slurm 26.05 refuses beside this.
    arbitrary = ("-n2", "-m", "arbitrary", SRUNDDP, REPORT)
    refused = runner.srun("--kill-on-bad-exit=1", *arbitrary, env=env)
    assert "-m arbitrary" in refused.errors
    assert "srun --mpi=pmi2" in refused.errors
    done = runner.srun("--mpi=pmi2", *arbitrary, env=env)
    assert [done.by_rank()[rank]["node"] for rank in (0, 1)] == ["node03", "node01"]
    assert done.by_rank()[1]["master"].startswith("10.88.0.13 ")


def test_torchs_rpc_between_nodes_takes_the_interface(runner: SlurmJobRunner) -> None:
    """By the node's name it would take the management network, which is closed."""
    done = runner.srun("-N2", SRUNDDP, str(PROGRAMS / "rpc.py"), timeout=120)
    assert done.code == 0, done.errors
    assert {rank: report["answer"] for rank, report in done.by_rank().items()} == {0: 1.0, 1: 2.0}


def test_a_step_on_a_part_of_the_job_meets_within_itself(runner: SlurmJobRunner) -> None:
    script = (
        f"srun -w node03,node04 -N2 -n2 {SRUNDDP} --quiet {REPORT}; srun -r1 -N1 -n1 {SRUNDDP}"
        f" --quiet {REPORT}"
    )
    done = runner.on_login("salloc", "-Q", "-w", "node[02-04]", "bash", "-c", script)
    assert done.code == 0, done.errors
    assert [report["node"] for report in done.reports[:2]].count("node03") == 1
    assert {report["node"] for report in done.reports[2:]} == {"node03"}
    assert done.reports[0]["master"].startswith("10.88.0.13 ")


def test_a_heterogeneous_step_is_refused_and_works_over_pmi(runner: SlurmJobRunner) -> None:
    components = (
        "-N1",
        "-n2",
        "-w",
        "node04",
        SRUNDDP,
        REPORT,
        ":",
        "-N1",
        "-n1",
        "-w",
        "node02",
        SRUNDDP,
        REPORT,
    )
    refused = runner.srun("--kill-on-bad-exit=1", *components)
    assert "heterogeneous" in refused.errors
    done = runner.srun("--mpi=pmi2", *components)
    assert done.code == 0, done.errors
    check_places(done.by_rank(), 3)
    assert done.by_rank()[2]["master"].startswith("10.88.0.14 ")


def test_a_step_on_one_component_of_a_heterogeneous_job(runner: SlurmJobRunner) -> None:
    script = (
        f"srun --het-group=0 {SRUNDDP} --quiet {REPORT}; srun --het-group=1 {SRUNDDP} --quiet"
        f" {REPORT}"
    )
    done = runner.on_login(
        "salloc",
        "-Q",
        "-N1",
        "-n2",
        "-w",
        "node04",
        ":",
        "-N1",
        "-w",
        "node02",
        "bash",
        "-c",
        script,
    )
    assert done.code == 0, done.errors
    assert [(report["node"], report["world_size"]) for report in done.reports] == [
        ("node04", 2)
    ] * 2 + [("node02", 1)]


def test_a_job_shell_and_a_batch_body_are_single_processes(runner: SlurmJobRunner) -> None:
    shell = runner.on_login("salloc", "-Q", "-N2", "-n4", "bash", "-c", f"{SRUNDDP} {REPORT}")
    body = runner.batch(f"{SRUNDDP} {REPORT}", "-N2", "-n4")
    for done in (shell, body):
        assert done.code == 0, done.errors
        assert [report["world_size"] for report in done.reports] == [1]
        assert "not a step" in done.errors
        assert "srun srunddp" in done.errors


def test_the_interactive_step_of_salloc_is_a_single_process(runner: SlurmJobRunner) -> None:
    variables = {"SRUNDDP_IFACES": str(runner.ifaces)}
    process = runner.cluster.popen(
        "salloc", "-Q", "-N2", "-n4", env=variables, stdin=subprocess.PIPE
    )
    output, errors = process.communicate(f"{SRUNDDP} {REPORT}\nexit\n", timeout=300)
    done = outcome(subprocess.CompletedProcess((), process.returncode, output, output + errors))
    assert [(report["world_size"], report["node"]) for report in done.reports] == [(1, "node01")], (
        output + errors
    )


def test_a_shell_of_srun_pty_is_a_single_process(runner: SlurmJobRunner) -> None:
    # `script` gives srun the terminal without which it ignores --pty.
    shell = ("script", "-qec", "srun -N1 -n2 --pty bash --norc -i", "/dev/null")
    variables = {"SRUNDDP_IFACES": str(runner.ifaces)}
    process = runner.cluster.popen(*shell, env=variables, stdin=subprocess.PIPE)
    output, errors = process.communicate(f"{SRUNDDP} {REPORT}\nexit\n", timeout=300)
    done = outcome(subprocess.CompletedProcess((), process.returncode, output, errors))
    assert [report["world_size"] for report in done.reports] == [1], output + errors
    assert "srun --pty" in output


def test_a_script_that_srun_pty_starts_is_a_real_step(runner: SlurmJobRunner) -> None:
    """Only its first task has the terminal."""
    line = f"srun -N1 -n2 --pty bash -c '{SRUNDDP} --quiet {REPORT}; true'"
    done = runner.on_login("script", "-qec", line, "/dev/null")
    assert [(report["rank"], report["world_size"]) for report in done.reports] == [(0, 2)], (
        done.output
    )


def test_srun_of_a_wrapper_in_a_shell_of_srun_pty_is_a_real_step(runner: SlurmJobRunner) -> None:
    """It inherits the shell's variables, and is not the process that srun started."""
    inner = f"srun --overlap -n2 bash -c '{SRUNDDP} --quiet {REPORT}; true'"
    done = runner.on_login(
        "script", "-qec", f'srun -N1 -n2 --pty bash -c "{inner}; true"', "/dev/null"
    )
    assert sorted((report["rank"], report["world_size"]) for report in done.reports) == [
        (0, 2),
        (1, 2),
    ], done.output


def test_a_terminal_does_not_hide_a_real_step(runner: SlurmJobRunner) -> None:
    done = runner.on_login("script", "-qec", f"srun -N1 -n1 --pty {SRUNDDP} --explain", "/dev/null")
    assert "SLURM_PROCID=0" in done.output


def test_srun_in_salloc_is_a_real_step_in_an_interactive_job(runner: SlurmJobRunner) -> None:
    done = runner.on_login("salloc", "-Q", "-N2", "srun", SRUNDDP, "--quiet", REPORT)
    check_places(done.by_rank(), 2)


def test_the_hostname_and_name_service_do_not_matter(runner: SlurmJobRunner) -> None:
    rename = (
        f'exec unshare --uts sh -c "hostname other-$SLURM_PROCID; exec {SRUNDDP} --quiet {REPORT}"'
    )
    done = runner.srun("-N3", "sh", "-c", rename)
    assert done.code == 0, done.errors
    check_places(done.by_rank(), 3)


def test_scontrol_is_not_needed(runner: SlurmJobRunner) -> None:
    done = runner.srun(
        "-N2",
        "env",
        "PATH=/nowhere",
        str(PROGRAMS.parent.parent / ".venv/bin/python"),
        SRUNDDP,
        REPORT,
    )
    assert done.code == 0, done.errors
    check_places(done.by_rank(), 2)


@pytest.mark.parametrize("export", ["NONE", "A=1"])
def test_an_empty_environment_does_not_lose_the_interpreter(
    runner: SlurmJobRunner, export: str
) -> None:
    done = runner.srun(f"--export={export}", "-N2", SRUNDDP, "--ifaces", str(runner.ifaces), REPORT)
    assert done.code == 0, done.errors
    assert {report["python"] for report in done.reports} == {
        str(PROGRAMS.parent.parent / ".venv/bin/python")
    }


@pytest.mark.gate
def test_auto_passes_over_what_cannot_reach_other_nodes(runner: SlurmJobRunner) -> None:
    auto = runner.write_ifaces("auto.conf", '- nodes: "*"\n  interface: auto\n')
    done = runner.srun("--mpi=pmi2", "-N2", SRUNDDP, "--explain", ifaces=auto)
    assert done.code == 0, done.errors
    for rank in (0, 1):
        for name, why in {
            "lo": "loopback",
            "docker0": "bridge",
            "spare0": "down",
            "bare0": "no address",
        }.items():
            own = [line for line in done.output.splitlines() if line.startswith(f"[rank {rank}] ")]
            line = next(line for line in own if f" not chosen: {name}:" in line)
            assert why in line


@pytest.mark.gate
def test_explain_says_of_labelled_variables_what_the_ranks_say(runner: SlurmJobRunner) -> None:
    """On the login node, where the ranks' interfaces are not."""
    file = runner.write_ifaces("environments", runner.srun("-N2", "--label", "env").output)
    # With --label srun keeps the lines of two ranks apart.
    there = runner.srun("-N2", "--label", SRUNDDP, "explain")
    later = runner.on_login(SRUNDDP, "explain", "--env", str(file))
    assert (there.code, later.code) == (0, 0), there.errors + later.errors
    for rank, node in enumerate(("node01", "node02")):
        for name in (
            "rank  ",
            "world_size  ",
            "node  ",
            "channel  ",
            "GLOO_SOCKET_IFNAME  ",
            "device  ",
        ):
            line = next(
                line
                for line in later.output.splitlines()
                if line.startswith(f"[rank {rank}] {name}")
            )
            assert line in there.output
        assert f"[rank {rank}] node                 {node} " in later.output


def test_a_hostname_that_leads_to_loopback_is_named(runner: SlurmJobRunner) -> None:
    plain = runner.write_ifaces(
        "plain.conf", "- nodes: node[01-02]\n  interface: ens1f1\n  address: localhost\n"
    )
    done = runner.srun("-N2", SRUNDDP, "--timeout", "10", REPORT, ifaces=plain)
    assert done.code == 78
    assert "localhost resolves to 127.0.0.1" in done.errors
    assert "node02" in done.errors


def test_a_hostname_on_another_network_is_named_at_once(runner: SlurmJobRunner) -> None:
    plain = runner.write_ifaces("plain.conf", "- nodes: node[01-02]\n  interface: ens1f1\n")
    done = runner.srun("-N2", "--kill-on-bad-exit=1", SRUNDDP, REPORT, ifaces=plain, timeout=60)
    assert done.code != 0
    assert "10.77.0.11 on mgmt0" in done.errors
    assert "address:" in done.errors


def test_ranks_that_do_not_come_are_named_with_their_node(runner: SlurmJobRunner) -> None:
    # Long enough for the four that come, also where the machine has other work.
    late = f"[ $SLURM_PROCID -ge 4 ] && exec sleep 600; exec {SRUNDDP} --timeout 15 {REPORT}"
    done = runner.srun("-N3", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "sh", "-c", late)
    assert "2 of 6 ranks did not come: ranks 4-5 on node03" in done.errors
    assert "Traceback" not in done.errors


def test_mpi_without_a_world_is_refused_with_the_hint(runner: SlurmJobRunner) -> None:
    done = runner.srun("-N2", "--mpi=none", SRUNDDP, "--channel", "mpi", REPORT)
    assert done.code == 78
    assert "--mpi=pmix" in done.errors


@pytest.mark.gate
@pytest.mark.parametrize(
    ("kind", "channel"), [("none", "slurm"), ("pmi2", "pmi"), ("pmix", "slurm")]
)
def test_every_mpi_type_of_srun_gives_one_world(
    kind: str, channel: str, runner: SlurmJobRunner
) -> None:
    done = runner.srun("-N2", f"--mpi={kind}", SRUNDDP, REPORT)
    check_places(done.by_rank(), 2)
    assert f"channel {channel}," in done.errors


def test_a_wrong_ntasks_of_the_user_is_not_believed(runner: SlurmJobRunner) -> None:
    done = runner.srun("-N2", "env", "SLURM_NTASKS=9", "SLURM_NNODES=7", SRUNDDP, "--quiet", REPORT)
    check_places(done.by_rank(), 2)


def test_an_old_job_script_s_variables_are_said_or_refused(runner: SlurmJobRunner) -> None:
    done = runner.srun(
        "-N2", SRUNDDP, REPORT, env={"MASTER_ADDR": "node09", "MASTER_PORT": "29500"}
    )
    assert done.code == 0
    assert done.errors.count("MASTER_ADDR=node09 and MASTER_PORT=29500 ignored") == 1
    refused = runner.srun("-N2", "--kill-on-bad-exit=1", SRUNDDP, REPORT, env={"RANK": "0"})
    assert "RANK=0, but SLURM_PROCID=1" in refused.errors


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ib9", "is not there"),
        ("spare0", "is down"),
        ("bare0", "has no address"),
        ("lo", "is loopback"),
    ],
)
def test_an_unusable_interface_is_named_with_those_there_are(
    runner: SlurmJobRunner, name: str, wrong: str
) -> None:
    conf = runner.write_ifaces("wrong.conf", f'# a comment\n- nodes: "*"\n  interface: {name}\n')
    done = runner.srun("-N2", SRUNDDP, REPORT, ifaces=conf)
    assert done.code == 78
    for node in ("node01", "node02"):
        line = next(line for line in done.errors.splitlines() if f"on node {node}" in line)
        assert line.startswith(f"srunddp: error: {conf}:2:3: interface {name} {wrong}")
        assert "ens1f1 (10.88.0.1" in line
    assert "Traceback" not in done.errors
