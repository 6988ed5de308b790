"""The scripts of ``srunddp sbatch`` on a real cluster: in place of what people wrote by hand, and
upon a job's end.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from srunddp.sbatch.render import directive
from tests.cluster.cluster import Settings, beside
from tests.conftest import PROGRAMS, ROOT
from tests.sbatch.test_hostile import HOSTILE
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner
from tests.slurm.jobs import SIGNALLED, STOPPED, Job, draw_near, found, look, until
from tests.support.job_specs import commands

pytestmark = pytest.mark.slurm

COMMANDS = commands()
INTERACTIVE = "an_interactive_allocation"
# What this cluster does not have: those nodes, ten of them, and the name of one to avoid.
OVERRIDES = {
    "nodes_with_different_interface_names": ("--nodelist=node[01-06]",),
    "nodes_without_gpus": ("--nodelist=node[01-06]",),
    INTERACTIVE: ("--nodes=3", "--exclude=node06"),
}
RANKS = {
    "nodes_without_gpus": 6,
    "four_nodes_with_eight_gpus_each": 32,
    "one_node_with_four_gpus": 4,
    "two_nodes_with_infiniband_and_modules": 8,
    "one_gpu_on_each_node": 4,
    INTERACTIVE: 6,
}
# As Lmod and Environment Modules export theirs.
MODULE = '() {  echo "$*" >>"$FOLDER/modules"\n}'
HOSTILE_NAME = 'it\'s "a" $(touch canary) `touch canary` \\ # ;%j [x] ü'
HOSTILE_ARGUMENTS = [text for text in HOSTILE if text.isprintable()]
LIMIT = 240.0


@dataclass
class Site:
    """A folder in which a user works: scripts, environments, and the jobs that were submitted from
    it.
    """

    runner: SlurmJobRunner
    folder: Path
    jobs: dict[str, Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        (self.folder / "etc").mkdir()
        shutil.copy(self.runner.ifaces, self.folder / "etc" / "ifaces.conf")
        for environment in ("venv", ".venv", "staged-env"):
            (self.folder / environment).symlink_to(ROOT / ".venv")
        for script in {
            word for words in COMMANDS.values() for word in words if re.fullmatch(r"\w+\.py", word)
        }:
            program = "torchrun_style.py" if script == "train_gloo.py" else "report.py"
            (self.folder / script).symlink_to(PROGRAMS / program)

    def run(self, *words: str, check: bool = True, **variables: str) -> Any:
        env = {
            "SRUNDDP_IFACES": str(self.runner.ifaces),
            "OMP_NUM_THREADS": "1",
            "BASH_FUNC_module%%": MODULE,
            "FOLDER": str(self.folder),
            **variables,
        }
        command = ("env", "-C", str(self.folder), *words)
        return self.runner.cluster.run(*command, env=env, check=check, timeout=100)

    def srunddp(self, *words: str, check: bool = True, **variables: str) -> Any:
        """``srunddp sbatch``, which is on the nodes' file system but in nobody's PATH."""
        return self.run(SRUNDDP, "sbatch", f"--srunddp={SRUNDDP}", *words, check=check, **variables)

    def submit(self, name: str, *words: str) -> Job:
        """By ``--submit``, with a log folder of its own."""
        folder = f"logs/{name}"
        where = [f"--output={folder}/%x-%j.out"]
        if any(word.startswith("--monitor") for word in words):
            where.append(f"--monitor-dir={folder}")
        done = self.srunddp("--submit", *where, f"--job-name={name}", *words)
        return self._noted(name, done.stdout.strip(), f"logs/{name}/{name}-%.out")

    def _noted(self, name: str, number: str, output: str) -> Job:
        assert number.isdecimal()
        folder = self.folder / f"job-{name}"
        folder.mkdir()
        (folder / "out").symlink_to(self.folder / output.replace("%", number))
        self.jobs[name] = Job(self.runner, folder, number)
        return self.jobs[name]

    def recipe(self, name: str) -> None:
        """The page's command; its script is a file that sbatch accepts, and is given to it."""
        options = COMMANDS[name][2:]
        script = next(number for number, word in enumerate(options) if word.endswith(".py"))
        options[script:script] = OVERRIDES.get(name, ())
        self.srunddp(f"--write={name}.sh", *options)
        if name == INTERACTIVE:
            return
        tested = self.run("sbatch", "--test-only", f"{name}.sh")
        (self.folder / f"{name}.accepted").write_text(tested.stderr)
        if name in RANKS:
            number = self.run("sbatch", "--parsable", f"{name}.sh").stdout.strip()
            job_name = found((self.folder / f"{name}.sh").read_text(), "#SBATCH --job-name=(.*)")
            self._noted(name, number, f"logs/{job_name}-%.out")


@pytest.fixture(scope="module")
def site(runner: SlurmJobRunner) -> Site:
    return Site(runner, runner.cluster.shared / "user's folder")


@pytest.fixture(scope="module")
def watched(site: Site) -> Site:
    """Four jobs that are monitored, all at once, each from its submission to its end."""
    words = (
        *SIGNALLED,
        "--nodes=2",
        "--requeue",
        "--monitor=1",
        "--env=LEAD=0",
        str(PROGRAMS / "preempted.py"),
    )
    (site.folder / "steps").mkdir()
    limit = site.submit("limit", *words, "steps")
    monitored = ("--nodes=2", "--monitor=1")
    site.submit("ended", *monitored, "train.py")
    failing = "import os, sys, time\ntime.sleep(2)\nsys.exit(7 * (os.environ['RANK'] == '1'))\n"
    (site.folder / "failing.py").write_text(failing)
    site.submit("failed", *monitored, "failing.py")
    (site.folder / "waiting.py").write_text(
        "import time\nprint('waits', flush=True)\ntime.sleep(600)\n"
    )
    waiting = site.submit("cancelled", *monitored, "--requeue", "waiting.py")
    until(lambda: look([waiting]) or waiting.output.count("waits") == 2, [waiting], LIMIT)
    site.runner.cluster.run("scancel", waiting.number)
    until(
        lambda: look([limit]) or len(list((site.folder / "steps").glob("at.0.?"))) == 2,
        [limit],
        LIMIT,
    )
    draw_near(limit)
    until(lambda: look(site.jobs.values()), site.jobs.values(), LIMIT)
    return site


@pytest.fixture(scope="module")
def recipes(site: Site) -> Site:
    """The jobs of the page of recipes, all at once, each from its submission to its end."""
    before = set(site.jobs)
    for name in COMMANDS:
        if name in RANKS or name == "nodes_with_different_interface_names":
            site.recipe(name)
    jobs = [job for name, job in site.jobs.items() if name not in before]
    until(lambda: look(jobs), jobs, LIMIT)
    return site


def reports(text: str) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert len({each["rank"] for each in found}) == len(found)
    return {each["rank"]: each for each in found}


@pytest.mark.parametrize(
    "name",
    [*(name for name in RANKS if name != INTERACTIVE), "nodes_with_different_interface_names"],
)
def test_slurm_accepts_the_scripts_of_the_recipes(name: str, recipes: Site) -> None:
    assert re.search(
        r"sbatch: Job \d+ to start at ", (recipes.folder / f"{name}.accepted").read_text()
    )


@pytest.mark.parametrize("name", [name for name in RANKS if name != INTERACTIVE])
def test_it_runs_to_the_end_with_a_rank_for_each_gpu(name: str, recipes: Site) -> None:
    job = recipes.jobs[name]
    assert (job.state, job.code) == ("COMPLETED", 0), job
    ranks = reports(job.output)
    assert sorted(ranks) == list(range(RANKS[name])), job
    assert {each["world_size"] for each in ranks.values()} == {RANKS[name]}
    if name == "nodes_without_gpus":
        assert {each["sum"] for each in ranks.values()} == {21.0}
    else:
        script = next(number for number, word in enumerate(COMMANDS[name]) if word.endswith(".py"))
        assert {tuple(each["arguments"]) for each in ranks.values()} == {
            tuple(COMMANDS[name][script + 1 :])
        }
        assert {each["python"] for each in ranks.values()} == {ranks[0]["python"]}


def test_modules_are_loaded_by_the_sites_own_function(recipes: Site) -> None:
    lines = (recipes.folder / "modules").read_text().splitlines()
    assert sorted(lines) == [
        "load Python/3.10 CUDA/11.7 NCCL",
        "load cuda/11.6 gcc/10.3 python/3.9",
        "purge",
    ]


def test_the_interactive_script_allocates_checks_and_trains(recipes: Site) -> None:
    """These nodes see all that it stages; where some do not is in test_staging."""
    done = recipes.run("bash", f"{INTERACTIVE}.sh")
    shown = re.findall(r"^(node\d\d):(\d+): (\{.*)$", done.stdout, re.MULTILINE)
    ranks = {int(rank): json.loads(report) for _, rank, report in shown}
    assert sorted(ranks) == list(range(RANKS[INTERACTIVE])), done
    assert [ranks[int(rank)]["node"] for _, rank, _ in shown] == [node for node, _, _ in shown]
    assert "check of job" in done.stdout
    assert "salloc: Granted job allocation" in done.stderr
    assert "all nodes see" in done.stderr
    assert "[RANK 0] WORLD_SIZE=6" in done.stderr
    assert len(list((recipes.folder / "logs").glob("preflight.*.txt"))) == 1


@pytest.mark.gate
def test_a_job_warned_of_its_time_limit_is_requeued_and_finishes(watched: Site) -> None:
    job = watched.jobs["limit"]
    step = found(job.output, STOPPED.format("SIGUSR2", "; the job is requeued"))
    assert f"done from step {step} to {int(step) + 5}\n" in job.output, job
    assert (job.state, job.restarts) == ("COMPLETED", 1), job


@pytest.mark.gate
@pytest.mark.parametrize(
    ("name", "state", "code"),
    [("ended", "COMPLETED", 0), ("failed", "FAILED", 7), ("cancelled", "CANCELLED", 143)],
)
def test_the_state_and_the_code_are_those_of_the_training(
    name: str, state: str, code: int, watched: Site
) -> None:
    job = watched.jobs[name]
    assert (job.state, job.code) == (state, code), job


@pytest.mark.gate
@pytest.mark.parametrize("name", ["ended", "failed", "cancelled", "limit"])
def test_every_start_is_monitored_and_no_process_is_left(name: str, watched: Site) -> None:
    job = watched.jobs[name]
    for start in range(job.restarts + 1):
        folder = watched.folder / "logs" / name / f"{job.number}.0" / f"monitor.{start}"
        samples = list(folder.glob("node0?.node.csv"))
        assert len(samples) == 2, samples  # a start after a requeue may be on other nodes
        assert all(len(path.read_text().splitlines()) > 1 for path in samples)
    assert not processes(job.number)


@pytest.mark.gate
@pytest.mark.parametrize(("name", "reports"), [("ended", 1), ("failed", 1), ("cancelled", 0)])
def test_a_report_follows_a_training_that_ends_by_itself(
    name: str, reports: int, watched: Site
) -> None:
    job = watched.jobs[name]
    assert len(list((watched.folder / "logs" / name).rglob("*.html"))) == reports, job


@pytest.mark.gate
def test_a_report_by_the_job_s_number_shows_its_ranks(watched: Site) -> None:
    job = watched.jobs["failed"]
    said = watched.run(SRUNDDP, "report", "--text", "--monitor-dir=logs/failed", job.number).stdout
    assert job.number in said, said
    assert re.search(r"\bnode0\d", said), said
    assert re.search(r"failed|exit code 7", said), said


def processes(job: str) -> list[str]:
    """Of a job on all nodes, which share this machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"SLURM_JOB_ID={job}\0".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return found


CONVERTED = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --gres=gpu:2
export PATH={path}:$PATH
srun -l --ntasks=2 torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=2 \\
  --rdzv-endpoint="$H:29500" train.py --lr "a b"
"""


@pytest.mark.gate
def test_a_converted_script_runs_with_as_many_ranks(site: Site) -> None:
    (site.folder / "theirs.sh").write_text(CONVERTED.format(path=ROOT / "bin"))
    number = site.run(SRUNDDP, "sbatch", "--from=theirs.sh", "--submit").stdout.strip()
    job = site._noted("converted", number, "slurm-%.out")
    until(lambda: look([job]), [job])
    assert job.state == "COMPLETED", job
    ranks = reports(re.sub(r"^\d: ", "", job.output, flags=re.MULTILINE))
    assert {rank: (each["node"], each["arguments"]) for rank, each in ranks.items()} == {
        rank: (f"node0{1 + rank // 2}", ["--lr", "a b"]) for rank in range(4)
    }


@pytest.mark.parametrize("quoted", [False, True])
def test_slurm_reads_any_text_of_an_sbatch_line_as_it_is(quoted: bool, site: Site) -> None:
    """In a field of its own: what is not given is seen there as well."""
    texts = [text for text in HOSTILE if text and text.isprintable()] + [
        " a ",
        "a\\ ",
        '"',
        "''",
        "##",
        "a" * 200,
    ]
    for text in (f'"{text}"' if quoted else text for text in texts):
        lines = (
            "#!/bin/bash",
            directive("job-name", text),
            directive("comment", text),
            directive("nodes", 2),
            "true",
        )
        (site.folder / "line.sh").write_text("\n".join(lines))
        number = site.run("sbatch", "--parsable", "--hold", "line.sh").stdout.strip()
        shown = site.runner.cluster.run("scontrol", "show", "job", number).stdout
        assert found(shown, r"JobName=(.*)\n") == text
        assert found(shown, rf" Comment=({re.escape(text)}) ?\n") == text
        # Since Slurm 26.05 no blank ends the line above, and a pending job has `2-2` here.
        assert found(shown, r"NumNodes=(?:2-)?(\d+)") == "2"
        site.run("scancel", number)


@pytest.mark.gate
def test_a_name_of_any_letters_and_any_arguments_come_through(site: Site) -> None:
    job = site.srunddp(
        "--submit",
        f"--job-name={HOSTILE_NAME}",
        "--log-dir=logs/it's 100%j",
        "train.py",
        *HOSTILE_ARGUMENTS,
    )
    number = job.stdout.strip()
    shown = site.runner.cluster.run("scontrol", "show", "job", number).stdout
    assert found(shown, r"JobName=(.*)\n") == HOSTILE_NAME
    mine = site._noted("hostile", number, f"logs/it's 100%j/{HOSTILE_NAME}-{number}.out")
    until(lambda: look([mine]), [mine])
    assert mine.state == "COMPLETED", mine
    (output,) = (site.folder / "logs" / "it's 100%j").glob("*.out")
    assert reports(output.read_text())[0]["arguments"] == HOSTILE_ARGUMENTS
    assert not list(site.folder.rglob("canary*"))


# The #SBATCH lines of sites' public documentation, with names for placeholders. `srunddp sbatch`
# gets the same words.
SITES = {
    # LUMI: https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/lumig-job/
    "lumi": (
        "--job-name=examplejob --output=examplejob.o%j --error=examplejob.e%j"
        " --partition=standard-g --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --time=1-12:00:00"
        " --account=project_462"
    ),
    # CSC Puhti: https://docs.csc.fi/support/tutorials/ml-multi/
    "puhti": (
        "--account=project_200 --partition=gpu --nodes=2 --ntasks-per-node=1 --cpus-per-task=40"
        " --mem=320G --time=1:00:00 --gres=gpu:v100:4"
    ),
    # Princeton: https://github.com/PrincetonUniversity/multi_gpu_training
    # (02_pytorch_ddp/job.slurm)
    "princeton": (
        "--job-name=ddp-torch --nodes=2 --ntasks-per-node=2 --cpus-per-task=8 --mem=32G"
        " --gres=gpu:2 --time=00:05:00 --mail-type=begin --mail-type=end"
        " --mail-user=netid@princeton.edu"
    ),
    # Mila: https://docs.mila.quebec/examples/distributed/multi_node/
    "mila": (
        "--ntasks=4 --ntasks-per-node=2 --cpus-per-task=4 --gpus-per-task=l40s:1 --mem-per-gpu=16G"
        " --time=00:15:00"
    ),
    # CSCS: https://docs.cscs.ch/software/ml/pytorch/ (with the features that the page advises)
    "cscs": (
        "--account=a1 --job-name=dist-train-ddp --time=01:00:00 --nodes=2 --ntasks-per-node=4 "
        "--output=logs/slurm-%x-%j.log -C thp_never&nvidia_vboost_enabled"
    ),
}
# What each job has for itself; and which script it is, and where that writes.
OF_ITS_OWN = {"JobId", "AllocNode:Sid", "SubmitTime", "EligibleTime", "AccrueTime", "LastSchedEval"}
SCRIPTS_OWN = {"Command", "WorkDir", "StdOut", "StdErr"}


@pytest.fixture(scope="module")
def many_sites(accounting: None) -> Iterator[SlurmJobRunner]:
    """A cluster with the partitions, features, accounts and GRES of these scripts."""
    features = ("thp_never", "nvidia_vboost_enabled")
    named = Settings(
        partitions=("standard-g",),
        features=features,
        gpu_types=("v100", "l40s"),
        cpus=64,
        accounting=True,
    )
    with beside(named, 13) as cluster:
        accounts = ",".join(re.findall(r"--account=(\S+)", " ".join(SITES.values())))
        for words in (("account", accounts), ("user", "root", f"account={accounts}")):
            cluster.run("sacctmgr", "--immediate", "add", *words)
        yield SlurmJobRunner(cluster)


@pytest.mark.parametrize("name", SITES)
def test_a_sites_own_script_and_ours_are_the_same_job(
    name: str, many_sites: SlurmJobRunner
) -> None:
    words = shlex.split(SITES[name])
    folder = many_sites.cluster.shared / name
    folder.mkdir()
    (folder / "train.py").write_text("print()\n")
    pairs = re.findall(r"(?:^| )(-.*?)(?= -|$)", SITES[name])
    (folder / "theirs.sh").write_text(
        "\n".join(["#!/bin/bash", *(f"#SBATCH {pair}" for pair in pairs), "true\n"])
    )
    if "--job-name" in SITES[name]:
        named: tuple[str, ...] = ()
    else:
        named = ("--job-name=theirs.sh",)
    inside = ("env", "-C", str(folder))
    command = (
        SRUNDDP,
        "sbatch",
        f"--srunddp={SRUNDDP}",
        "--write=ours.sh",
        *named,
        *words,
        "train.py",
    )
    many_sites.cluster.run(*inside, *command)
    shown = []
    for script in ("theirs.sh", "ours.sh"):
        done = many_sites.cluster.run(*inside, "sbatch", "--parsable", "--hold", script)
        text = many_sites.cluster.run("scontrol", "show", "job", done.stdout.strip()).stdout
        shown.append(dict(re.findall(r"(\S+?)=(\S*)", text)))
    theirs, ours = shown
    assert {
        key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key)
    } <= OF_ITS_OWN | SCRIPTS_OWN


TOO_MUCH = ("--gpus-per-node=9", "--nodes=99", "--mem=2T")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--time=4h", "Invalid --time specification"),
        ("--signal=USR9@60", "Invalid --signal specification"),
        # The second of two is what Slurm 26.05 says.
        (
            "--gres=gpu:",
            "Invalid (generic resource \\(gres\\)|Trackable RESource \\(TRES\\)) specification",
        ),
        ("--array=0..7", "allocation failure: Invalid job array specification"),
        ("--nodelist=node[01-", "Invalid node (name|list) specified"),
        ("--reservation=no such", "allocation failure: Requested reservation is invalid"),
        pytest.param(
            "--partition=gpus",
            "allocation failure: Invalid partition name specified",
            marks=pytest.mark.gate,
        ),
        *(
            (option, "allocation failure: Requested node configuration is not available")
            for option in TOO_MUCH
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "mode", [(), ("--submit",), ("--salloc",)], ids=["sbatch", "submit", "salloc"]
)
def test_what_slurm_refuses_is_one_line(
    option: str, words: str, mode: tuple[str, ...], site: Site
) -> None:
    if mode == ("--salloc",) and option.startswith("--array"):
        return  # not of salloc
    done = site.srunddp(*mode, option, "train.py", check=False)
    assert (done.returncode, done.stdout) == (78, ""), done
    (line,) = [
        line for line in done.stderr.splitlines() if line.startswith("srunddp: error: sbatch: ")
    ]
    assert re.search(f"{words}; expected a job that Slurm accepts -> ", line), line
