"""A monitored run on real nodes: what its report says is true, and nothing else; it outlives a
SIGKILL.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import Popen

import pytest

from srunddp.report.advice import notes, too_short
from srunddp.report.run import read
from srunddp.report.summarize import summary_of
from srunddp.report.summary import Summary
from srunddp.util.slurm_command import seconds
from tests.cluster.nodes import NODES, SIX_INTERFACE
from tests.conftest import PROGRAMS
from tests.slurm.conftest import SRUNDDP, Outcome, SlurmJobRunner
from tests.slurm.planted import slowed
from tests.slurm.test_accounting import megabytes
from tests.support.starting import until

pytestmark = [pytest.mark.slurm, pytest.mark.alone]

MONITORED = str(PROGRAMS / "monitored.py")
IDLE = {
    "utilization": 4,
    "memory_utilization": 1,
    "used": 6 << 30,
    "power": 91000,
    "temperature": 34,
    "reasons": 1,
}
PAIRS = 3
SLOW_NETWORK = "400mbit"


@pytest.fixture
def folder(runner: SlurmJobRunner, request: pytest.FixtureRequest) -> Path:
    name: str = request.node.name
    return runner.cluster.shared / name.replace("/", "_")


def train(
    runner: SlurmJobRunner, folder: Path, case: str, *layout: str, **variables: str
) -> Outcome:
    monitor = ("--monitor=0.5", f"--monitor-dir={folder}")
    done = runner.srun(
        "--time=5",
        "--mem=450",
        *layout,
        SRUNDDP,
        "run",
        *monitor,
        MONITORED,
        case,
        "4",
        env=variables,
    )
    assert done.code == 0, done.errors
    return done


def start_of(folder: Path) -> Path:
    (found,) = folder.glob("*/monitor.0")
    return found


def job_of(folder: Path) -> str:
    """By the run's name; squeue may still list the job before."""
    return start_of(folder).parent.name.partition(".")[0]


def summed(folder: Path) -> Summary:
    return summary_of(read(start_of(folder)))


def processes(name: str) -> Iterator[Path]:
    """On all nodes, which share this machine's processes."""
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and (process / "comm").read_text() == f"{name}\n":
                yield process
        except OSError:
            pass


def samplers(runner: SlurmJobRunner) -> list[Path]:
    """Of this cluster; other runs on the machine may have some, too."""
    ours = str(runner.cluster.shared).encode()
    return [each for each in processes("srunddp-monitor") if ours in environ_of(each)]


def environ_of(process: Path) -> bytes:
    """Nothing of a process that has ended."""
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def supervisors(job: str) -> list[int]:
    """Of a job, on all nodes; their workers and samplers are not among them."""
    found = [
        int(pid)
        for stepd in processes("slurmstepd")
        for task in (stepd / "task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    return [
        pid for pid in found if f"SLURM_JOB_ID={job}\0" in Path(f"/proc/{pid}/environ").read_text()
    ]


@pytest.mark.parametrize(
    ("case", "layout", "rules"),
    [
        ("healthy", ("-N3", "--ntasks-per-node=1"), []),
        ("slow rank 1", ("-N3", "--ntasks-per-node=1"), ["slow rank"]),
        ("starving", ("-N2", "--ntasks-per-node=1"), ["data wait"]),
        ("wrong interface ens6", ("-N2", "--ntasks-per-node=1"), ["wrong interface"]),
        # Of the one CPU that it may use nothing else on this machine takes much.
        ("crowded", ("-N1", "-n1", "taskset", "--cpu-list", "1"), ["cpu oversubscribed"]),
    ],
)
def test_what_is_wrong_gets_its_note_and_only_that(
    case: str, layout: tuple[str, ...], rules: list[str], runner: SlurmJobRunner, folder: Path
) -> None:
    done = train(runner, folder, case, *layout)
    summary = summed(folder)
    found = notes(summary)
    assert ([note.rule for note in found], too_short(summary)) == (rules, ""), found
    lines = re.findall(r"^srunddp: (.* of each step than the others.*)$", done.errors, re.MULTILINE)
    assert len(lines) == case.startswith("slow"), done.errors
    if case.startswith("slow"):
        assert "rank 1 on node02" in found[0].found
        assert lines[0].startswith("rank 1 on node02: ")
    if case.startswith("wrong"):
        assert "ens6" in found[0].found
    if case == "healthy":  # of Slurm 22.05 the ranks themselves do not hear of it
        said = runner.on_login(SRUNDDP, "report", "--text", str(start_of(folder)))
        assert re.search(r"^started .* of 5 min$", said.output, re.MULTILINE), said.output
    assert not samplers(runner)


@pytest.mark.nightly
def test_a_run_is_faster_after_the_note_on_its_interface_was_followed(
    runner: SlurmJobRunner, folder: Path
) -> None:
    """In each of three pairs, whichever of the two runs is first. The script names the slower
    network, and the note advises to leave the choice to ifaces.conf.
    """
    cases = {"before": f"wrong interface {SIX_INTERFACE}", "after": "healthy"}
    rules = {"before": ["wrong interface"], "after": []}
    with ExitStack() as stack:
        for node in NODES[:2]:
            stack.enter_context(slowed(node, SLOW_NETWORK, SIX_INTERFACE))
        for pair in range(PAIRS):
            # The other one first in every second pair, as the machine may get slower or faster.
            order = ["before", "after"] if pair % 2 == 0 else ["after", "before"]
            found = {}
            for way in order:
                place = folder / f"{way}-{pair}"
                train(runner, place, cases[way], "-N2", "--ntasks-per-node=1")
                summary = summed(place)
                assert [note.rule for note in notes(summary)] == rules[way], notes(summary)
                assert summary.throughput.per_s
                found[way] = summary.throughput.per_s
            print(f"samples/s: {found}")
            assert found["after"] > found["before"]


def test_an_idle_gpu_gets_its_note_and_only_that(runner: SlurmJobRunner, folder: Path) -> None:
    folder.mkdir()
    gpu = {"uuid": "GPU-1", "name": "NVIDIA H100", "total": 80 << 30, "trace": [IDLE]}
    (folder / "nvml.json").write_text(
        json.dumps({"driver": "580.95.05", "cuda": 13000, "gpus": [gpu]})
    )
    nvml = {"FAKE_NVML": str(folder / "nvml.json"), "PYTHONPATH": str(PROGRAMS / "nvml")}
    # There is no faster one.
    train(runner, folder, "slow rank 0", "-N1", "-n1", "--gpus-per-node=1", **nvml)
    summary = summed(folder)
    assert [(gpu.uuid, gpu.utilization_percent) for gpu in summary.gpus] == [
        ("GPU-1", IDLE["utilization"])
    ]
    assert [note.rule for note in notes(summary)] == ["gpu idle"]


def accounted(runner: SlurmJobRunner, *words: str) -> list[str]:
    """One row of sacct's or sstat's, once it is there."""
    return until(
        lambda: [
            line.split("|")
            for line in runner.cluster.run(
                *words, "--noheader", "--parsable2", check=False
            ).stdout.splitlines()
            if "||" not in line
        ]
    )[0]


@pytest.mark.usefixtures("accounting")
def test_figures_agree_with_sstat_and_sacct_within_a_tenth(
    runner: SlurmJobRunner, folder: Path
) -> None:
    words = (
        "-N3",
        "--ntasks-per-node=2",
        "--time=5",
        SRUNDDP,
        "run",
        "--monitor=1",
        f"--monitor-dir={folder}",
    )
    variables = {"SRUNDDP_IFACES": str(runner.ifaces), "OMP_NUM_THREADS": "1"}
    with ending(
        runner.cluster.popen("srun", *words, MONITORED, "starving", "5", env=variables)
    ) as step:
        # Once it trains its memory stays as it is, and a second between two samples changes little.
        until(
            lambda: (
                [rank for rank in summed(folder).ranks if rank.steps > 60]
                if ready(folder)
                else None
            )
        )
        job = job_of(folder)
        running = accounted(
            runner, "sstat", "--allsteps", "-j", f"{job}.0", "--format=AveCPU,MaxRSS,AveRSS"
        )
        live = summed(folder)
        step.communicate(timeout=60)
    assert step.returncode == 0
    ended = accounted(runner, "sacct", "-j", f"{job}.0", "--format=TotalCPU,MaxRSS,AveRSS,Elapsed")
    whole = summed(folder)
    for (_, highest, *_), ours in ((running, live), (ended, whole)):
        memories = [rank.rss_bytes / 2**20 for rank in ours.ranks if rank.rss_bytes]
        assert len(memories) == 6
        # By control groups Slurm counts anonymous memory; what is resident has the libraries' pages
        # as well.
        assert 0.9 * megabytes(highest) <= max(memories) <= 1.7 * megabytes(highest)
    # sstat's mean is cut to whole seconds, and both look once a second.
    least = seconds(running[0]) or 0.0
    assert 0.9 * least <= cpu_of(live) / 6 <= 1.1 * (least + 1)
    assert cpu_of(whole) == pytest.approx(seconds(ended[0]), rel=0.1)
    assert whole.seconds == pytest.approx(seconds(ended[3]), rel=0.1, abs=2)


def cpu_of(summary: Summary) -> float:
    cpus = [rank.cpu_s for rank in summary.ranks if rank.cpu_s]
    assert len(cpus) == 6
    return sum(cpus)


def ready(folder: Path) -> bool:
    return bool(list(folder.glob("*/monitor.0/run.json")))


def test_a_killed_job_has_its_report_and_leaves_no_sampler(
    runner: SlurmJobRunner, folder: Path
) -> None:
    words = (
        "-N3",
        "--ntasks-per-node=2",
        SRUNDDP,
        "run",
        "--monitor=0.5",
        f"--monitor-dir={folder}",
    )
    variables = {"SRUNDDP_IFACES": str(runner.ifaces), "OMP_NUM_THREADS": "1"}
    with ending(
        runner.cluster.popen("srun", *words, MONITORED, "healthy", "1000", env=variables)
    ) as step:
        until(lambda: ready(folder) and summed(folder).steps > 150)
        until(lambda: len(samplers(runner)) == 3)  # those of the test before may be about to end
        job = job_of(folder)
        there = supervisors(job)
        assert len(there) == 6
        killed = time.time()
        for process in there:
            # When one is gone, the others begin to end at once.
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        step.communicate(timeout=60)
        until(lambda: not samplers(runner), limit=5)
    assert step.returncode != 0
    for node in NODES[:3]:
        last = (start_of(folder) / f"{node.name}.node.csv").read_text().splitlines()[-1]
        assert killed - float(last.split(",")[0]) < 1.5
    steps = [rank.steps for rank in summed(folder).ranks]
    assert len(steps) == 6
    assert min(steps) > 100
    # Until then it might still run.
    said = until(lambda: live_report(runner, folder), limit=20)
    assert "killed" in said, said


@contextmanager
def ending(process: Popen[str]) -> Iterator[Popen[str]]:
    """Whatever happens: one that is waited for without a limit would hold up all tests."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def live_report(runner: SlurmJobRunner, folder: Path) -> str:
    """What the command prints of a run that is over."""
    shown = runner.cluster.run(SRUNDDP, "report", "--text", str(start_of(folder))).stdout
    if "still running" in shown:
        return ""
    return shown
