from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import srunddp as package
from srunddp.bootstrap.environment import detect
from srunddp.bootstrap.network.ifaces_conf import DEFAULT
from srunddp.bootstrap.rendezvous import discovery
from tests.support.launchers import step
from tests.support.munged import munged
from tests.support.starting import NODE, SRUNDDP, bare, ended, slurm, srunddp, started, until, write


def one_message(done: CompletedProcess[str], code: int = 78) -> str:
    """The single line that a wrong configuration comes to."""
    assert done.returncode == code
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("srunddp: error: ")
    assert done.stderr.count("\n") == 1
    assert "; expected " in done.stderr
    assert " -> " in done.stderr
    return done.stderr.removeprefix("srunddp: error: ").rstrip()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write(tmp_path / "train.py", "import os; print('rank', os.environ['RANK'], 'ran')")


# Wrong usage and wrong configuration.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-such-option", "train.py"], "No such option"),
        (["run"], "Missing argument 'SCRIPT'"),
        (["--quiet"], "Missing argument 'SCRIPT'"),
        (["-m"], "Missing argument 'SCRIPT'"),
        (["--backend", "mpi", "train.py"], "'mpi' is not one of 'nccl', 'gloo', 'auto'"),
        (["--channel", "tcp", "train.py"], "'tcp' is not one of 'pmi', 'slurm', 'mpi', 'env'"),
        (["--timeout", "0", "train.py"], "Invalid value for '--timeout'"),
        (["--timeout", "soon", "train.py"], "Invalid value for '--timeout'"),
        ([], "Missing argument 'SCRIPT'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_explained_and_ends_with_2(script: Path, arguments: list[str], said: str) -> None:
    done = srunddp(*arguments, folder=script.parent)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Usage: " in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ports", ["80", "any"])
def test_wrong_ports_are_explained(script: Path, ports: str) -> None:
    text = one_message(srunddp("--port", ports, "train.py", folder=script.parent))
    assert text.startswith(f"--port: ports {ports!r}; expected two ports or more, from 1024 to 65535 -> ")


def test_a_missing_script_is_named_with_the_folder(tmp_path: Path) -> None:
    text = one_message(srunddp("no-such.py", folder=tmp_path))
    assert text.startswith(f"no file no-such.py in {tmp_path}; expected a script to run -> ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("python", "leave python out: srunddp runs the script in its own Python"),
        ("folder", "folder is a folder without __main__.py; expected a script to run -> name the script in it"),
        ("/no/such.py", "no file /no/such.py; expected a script to run -> "),
    ],
)
def test_what_is_no_script_gets_the_hint_that_fits(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "folder").mkdir()
    assert said in one_message(srunddp(name, folder=tmp_path))


def test_a_deleted_working_folder_is_said(tmp_path: Path) -> None:
    command = f"mkdir gone; cd gone; rmdir ../gone; {' '.join(SRUNDDP)} /no/such.py"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=bare(), capture_output=True, text=True)
    assert one_message(done).startswith("the working folder has been deleted; expected ")


@pytest.mark.parametrize("module", ["no_such.part", "__main__"])
def test_a_missing_module_is_named(tmp_path: Path, module: str) -> None:
    text = one_message(srunddp("-m", module, folder=tmp_path))
    assert text.startswith(f"no module {module.split('.')[0]!r}; expected a script to run -> ")


def test_a_wrong_ifaces_conf_is_one_line_with_file_line_and_column(script: Path) -> None:
    conf = write(script.parent / "ifaces.conf", "- nodes: '*'\n  interfaces: ib0\n")
    for done in (
        srunddp("--ifaces", conf, "train.py", folder=script.parent),
        srunddp("train.py", folder=script.parent, SRUNDDP_IFACES=str(conf)),
    ):
        text = one_message(done)
        assert text == (
            f"{conf}:2:3: unknown key 'interfaces'; expected one of nodes, interface, address, env, ports -> "
            "did you mean interface?"
        )


def test_a_missing_ifaces_conf_is_not_passed_over(script: Path) -> None:
    text = one_message(srunddp("--ifaces", "./none.conf", "train.py", folder=script.parent))
    assert text.startswith("--ifaces: none.conf is not there; expected ")


def test_an_interface_that_is_not_there_stops_before_the_script(script: Path) -> None:
    conf = write(script.parent / "ifaces.conf", "- nodes: '*'\n  interface: nosuch0\n")
    options = ("--timeout", "0.5", "--ifaces", conf)
    text = one_message(srunddp(*options, "train.py", folder=script.parent, **slurm(0)))
    assert text.startswith(f"{conf}:1:3: interface nosuch0 is not there on node {NODE}, which has ")
    assert "lo (127.0.0.1" in text


def test_partial_explicit_variables_name_the_missing_ones(script: Path) -> None:
    text = one_message(srunddp("train.py", folder=script.parent, RANK="0", WORLD_SIZE="2", MASTER_ADDR="n1"))
    assert text.startswith("RANK, WORLD_SIZE and MASTER_ADDR set, LOCAL_RANK and MASTER_PORT missing; expected ")


def test_a_placement_that_hides_rank_zero_is_refused_with_the_hint(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "pass")
    variables = slurm(1, SLURM_LOCALID="0", SLURM_HOSTFILE="hosts")
    text = one_message(srunddp(str(script), folder=tmp_path, **variables))
    assert text.startswith("-m arbitrary: SLURM_* alone does not tell where rank 0 is; expected ")
    assert "--mpi=pmi2" in text
    explained = srunddp("--explain", folder=tmp_path, **variables)
    assert explained.returncode == 78
    assert "not found: -m arbitrary: " in explained.stdout


def test_launchers_that_disagree_are_named(script: Path) -> None:
    text = one_message(srunddp("train.py", folder=script.parent, **slurm(0, RANK="1")))
    assert text.startswith("RANK=1, but SLURM_PROCID=0; expected ")


# Who says what is wrong with all.


def test_rank_zero_alone_prints_what_is_wrong_with_the_whole_job(script: Path) -> None:
    """Such as ranks that count differently: both know it, one says it."""
    with ThreadPoolExecutor(2) as pool:
        variables = (slurm(0, 2), slurm(1, 3))
        started = [pool.submit(srunddp, "train.py", folder=script.parent, **one) for one in variables]
        first, second = (rank.result() for rank in started)
    assert one_message(first, 69).startswith(f"rank 1 on {NODE} counts 3 ranks, rank 0 counts 2; expected one world")
    assert (second.returncode, second.stdout, second.stderr) == (69, "", "")


def test_rank_zero_alone_prints_that_a_channel_is_not_there(script: Path) -> None:
    done = [srunddp("--channel", "pmi", "train.py", folder=script.parent, **slurm(rank)) for rank in (0, 1)]
    assert one_message(done[0]).startswith("--channel pmi is not there under Slurm; expected one of slurm, env -> ")
    assert (done[1].returncode, done[1].stderr) == (78, "")


@pytest.mark.parametrize("local_rank", [0, 1])
def test_one_rank_of_a_node_prints_what_is_wrong_with_the_node(tmp_path: Path, local_rank: int) -> None:
    """Such as a script that only some nodes see."""
    variables = slurm(2 + local_rank, 4, SLURM_LOCALID=str(local_rank), SLURM_GTIDS="2,3", SLURM_NODEID="1")
    done = srunddp("--timeout", "0.5", "no-such.py", folder=tmp_path, **variables)
    if local_rank == 0:
        assert one_message(done).startswith("no file no-such.py")
    else:
        assert (done.returncode, done.stdout, done.stderr) == (78, "", "")


# What it says when nothing is wrong.


def test_the_version_is_the_packages() -> None:
    done = srunddp("--version", folder=Path.cwd())
    assert (done.returncode, done.stdout) == (0, f"srunddp, version {package.__version__}\n")


def test_the_help_names_every_option() -> None:
    done = srunddp("run", "--help", folder=Path.cwd())
    assert done.returncode == 0
    for option in ("--backend", "--ifaces FILE", "--timeout SECONDS", "--channel", "--port", "--explain", "--quiet",
                   "--verbose", "-m", "SCRIPT"):  # fmt: skip
        assert option in done.stdout


def test_one_line_says_where_everything_is(script: Path) -> None:
    done = srunddp("--backend", "gloo", "train.py", folder=script.parent)
    assert (done.returncode, done.stdout) == (0, "rank 0 ran\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("srunddp: 1 rank on 1 node, launcher none, channel none, master 127.0.0.1 port ")
    assert line.endswith(", interface lo (loopback, as a world of one), backend gloo")


def test_the_command_run_may_be_spelled_out(script: Path) -> None:
    assert srunddp("run", "--quiet", "train.py", folder=script.parent).stdout == "rank 0 ran\n"


@pytest.mark.parametrize("arguments", [("-h",), ("--help",), ("run", "-h")])
def test_every_way_to_ask_for_help_shows_how_to_start_a_script(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = srunddp(*arguments, folder=tmp_path)
    assert done.returncode == 0
    assert "SCRIPT [ARGUMENTS]..." in done.stdout
    assert "--explain" in done.stdout


def test_a_full_disk_below_standard_error_keeps_no_script_from_running(script: Path) -> None:
    command = [*SRUNDDP, "--verbose", "train.py"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=script.parent, env=bare(), stdout=subprocess.PIPE, stderr=full, text=True)
    assert (done.returncode, done.stdout) == (0, "rank 0 ran\n")


def test_quiet_says_nothing(script: Path) -> None:
    assert srunddp("--quiet", "train.py", folder=script.parent).stderr == ""


def test_verbose_says_rank_and_world_size(script: Path) -> None:
    assert srunddp("--quiet", "--verbose", "train.py", folder=script.parent).stderr == "[RANK 0] WORLD_SIZE=1\n"


def test_a_job_shell_is_told_of_srun(script: Path) -> None:
    done = srunddp("--quiet", "train.py", folder=script.parent, SLURM_JOB_ID="7", SLURM_PROCID="0", SLURM_NTASKS="6")
    assert (done.returncode, done.stdout) == (0, "rank 0 ran\n")
    assert "an allocation of Slurm, but not a step: one process, world size 1" in done.stderr


# --explain.


def explained(done: CompletedProcess[str], rank: int) -> dict[str, str]:
    """The table of a rank: for each value, the value and what decided it."""
    assert done.returncode == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(line.startswith(f"[rank {rank}] ") for line in lines)
    rows = [line.removeprefix(f"[rank {rank}] ") for line in lines]
    return {row[:20].strip(): " ".join(row[20:].split()) for row in rows}


def test_explain_says_which_variable_decided_each_value(tmp_path: Path) -> None:
    table = explained(srunddp("--explain", folder=tmp_path, **slurm(1)), 1)
    assert table["launcher"] == "Slurm SLURM_STEP_ID=3, a step"
    assert table["rank"] == "1 SLURM_PROCID=1"
    assert table["local_rank"] == "1 SLURM_LOCALID=1"
    assert table["world_size"] == "2 SLURM_STEP_NUM_TASKS=2"
    assert table["local_world_size"] == "2 SLURM_GTIDS=0,1"
    assert table["node"] == f"{NODE} SLURMD_NODENAME"
    assert table["channel"] == f"slurm SLURM_STEP_NODELIST={NODE}"
    assert table["interface"] == "lo loopback, as all ranks share one node"
    assert table["address"] == "127.0.0.1 of lo"
    assert table["backend"] == "auto the default"


def test_explain_names_the_source_of_every_variable_that_is_exported(tmp_path: Path) -> None:
    conf = write(tmp_path / "ifaces.conf", f"- nodes: {NODE}\n  interface: auto\n  env: {{NCCL_IB_TC: 106, X1: on}}\n")
    options = ("--explain", "--backend", "gloo", "--channel", "slurm", "--ifaces", conf)
    table = explained(srunddp(*options, folder=tmp_path, **slurm(0, NCCL_IB_TC="41")), 0)
    assert table["NCCL_IB_TC"] == "41 exported"
    assert table["X1"] == f"on {conf}:1:3"
    assert table["GLOO_SOCKET_IFNAME"] == "lo loopback, as all ranks share one node"
    assert table["backend"] == "gloo --backend"
    assert table["channel"] == f"slurm --channel, SLURM_STEP_NODELIST={NODE}"


def test_explain_says_where_rank_zero_is_looked_for(tmp_path: Path) -> None:
    who = detect.detect(slurm(1))
    first = discovery.line_ports(who, DEFAULT, None)[0]
    table = explained(srunddp("--explain", folder=tmp_path, **slurm(1)), 1)
    assert table["rank 0"].startswith(f"127.0.0.1:{first}, ")


def test_explain_says_which_line_of_ifaces_conf_decided(tmp_path: Path) -> None:
    conf = write(tmp_path / "ifaces.conf", f"- {{nodes: other, interface: x}}\n- {{nodes: {NODE}, interface: lo}}\n")
    table = explained(srunddp("--explain", "--ifaces", conf, folder=tmp_path, **slurm(0)), 0)
    assert table["interface"] == f"lo {conf}:2:3"
    assert table["GLOO_SOCKET_IFNAME"] == f"lo {conf}:2:3"
    assert table["NCCL_SOCKET_IFNAME"] == f"=lo {conf}:2:3"


def test_explain_starts_no_script_and_needs_none(script: Path) -> None:
    with_script = srunddp("--explain", "train.py", folder=script.parent)
    assert explained(with_script, 0) == explained(srunddp("--explain", folder=script.parent), 0)
    assert "rank 0 ran" not in with_script.stdout
    assert explained(with_script, 0)["rank"] == "0 no launcher was found"


def test_the_command_explain_prints_the_same(tmp_path: Path) -> None:
    command, option = (srunddp(word, folder=tmp_path, **slurm(1)) for word in ("explain", "--explain"))
    assert explained(command, 1) == explained(option, 1)


def test_explain_says_who_the_rank_is_also_where_its_interface_is_wrong(tmp_path: Path) -> None:
    conf = write(tmp_path / "ifaces.conf", "- nodes: '*'\n  interface: nosuch0\n")
    done = srunddp("--ifaces", conf, "--timeout", "7", "--explain", folder=tmp_path, **slurm(1))
    *rows, error = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (78, "")
    assert "[rank 1] rank                 1                  SLURM_PROCID=1" in rows
    assert f"[rank 1] interface            nosuch0            {conf}:1:3; see the error" in rows
    assert "[rank 1] timeout              7 s                --timeout" in rows
    assert error.startswith(f"[rank 1] error: {conf}:1:3: interface nosuch0 is not there on node {NODE}, which has ")
    assert error.endswith("-> correct this entry (exit code 78)")


def test_explain_reads_the_environments_of_ranks_of_other_nodes_and_not_its_own(tmp_path: Path) -> None:
    """As after ``srun --label env > FILE``, on a login node."""
    lines = [f"{rank}: {name}={value}" for rank in (1, 0) for name, value in step(rank).items()]
    file = write(tmp_path / "env", "\n".join(lines) + "\n")
    done = srunddp("explain", "--env", file, folder=tmp_path, RANK="7", SLURM_PROCID="9", SRUNDDP_IFACES="/nowhere")
    assert (done.returncode, done.stderr) == (0, "")
    said = [line for line in done.stdout.splitlines() if " rank   " in line]
    assert said == [
        f"[rank {rank}] rank                 {rank}                  SLURM_PROCID={rank}" for rank in (0, 1)
    ]


def test_a_file_without_an_environment_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "env", "nothing here\n")
    text = one_message(srunddp("explain", "--env", file, folder=tmp_path))
    assert text.startswith(f"--env: {file}: no line with a variable; expected what env or env -0 printed -> ")


def test_explain_says_what_was_ignored(tmp_path: Path) -> None:
    done = srunddp("--explain", folder=tmp_path, **slurm(0, MASTER_ADDR="n1", MASTER_PORT="29500"))
    assert "[rank 0] note: MASTER_ADDR=n1 and MASTER_PORT=29500 ignored: Slurm tells where rank 0 is" in done.stdout


# Two ranks.


def both(*arguments: object, folder: Path, **changes: str) -> list[CompletedProcess[str]]:
    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(srunddp, *arguments, folder=folder, **slurm(rank, **changes)) for rank in (0, 1)]
        return [rank.result() for rank in started]


@pytest.mark.parametrize(
    "changes",
    [{"WORLD_SIZE": "9"}, {"SLURM_STEP_TASKS_PER_NODE": "x"}],
    ids=["world-size", "task-counts"],
)
def test_what_is_wrong_for_all_ranks_is_said_once(script: Path, changes: dict[str, str]) -> None:
    first, second = both("--quiet", "train.py", folder=script.parent, **changes)
    one_message(first)
    assert (second.returncode, second.stderr) == (78, "")


def test_two_ranks_meet_and_rank_zero_speaks_for_both(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import os, json; print(json.dumps(dict(os.environ)))")
    first, second = both("--verbose", "train.py", folder=tmp_path, MASTER_ADDR="n1", MASTER_PORT="29500")
    note, placement, hello = first.stderr.splitlines()
    assert note.startswith("srunddp: MASTER_ADDR=n1 and MASTER_PORT=29500 ignored")
    assert placement.startswith("srunddp: 2 ranks on 1 node, launcher Slurm, channel slurm, master 127.0.0.1 port ")
    assert hello == "[RANK 0] WORLD_SIZE=2"
    assert second.stderr == "[RANK 1] WORLD_SIZE=2\n"
    one, two = json.loads(first.stdout), json.loads(second.stdout)
    assert (one["RANK"], two["RANK"]) == ("0", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        assert one[name] == two[name]
    assert f"port {one['MASTER_PORT']}, " in placement


def test_all_ranks_end_with_the_code_of_the_one_that_failed(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(4) or time.sleep(60)")
    assert [done.returncode for done in both("--quiet", "train.py", folder=tmp_path)] == [4, 4]


def test_ctrl_c_while_ranks_wait_for_each_other_ends_them_as_it_ends_a_script(script: Path) -> None:
    with started("--quiet", "train.py", folder=script.parent, **slurm(0)) as process:
        until(lambda: children(process.pid))
        # The terminal sends it to both; only the worker acts on it.
        os.kill(children(process.pid)[0], signal.SIGINT)
        assert ended(process) == (130, "", f"srunddp: error: rank 0 on {NODE} failed: killed by SIGINT\n")


def test_a_rank_that_does_not_come_is_named_and_no_script_starts(script: Path) -> None:
    done = srunddp("--timeout", "0.5", "train.py", folder=script.parent, **slurm(0))
    text = one_message(done, 69)
    assert text.startswith(f"1 of 2 ranks did not come: rank 1 on {NODE}; expected ")


def test_a_rank_that_does_not_find_rank_zero_starts_no_script(script: Path) -> None:
    done = srunddp("--timeout", "0.5", "train.py", folder=script.parent, **slurm(1, SLURM_LOCALID="0"))
    text = one_message(done, 69)
    assert text.startswith(f"rank 1 on {NODE} (127.0.0.1) did not reach rank 0 at 127.0.0.1:")


# Failures before all have met.


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_rank_before_the_meeting_is_said_once_and_ends_both_at_once(
    script: Path, failing: int
) -> None:
    """Such as a script that one of the nodes does not see; the other would wait for 300 s."""
    names = ["train.py", "train.py"]
    names[failing] = "no-such.py"
    with ThreadPoolExecutor(2) as pool:
        starting = [
            pool.submit(srunddp, name, folder=script.parent, **slurm(rank, SLURM_LOCALID="0"))
            for rank, name in enumerate(names)
        ]
        first, second = (rank.result() for rank in starting)
    told = f"rank 1 on {NODE} failed: " if failing else ""
    assert one_message(first).startswith(f"{told}no file no-such.py in {script.parent}; expected a script to run -> ")
    assert (second.returncode, second.stdout, second.stderr) == (78, "", "")


def test_a_wrong_interface_of_one_rank_is_said_by_rank_zero(script: Path) -> None:
    conf = write(script.parent / "ifaces.conf", "- {nodes: '*', interface: [lo, nope0]}\n")
    first, second = both("--ifaces", conf, "train.py", folder=script.parent)
    assert one_message(first).startswith(f"rank 1 on {NODE} failed: {conf}:1:3: interface nope0 is not there on node ")
    assert (second.returncode, second.stdout, second.stderr) == (78, "", "")


def test_ranks_that_have_munge_meet_by_it_and_one_without_is_refused(script: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, munged(Path(folder) / "one") as where:
        done = both("--quiet", "train.py", folder=script.parent, SRUNDDP_MUNGE_SOCKET=where)
        assert [(rank.returncode, rank.stdout, rank.stderr) for rank in done] == [
            (0, "rank 0 ran\n", ""),
            (0, "rank 1 ran\n", ""),
        ]
        with ThreadPoolExecutor(2) as pool:
            options = ("--quiet", "--timeout", "3", "train.py")
            first = pool.submit(srunddp, *options, folder=script.parent, **slurm(0, SRUNDDP_MUNGE_SOCKET=where))
            second = pool.submit(srunddp, *options, folder=script.parent, **slurm(1))
            assert "refused rank 1 on " in first.result().stderr
            text = one_message(second.result(), 69)
        assert text.startswith(f"rank 1 on {NODE}: rank 0 refused it: its proof is none, rank 0's munge; expected ")
