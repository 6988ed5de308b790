"""mpirun is the fallback off Slurm: right ranks, any MPI, and the script may use MPI as well."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, ROOT
from tests.mpirun.conftest import LIMIT, Mpi, there
from tests.slurm.conftest import SRUNDDP

REPORT = str(PROGRAMS / "report.py")
pytestmark = pytest.mark.mpirun


def test_every_rank_knows_its_place_under_mpirun(mpi: Mpi) -> None:
    done = mpi.run(3, SRUNDDP, REPORT)
    assert done.code == 0, done.errors
    ranks = done.by_rank()
    assert sorted(ranks) == [0, 1, 2]
    # Open MPI 5 numbers the local ranks of an oversubscribed node in another order than the ranks.
    assert sorted(report["local_rank"] for report in done.reports) == [0, 1, 2]
    assert ranks[0]["local_rank"] == 0
    assert {(report["world_size"], report["local_world_size"]) for report in done.reports} == {
        (3, 3)
    }
    assert f"launcher {mpi.name}, channel {mpi.channel}," in done.errors
    # Open MPI puts its own folder first in PATH, where an older python3 may be.
    assert {os.path.dirname(report["python"]) for report in done.reports} == {
        str(mpi.environment / "bin")
    }


@pytest.mark.gate
def test_process_groups_are_made_and_destroyed(mpi: Mpi) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = mpi.run(2, SRUNDDP, str(PROGRAMS / "many_groups.py"), str(port))
    assert done.code == 0, done.errors
    assert {rank: set(report["sums"]) for rank, report in done.by_rank().items()} == {
        0: {3},
        1: {3},
    }


@pytest.mark.slow
def test_ranks_call_each_other_by_torchs_rpc(mpi: Mpi) -> None:
    done = mpi.run(2, SRUNDDP, str(PROGRAMS / "rpc.py"))
    assert done.code == 0, done.errors
    assert {rank: report["answer"] for rank, report in done.by_rank().items()} == {0: 1.0, 1: 2.0}
    assert {report["interface"] for report in done.reports} == {"lo"}
    assert "address for interface" not in done.errors  # TensorPipe's warning


@pytest.mark.parametrize(
    ("way", "sums"),
    [("client", 6), ("subprocess", 6), ("exec", 6), ("some", 3)],
)
def test_a_process_that_is_no_rank_joins(way: str, sums: int) -> None:
    done = there("openmpi4").run(3, SRUNDDP, str(PROGRAMS / "joins.py"), way)
    assert done.code == 0, done.errors
    ranks = 2 if way == "some" else 3
    assert sorted((each["rank"], each["sum"]) for each in done.reports) == [
        (rank, sums) for rank in range(ranks)
    ]


@pytest.mark.parametrize("below_srunddp", [True, False])
def test_a_script_may_use_mpi_itself(mpi: Mpi, below_srunddp: bool) -> None:
    """srunddp.init() uses an MPI that the script has started."""
    program = str(PROGRAMS / "mpi_user.py")
    if below_srunddp:
        done = mpi.run(2, SRUNDDP, "--channel", "mpi", program)
    else:
        done = mpi.run(2, mpi.python, program, "srunddp", env={"PYTHONPATH": str(ROOT)})
    assert done.code == 0, done.errors
    assert {rank: report["mpi"] for rank, report in done.by_rank().items()} == {
        0: [0, 2, 3],
        1: [1, 2, 3],
    }


def test_a_script_that_starts_itself_again_ends_well(mpi: Mpi, tmp_path: Path) -> None:
    """As with other variables for Python; mpirun knows the process by MPI_Init."""
    script = tmp_path / "again.py"
    script.write_text(
        """
import json, os, sys
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, sys.orig_argv)
print(json.dumps({"rank": int(os.environ["RANK"])}))
"""
    )
    done = mpi.run(2, SRUNDDP, "--channel", "mpi", str(script))
    assert done.code == 0, done.errors
    assert sorted(done.by_rank()) == [0, 1]


def test_a_script_that_closes_what_it_has_inherited_ends_well(mpi: Mpi, tmp_path: Path) -> None:
    """MPI_Finalize of Open MPI 4 never returned without the descriptors that MPI had opened."""
    script = tmp_path / "daemon_like.py"
    script.write_text(
        """
import os
os.closerange(3, 256)
import json
print(json.dumps({"rank": int(os.environ["RANK"])}))
"""
    )
    done = mpi.run(2, SRUNDDP, str(script))
    assert done.code == 0, done.errors
    assert sorted(done.by_rank()) == [0, 1]


def test_no_rank_is_in_mpi_finalize_while_another_works(mpi: Mpi, tmp_path: Path) -> None:
    """Where a rank fails while another is there, Open MPI's mpirun may hang or crash."""
    done = mpi.run(3, SRUNDDP, "--channel", "mpi", str(PROGRAMS / "early_end.py"), str(tmp_path))
    assert done.code == 0, done.errors
    ranks = done.by_rank()
    assert min(ranks[1]["exit"], ranks[2]["exit"]) > ranks[0]["end"]


def test_mpi_after_a_meeting_over_pmi_is_refused_with_the_hint() -> None:
    done = there("mpich").run(2, SRUNDDP, str(PROGRAMS / "mpi_user.py"))
    assert done.code != 0
    assert "ImportError: the ranks met over PMI" in done.errors
    assert "--channel mpi" in done.errors


def test_loader_workers_start_by_each_method_beside_mpi() -> None:
    done = there("openmpi5").run(2, SRUNDDP, str(PROGRAMS / "loader_workers.py"))
    assert done.code == 0, done.errors
    assert {rank: report["sums"] for rank, report in done.by_rank().items()} == {
        rank: {"fork": 28, "spawn": 28, "forkserver": 28} for rank in (0, 1)
    }


ADVICE = """
import os
from srunddp.bootstrap.environment.cpus import Cpus, advice
print(*advice(os.environ, Cpus.here()), sep="\\n", end="")
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("name", ["openmpi4", "openmpi5"])
def test_one_cpu_bound_by_mpirun_is_warned_of_and_the_hint_helps(name: str) -> None:
    openmpi = there(name)
    said = []
    for binding in ("core", "none"):
        done = openmpi.run(
            1, "--bind-to", binding, openmpi.python, "-c", ADVICE, env={"PYTHONPATH": str(ROOT)}
        )
        assert done.code == 0, done.errors
        said.append(done.output.splitlines())
    assert [line.endswith(" -> mpirun --bind-to none") for line in said[0]] == [True]
    assert said[1] == []


FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(17) if sys.argv[1] == "exit" else os.environ["no such variable"]
time.sleep(1)
"""


@pytest.mark.parametrize(("how", "code"), [("exit", 17), ("exception", 1)])
def test_one_rank_that_fails_ends_mpirun_with_its_code(
    mpi: Mpi, how: str, code: int, tmp_path: Path
) -> None:
    """MPI's own end waits for all ranks, and the last rank's for the one that failed: neither may
    wait for ever.
    """
    (tmp_path / "fails.py").write_text(FAILS)
    done = mpi.run(2, SRUNDDP, "--quiet", str(tmp_path / "fails.py"), how)
    assert done.code == code, done.errors
    assert ("KeyError: 'no such variable'" in done.errors) == (how == "exception")


@pytest.mark.parametrize(
    ("option", "what"), [("--log-dir", "logs in"), ("--monitor-dir", "readings in")]
)
def test_the_summary_line_ends_with_the_folder_of_the_files(
    mpi: Mpi, option: str, what: str, tmp_path: Path
) -> None:
    """Under mpirun nobody can know its name before."""
    script = tmp_path / "train.py"
    script.write_text("")
    monitor = ["--monitor=1"] if option == "--monitor-dir" else []
    done = mpi.run(2, SRUNDDP, f"{option}={tmp_path / 'out'}", *monitor, str(script))
    assert done.code == 0, done.errors
    (folder,) = (tmp_path / "out").iterdir()
    (line,) = [line for line in done.errors.splitlines() if "2 ranks on 1 node" in line]
    assert line.endswith(f", {what} {folder}")


def test_explicit_variables_rule_where_no_launcher_is() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [SRUNDDP, REPORT],
            env={**os.environ, **world, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    results = [rank.communicate(timeout=LIMIT) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], results
    assert "channel env" in results[0][1]
