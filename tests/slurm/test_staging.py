"""Staging on the real cluster, where two of six nodes see neither the environment nor the
project.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster import slurm
from tests.cluster.network import Mount
from tests.cluster.nodes import NODES
from tests.conftest import PROGRAMS, ROOT
from tests.slurm import jobs
from tests.slurm.conftest import PYTHON, SRUNDDP, Outcome, SlurmJobRunner, outcome
from tests.support.starting import LONG, until
from tests.support.wheels import uv_settings

pytestmark = pytest.mark.slurm

BLIND = ("node02", "node05")
# Each rank says which copy of everything it works with, and whether its own data is there.
WHERE = """
import json, os, pathlib, sys, settings
print(json.dumps({
    "rank": int(os.environ["RANK"]),
    "node": os.environ["SLURMD_NODENAME"],
    "python": sys.executable,
    "folder": os.getcwd(),
    "script": str(pathlib.Path(__file__).resolve()),
    "settings": settings.__file__,
    "argument": sys.argv[1],
    "data": pathlib.Path(sys.argv[1], "sample").read_text(),
    "home": os.environ["HF_HOME"],
}))
"""


# torch, numpy and what they need: packages, and what says that they are there.
TORCH = """
torch* functorch numpy* sympy* mpmath* networkx* jinja2* markupsafe* filelock* fsspec*
typing_extensions* setuptools* _distutils_hack distutils-precedence.pth
"""


class Site:
    """Folders that all nodes but two see."""

    def __init__(self, runner: SlurmJobRunner, folder: Path) -> None:
        self.runner = runner
        self.folder = folder
        self.env = folder / "env"
        self.project = folder / "project"
        self.data = folder / "data"
        self.variables = {"SRUNDDP_IFACES": str(runner.ifaces), "OMP_NUM_THREADS": "1"}
        folders = (f"--env={self.env}", f"--project={self.project}", f"--data={self.data}")
        self.push = shlex.join(["srunddp", "stage", "push", *folders])

    def job(self, body: str, *options: str, timeout: float = 500) -> Outcome:
        """A batch job in the project's folder, on all six nodes unless told otherwise, from its
        start to its end.
        """
        number = self.submit(body, *options)
        out = self.folder / "job.out"
        until(lambda: not self.runner.cluster.run("squeue", "--noheader").stdout.strip(), timeout)
        shown = self.runner.cluster.run("scontrol", "show", "job", number).stdout
        code = re.search(r" ExitCode=(\d+)", shown)
        assert code, shown
        return outcome(subprocess.CompletedProcess((), int(code[1]), out.read_text(), ""))

    def submit(self, body: str, *options: str) -> str:
        """Submit a job, which writes to job.out, and return its number."""
        (self.folder / "job.out").write_text("")
        start = f"cd {self.project}\n. {self.env}/bin/activate\nexport HF_HOME={self.data}/cache"
        variables = (
            f"export {shlex.join(f'{name}={value}' for name, value in self.variables.items())}"
        )
        (self.folder / "job.sh").write_text(f"#!/bin/bash\n{start}\n{variables}\n{body}\n")
        words = (
            "--nodes=6",
            "--ntasks-per-node=1",
            "--open-mode=append",
            f"--output={self.folder}/job.out",
            *options,
        )
        return self.runner.cluster.run(
            "sbatch", "--parsable", *words, f"{self.folder}/job.sh"
        ).stdout.strip()


def build(requirements: str, env: Path) -> None:
    """An environment as users make it."""
    wanted = env.with_name("requirements.txt")
    wanted.write_text(requirements)
    words = (SRUNDDP, "stage", "build", "-r", str(wanted), "-o", str(env), "--online")
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, env=os.environ | uv_settings()
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def site(runner: SlurmJobRunner) -> Iterator[Site]:
    here = Site(runner, runner.cluster.shared / "site")
    here.folder.mkdir()
    build("", here.env)
    here.project.mkdir()
    (here.project / "where.py").write_text(WHERE)
    (here.project / "settings.py").write_text("")
    here.data.mkdir()
    (here.data / "sample").write_text("a sample")
    with ExitStack() as stack:
        for node in BLIND:
            stack.enter_context(mounted(runner, node, ("-t", "tmpfs", "tmpfs", str(here.folder))))
        yield here


@contextmanager
def mounted(runner: SlurmJobRunner, node: str, *mounts: Mount) -> Iterator[None]:
    """Mounts on a node, the later ones below the first; gone at the end, whoever still works
    there.
    """
    # By one command: none starts where the first has hidden the folder of the tests.
    mounting = " && ".join(shlex.join(("mount", *mount)) for mount in mounts)
    runner.cluster.on(node, "sh", "-c", mounting)
    try:
        yield
    finally:
        runner.cluster.on(node, "umount", "--recursive", "--lazy", mounts[0][-1])


@pytest.fixture(autouse=True)
def nothing_left(runner: SlurmJobRunner) -> Iterator[None]:
    """A test that fails leaves no copies, by which the next would fail."""
    yield
    runner.cluster.cancel_all()
    for node in left(runner):
        runner.cluster.on(node, "sh", "-c", "rm -rf /tmp/sdd-*")


@pytest.fixture(scope="module")
def with_torch(site: Site) -> Path:
    """An environment that can train, beside the light one: that with our torch, as building it
    takes a minute.
    """
    env = site.folder / "torch"
    ours = Path(sysconfig.get_path("purelib"))
    shutil.copytree(site.env, env, symlinks=True)
    (packages,) = env.glob("lib/python3*/site-packages")
    for name in TORCH.split():
        for found in ours.glob(name):
            # The light one has some of these, as srunddp needs them itself.
            if found.is_dir():
                shutil.copytree(found, packages / found.name, dirs_exist_ok=True)
            else:
                shutil.copy2(found, packages / found.name)
    return env


def left(runner: SlurmJobRunner) -> dict[str, list[str]]:
    """What staging has left in the nodes' /tmp."""
    shown = {
        node.name: runner.cluster.on(node.name, "ls", "-A", "/tmp").stdout.split() for node in NODES
    }
    names = {
        node: [name for name in found if name.startswith("sdd-")] for node, found in shown.items()
    }
    return {node: found for node, found in names.items() if found}


def why_left(site: Site) -> str:
    """What is there, and the daemons' last words."""
    seen = site.runner.cluster.on("node01", "sh", "-c", "ls -la /tmp/sdd*").stdout
    printed = (site.folder / "job.out").read_text()
    return f"{seen}\n{printed}\n{slurm.log_tails(site.runner.cluster.folder, 60)}"


@pytest.mark.gate
def test_nodes_work_in_copies_or_in_what_they_see(site: Site) -> None:
    run = f'srun "$staged" run --staged where.py {site.data}'
    # A pipe on standard error as well: what stays in the background must not hold it open.
    first = f"staged=$({site.push} 2>&1 | tee /dev/stderr | tail -1)"
    done = site.job(
        f"{first}\n{run}\necho again\nstaged=$({site.push})\n{run}\nsrunddp stage clean"
    )
    assert done.code == 0, done.output
    first, again = done.output.split("again\n", 1)
    for role in ("env", "project", "data"):
        assert re.findall(
            rf"(node\d\d) staged -> /tmp/sdd-\d+-\d+/{role}-\w+$", first, re.MULTILINE
        ) == [*BLIND]
        assert re.search(rf"node\[02,05\] staged before -> \S+/{role}-", again)
    assert " staged -> " not in again
    assert len(done.reports) == 12
    for report in done.reports:
        copied = report["node"] in BLIND
        assert report["data"] == "a sample"
        for name in ("python", "folder", "script", "settings", "argument", "home"):
            assert report[name].startswith("/tmp/sdd-" if copied else f"{site.folder}/"), (
                name,
                report,
            )
    assert left(site.runner) == {}


@pytest.mark.parametrize("end", ["end", "failure", "scancel", "scancel while staging"])
def test_end_of_job_leaves_no_copy(site: Site, end: str) -> None:
    last = {"end": "true", "failure": "exit 3"}.get(end, "sleep 1000")
    # Slurm's SIGTERM would end the shell, and the push with it, by SIGKILL.
    number = site.submit(f"trap : TERM\n{site.push}\n{last}")
    if end.startswith("scancel"):
        role = "env" if end.endswith("staging") else "data"
        until(lambda: f" {role}: " in (site.folder / "job.out").read_text())
        site.runner.cluster.run("scancel", number)
    until(lambda: not site.runner.cluster.run("squeue", "--noheader").stdout.strip())
    until(lambda: left(site.runner) == {}, why=lambda: why_left(site))
    if not end.startswith("scancel"):
        assert "aborted" not in (site.folder / "job.out").read_text()


def test_full_disk_is_named_before_anything_is_sent(site: Site) -> None:
    with mounted(
        site.runner, "node05", *slurm.over_tmp(site.runner.cluster.folder, "-o", "size=2M")
    ):
        done = site.job(f"{site.push} || exit $?")
    assert done.code == 69
    assert re.search(
        r"error: node05 has \d MiB free in /tmp; expected \d+ MiB for \S+/env and its archive",
        done.output,
    )
    until(lambda: left(site.runner) == {}, why=lambda: why_left(site))


def test_job_script_trains_on_nodes_of_both_kinds(site: Site, with_torch: Path) -> None:
    shutil.copy(PROGRAMS / "torchrun_style.py", site.project / "train.py")
    layout = (
        "--nodes=6",
        "--ntasks-per-node=1",
        f"--venv={with_torch}",
        "--backend=gloo",
    )
    words = (
        SRUNDDP,
        "sbatch",
        *layout,
        "--stage",
        "--preflight",
        "--offline",
        "--submit",
        "train.py",
    )
    site.runner.cluster.run("env", f"--chdir={site.project}", *words, env=site.variables)
    until(lambda: not site.runner.cluster.run("squeue", "--noheader").stdout.strip(), 200)
    (log,) = (site.project / "logs").glob("train-*.out")
    said = log.read_text()
    reports = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert sorted(report["rank"] for report in reports) == list(range(6)), said
    assert "6 of 6 ranks on 6 nodes, all is well" in said, said
    print(re.findall(r"^srunddp: (\w+: \d+ files.*)$", said, re.MULTILINE))
    assert left(site.runner) == {}


def test_importing_torch_from_a_copy_spares_shared_env(site: Site, with_torch: Path) -> None:
    environments = f"{with_torch} {with_torch} ${{staged%/*}}/env-????????????"
    count = f"PYTHONPATH={ROOT} {PYTHON} -m tests.benchmarks.storm {environments}"
    push = f"srunddp stage push --env={with_torch} --all-nodes"
    done = site.job(f"staged=$({push})\n{count}\nsrunddp stage clean", "--nodes=1")
    found = re.search(r"^(\d+) (\d+)$", done.output, re.MULTILINE)
    assert found, done.output
    assert int(found[1]) > 10_000
    assert int(found[2]) == 0


def test_requeued_job_is_staged_again_and_goes_on(site: Site, with_torch: Path) -> None:
    cluster = site.runner.cluster
    steps = site.runner.cluster.shared / "steps"
    folder = site.folder / "requeued"
    for each in (steps, folder):
        each.mkdir()
    shutil.copy(PROGRAMS / "preempted.py", site.project)
    layout = (
        "--nodes=2",
        "--nodelist=node01,node02",
        "--ntasks-per-node=1",
        f"--venv={with_torch}",
        "--time=60",
    )
    words = (
        *layout,
        "--stage",
        "--requeue",
        "--signal=none",
        "--env=LEAD=0",
        "--submit",
        "preempted.py",
        str(steps),
    )
    done = cluster.run(
        "env", f"--chdir={site.project}", SRUNDDP, "sbatch", *words, env=site.variables
    )
    job = jobs.Job(site.runner, folder, done.stdout.strip())
    (folder / "out").symlink_to(site.project / "logs" / f"preempted-{job.number}.out")
    jobs.until(lambda: len(list(steps.glob("at.0.?"))) == 2, [job])
    cluster.run("scancel", "--signal=USR2", job.number)
    # 930 MiB are packed, sent and unpacked once more.
    jobs.until(job.is_over, [job], limit=4 * LONG)
    assert (job.state, job.code, job.restarts) == ("COMPLETED", 0, 1), job
    assert job.output.count("srunddp: node02 staged -> ") == 4
    assert "srunddp: error: " not in job.output
    step = jobs.found(job.output, jobs.STOPPED.format("SIGUSR2", "; the job is requeued"))
    assert f"done from step {step} to {int(step) + 5}\n" in job.output
    until(lambda: left(site.runner) == {}, why=lambda: why_left(site))
