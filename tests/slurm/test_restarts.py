"""``--restarts`` on the real cluster: a rank fails, and the job ends as if nothing had happened."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS
from tests.slurm.conftest import SRUNDDP, Outcome, SlurmJobRunner, gated
from tests.slurm.jobs import Job, until

pytestmark = pytest.mark.slurm

PROGRAM = str(PROGRAMS / "restarted.py")
TRAINING = ("--epochs=3", "--batch_size=8", "--checkpoint.every_steps=5", "--tensorboard=false")
CAUSES = {
    "sigkill": "killed by SIGKILL",
    "exception": "IndexError: list index out of range",
    "exit3": r"sys.exit\(3\)",
    "os_exit": "the process ended with 9",
    "segv": "killed by SIGSEGV",
    "stop": "stopped by SIGSTOP for 10 s",
    "stall": "no step for",
}


def trained(
    runner: SlurmJobRunner,
    kind: str,
    times: int,
    folder: Path,
    *srun: str,
    options: tuple[str, ...] = (),
    per_node: int = 2,
) -> Outcome:
    words = (
        *srun,
        "-N2",
        f"--ntasks-per-node={per_node}",
        "--time=5",
        SRUNDDP,
        "--restarts=9",
        *options,
    )
    return runner.srun(
        *words, PROGRAM, kind, str(times), f"--output-dir={folder}", *TRAINING, timeout=240
    )


def weights(done: Outcome) -> set[str]:
    assert done.code == 0, done.errors
    return {report["weights"] for report in done.by_rank().values()}


@pytest.fixture(scope="module")
def whole(runner: SlurmJobRunner) -> Callable[[int], str]:
    """The weights of a training in which nothing fails, by its ranks on each of two nodes."""

    @functools.cache
    def start(per_node: int) -> str:
        folder = runner.cluster.shared / f"whole-{per_node}"
        (found,) = weights(trained(runner, "none", 0, folder, "--mpi=none", per_node=per_node))
        return found

    return start


@pytest.mark.parametrize("kind", gated(CAUSES, "exit3"))
def test_a_training_goes_on_to_the_same_bits(
    kind: str, whole: Callable[[int], str], runner: SlurmJobRunner
) -> None:
    times = 5 if kind == "sigkill" else 1
    # Long for a step, also on a busy machine.
    if kind == "stall":
        options: tuple[str, ...] = ("--stall-timeout=10",)
    else:
        options = ()
    folder = runner.cluster.shared / f"restarted-{kind}"
    done = trained(runner, kind, times, folder, "--mpi=none", options=options, per_node=1)
    assert weights(done) == {whole(1)}, done.errors
    assert len(re.findall(rf"srunddp: ranks? .* failed: {CAUSES[kind]}", done.errors)) == times, (
        done.errors
    )
    said = [f"restart {number} of 9: all ranks start anew" for number in range(1, times + 1)]
    assert re.findall(r"srunddp: (restart.*)", done.errors) == said


def test_over_pmi_a_training_goes_on_as_well(
    whole: Callable[[int], str], runner: SlurmJobRunner
) -> None:
    """PMI is asked once: the ranks meet again by themselves."""
    done = trained(
        runner,
        "sigkill",
        2,
        runner.cluster.shared / "restarted-pmi",
        "--mpi=pmi2",
        "--kill-on-bad-exit",
    )
    assert weights(done) == {whole(2)}, done.errors


def test_over_mpi_restarts_are_refused(runner: SlurmJobRunner) -> None:
    words = (
        "--mpi=pmix",
        "-N2",
        "-n2",
        SRUNDDP,
        "--channel=mpi",
        "--restarts=1",
        PROGRAM,
        "none",
        "0",
    )
    done = runner.srun(*words)
    assert done.code == 78
    assert "--restarts over MPI; expected a way to rank 0 without MPI" in done.errors


def test_a_killed_srunddp_is_no_restart(runner: SlurmJobRunner) -> None:
    """Its rank has nobody to start it."""
    script = runner.cluster.shared / "killer.py"
    script.write_text(
        "import os, signal\nif os.environ['RANK'] == '1':\n    os.kill(os.getppid(),"
        " signal.SIGKILL)\nimport time\ntime.sleep(60)\n"
    )
    done = runner.srun("-N2", "-n2", SRUNDDP, "--restarts=3", str(script))
    assert done.code == 137
    assert "restart 1 of 3" not in done.errors


def test_out_of_memory_the_job_ends_with_the_code_of_srunddp(
    whole: Callable[[int], str], runner: SlurmJobRunner
) -> None:
    """After the kernel has killed a process for the step's limit, srun ends with 1, whatever comes
    of the restart.
    """
    folder = runner.cluster.shared / "restarted-memory"
    options = (
        f"--log-dir={folder}",
        "--srunddp",
        SRUNDDP,
        "--run-options=--restarts=3",
        "--mem=700M",
        "--mpi=none",
    )
    words = (
        "sbatch",
        *options,
        "-N2",
        "--ntasks-per-node=2",
        "--time=5",
        f"--write={folder}.sh",
        PROGRAM,
        "memory",
        "1",
    )
    runner.cluster.run(SRUNDDP, *words, f"--output-dir={folder}/checkpoints", *TRAINING, timeout=60)
    submitted = runner.cluster.run(
        "sbatch", "--parsable", f"{folder}.sh", env={"SRUNDDP_IFACES": str(runner.ifaces)}
    )
    job = Job(runner, folder, submitted.stdout.strip())
    until(job.is_over, [job], 120.0)
    (log,) = folder.glob("*.out")
    text = log.read_text()
    assert "killed by SIGKILL, out of memory" in text
    assert "srunddp: ended with 0 after 1 restart; srun's own exit code differs" in text
    assert set(re.findall(r'"weights": "(\w+)"', text)) == {whole(2)}
    assert (job.code, job.state) == (0, "COMPLETED"), text


NESTED = """
import json, os, subprocess, sys, time
from pathlib import Path
import srunddp

start = srunddp.restart_count()
srunddp.heartbeat()
if os.environ["RANK"] != "0":
    Path("other").write_text(os.environ["SLURMD_NODENAME"])
    while start == 0:
        time.sleep(1)
    sys.exit()

def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.05)

wait_for("other")
words = ["srun", "--overlap", "--quiet", "-N1", "-n1", "-w", Path("other").read_text()]
loop = f"while :; do echo works >> copy{start}; sleep 0.1; done"
step = subprocess.Popen([*words, "sh", "-c", loop], stdin=subprocess.DEVNULL)
wait_for(f"copy{start}")
if start == 0:
    sys.exit(9)
sizes = [Path("copy0").stat().st_size]
time.sleep(2)
sizes.append(Path("copy0").stat().st_size)
began = time.monotonic()
step.terminate()
step.wait()
took = time.monotonic() - began
print(json.dumps({"sizes": sizes, "sigterm_took": took, "code": step.returncode}), flush=True)
"""


def test_a_step_that_the_script_has_started_ends_with_its_start(runner: SlurmJobRunner) -> None:
    """Only the copy of the new start runs, although srun itself leaves its tasks if it is
    killed.
    """
    folder = runner.cluster.shared / "nested"
    folder.mkdir()
    (folder / "train.py").write_text(NESTED)
    words = ("-N2", "-n2", "--time=5", f"--chdir={folder}", SRUNDDP, "--restarts=1", "train.py")
    done = runner.srun(*words)
    assert done.code == 0, done.errors
    (report,) = done.reports
    assert report["sizes"][0] == report["sizes"][1], report


@pytest.mark.parametrize("shell", ['echo 4711 | "$@"', 'echo 4711 > config; "$@" < config'])
def test_each_start_reads_what_srun_passes_on(shell: str, runner: SlurmJobRunner) -> None:
    """srun makes a pipe of both for each rank."""
    folder = runner.cluster.shared / "standard-input"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(
        """
import json, os, sys
number = int(sys.stdin.read())
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if start == 0 and os.environ["RANK"] == "1":
    sys.exit(3)
print(json.dumps({"start": start, "number": number}), flush=True)
"""
    )
    words = ("-N2", "-n2", "--time=5", f"--chdir={folder}", SRUNDDP, "--restarts=1", "train.py")
    done = runner.on_login("bash", "-c", f"cd {folder}; {shell}", "bash", "srun", *words)
    assert done.code == 0, done.errors
    again = [report for report in done.reports if report["start"] == 1]
    assert again == 2 * [{"start": 1, "number": 4711}], done.errors
