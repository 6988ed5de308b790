"""``srunddp sbatch`` as a user calls it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from srunddp.cli import main
from srunddp.sbatch import cli, run_options
from srunddp.sbatch import submit as slurm
from srunddp.sbatch.slurm_options import OPTIONS
from srunddp.supervisor.output.redirect import shown_ranks
from tests.support.facts import tells
from tests.support.starting import srunddp, write

pytestmark = pytest.mark.slow


def stub(folder: Path, name: str, text: str) -> str:
    """A program in PATH; returns that PATH."""
    path = write(folder / "bin" / name, f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return f"{path.parent}:{os.environ['PATH']}"


def test_a_file_may_say_everything_and_the_command_line_wins(tmp_path: Path) -> None:
    text = (
        "script: train.py\narguments: [--lr, 1e-3, 'a b']\nnodes: 2\nrequeue: true\ntime:"
        " 10:15\nmodules: [A/1, B]\n"
    )
    write(tmp_path / "job.yaml", text)
    script = srunddp("sbatch", "--config=job.yaml", folder=tmp_path).stdout
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --requeue",
        "#SBATCH --time=10:15",
        "module load A/1 B",
    ):
        assert f"\n{line}\n" in script
    assert "run train.py --lr 1e-3 'a b' ||" in script
    # What follows the script is the script's own.
    options = (
        "--nodes=3",
        "--no-requeue",
        "--time=none",
        "other.py",
        "--requeue",
        "--nodes=7",
        "--help",
    )
    script = srunddp("sbatch", "--config=job.yaml", *options, folder=tmp_path).stdout
    assert "#SBATCH --nodes=3\n" in script
    assert "#SBATCH --requeue" not in script
    assert "#SBATCH --time" not in script
    assert script.endswith("run other.py --requeue --nodes=7 --help\n")


def test_the_active_environment_is_taken(tmp_path: Path) -> None:
    venv = tmp_path / "active"
    for name in ("python", "srunddp"):
        write(venv / "bin" / name, "").chmod(0o755)
    # bin/srunddp would go on in that environment's Python.
    variables = {"VIRTUAL_ENV": str(venv), "_SRUNDDP_PYTHON": str(venv / "bin/python")}
    done = srunddp("sbatch", "train.py", folder=tmp_path, **variables)
    assert f"export VIRTUAL_ENV={venv}\n" in done.stdout
    assert done.stdout.endswith("  srunddp run train.py\n")


def test_nodes_start_this_srunddp_where_the_environment_has_none(tmp_path: Path) -> None:
    command = srunddp("sbatch", "train.py", folder=tmp_path).stdout.splitlines()[-1].split()[0]
    assert command.endswith("/bin/srunddp")
    assert os.access(command, os.X_OK)
    (tmp_path / "train").mkdir()  # no conda environment, though of its name
    script = srunddp("sbatch", "--conda=train", "train.py", folder=tmp_path).stdout
    assert script.splitlines()[-1].split()[0] == "srunddp"
    assert "unset VIRTUAL_ENV" in script


def a_script(folder: Path) -> None:
    write(folder / "train.py", "print()\n")


def test_submit_gives_sbatch_the_script_and_prints_the_number(tmp_path: Path) -> None:
    a_script(tmp_path)
    program = (
        'cat >given; echo "$*" >words; ls -d logs >folder; env >variables; echo welcome; echo'
        ' "4711;cluster"'
    )
    path = stub(tmp_path, "sbatch", f"{program}; printf 'sbatch: caf\\351 is closed\\n' >&2")
    shell = {"PATH": path, "LC_ALL": "C.UTF-8", "SLURM_CPUS_PER_TASK": "7", "SLURM_CONF": "/c"}
    done = srunddp("sbatch", "--submit", "train.py", folder=tmp_path, **shell)
    assert (done.returncode, done.stdout) == (0, "4711\n")
    assert "srunddp: note: sbatch: caf\N{REPLACEMENT CHARACTER} is closed\n" in done.stderr
    assert (tmp_path / "words").read_text() == "--parsable\n"
    assert (tmp_path / "folder").read_text() == "logs\n"
    # Nothing of the job that this shell may be in, and all else as it is: sbatch hands it on.
    variables = (tmp_path / "variables").read_text().splitlines()
    assert {"SLURM_CONF=/c", "LC_ALL=C.UTF-8"} <= {*variables}
    assert not [each for each in variables if each.startswith(("SLURM_CPUS", "SLURM_TIME", "TZ="))]
    submitted = (tmp_path / "given").read_text()
    printed = srunddp("sbatch", "train.py", folder=tmp_path, PATH=path).stdout
    assert submitted == printed.replace("sbatch train.py", "sbatch --submit train.py")


def test_slurm_looks_at_a_script_that_is_not_submitted(tmp_path: Path) -> None:
    program = (
        'cat >given; echo "$* $SBATCH_QOS $SBATCH_PARTITION" >words; echo "sbatch: Job 7 to start'
        ' at 1" >&2'
    )
    exported = {
        "PATH": stub(tmp_path, "sbatch", program),
        "SBATCH_QOS": "long",
        "SALLOC_PARTITION": "debug",
    }
    done = srunddp("sbatch", "train.py", folder=tmp_path, **exported)
    assert (done.returncode, done.stdout) == (0, (tmp_path / "given").read_text())
    assert (tmp_path / "words").read_text() == "--test-only long \n"
    assert "Slurm" not in done.stderr
    srunddp("sbatch", "--salloc", "--nodes=2", "train.py", folder=tmp_path, **exported)
    assert (
        tmp_path / "words"
    ).read_text() == "--test-only --job-name=train --nodes=2 --ntasks-per-node=1  debug\n"


@pytest.mark.parametrize("option", [(), ("--submit",)], ids=str)
@pytest.mark.parametrize(
    ("said", "hint"),
    [
        (
            "sbatch: error: Invalid account or account/partition combination specified",
            "sacctmgr show ",
        ),
        ("allocation failure: Invalid partition name specified", "sinfo -s lists the partitions"),
        ("allocation failure: Requested node configuration is not available", "sinfo -o "),
        ("sbatch: error: Invalid --time specification", "correct the option it names"),
        ("sbatch: unrecognized option '--ndoes=2'", "correct the spelling, or see sbatch --help"),
    ],
)
def test_a_refusal_of_slurm_is_one_line(
    said: str, hint: str, option: tuple[str, ...], tmp_path: Path
) -> None:
    a_script(tmp_path)
    path = stub(tmp_path, "sbatch", f'echo "{said}" >&2; exit 1')
    done = srunddp("sbatch", *option, "train.py", folder=tmp_path, PATH=path)
    assert (done.returncode, done.stdout) == (78, "")
    (line,) = [line for line in done.stderr.splitlines() if "note: " not in line]
    words = said.removeprefix("sbatch: ").removeprefix("error: ")
    assert line.startswith("srunddp: error: ")
    assert tells(line, "sbatch", words, "; expected ", f" -> {hint}")
    # It can be submitted all the same, and only then --force has a meaning.
    assert line.endswith("--submit --force") is bool(option)


@pytest.mark.parametrize(
    ("sbatch", "found"),
    [
        ("", "no sbatch in PATH"),
        ("echo 'sbatch: error: Munge encode failed' >&2; exit 1", "sbatch: Munge encode failed"),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "sbatch: Unable to contact"),
    ],
)
def test_where_slurm_does_not_answer_that_is_said(sbatch: str, found: str, tmp_path: Path) -> None:
    a_script(tmp_path)
    path = stub(tmp_path, "sbatch", sbatch) if sbatch else "/nowhere"
    done = srunddp("sbatch", "train.py", folder=tmp_path, PATH=path)
    assert (done.returncode, done.stdout[:11]) == (0, "#!/bin/bash")
    (line,) = [line for line in done.stderr.splitlines() if found in line]
    assert tells(line, found, "not validated")
    done = srunddp("sbatch", "--submit", "train.py", folder=tmp_path, PATH=path)
    assert (done.returncode, done.stdout) == (69, ""), done.stderr
    assert f"srunddp: error: {found}" in done.stderr


def test_script_for_salloc_has_to_be_a_file(tmp_path: Path) -> None:
    path = stub(tmp_path, "salloc", "touch given")
    script = srunddp("sbatch", "--salloc", "train.py", folder=tmp_path, PATH=path).stdout
    # Over standard input the script cannot start itself once more.
    done = subprocess.run(
        ["bash"], input=script, cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert tells(done.stderr, "a file", "bash FILE")
    assert not (tmp_path / "given").exists()


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command in this process, without Slurm, in a new folder that has train.py."""
    a_script(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("VIRTUAL_ENV", *(name for name in os.environ if name.startswith("SBATCH_"))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cli, "DEFAULTS", (str(tmp_path / "site.yaml"), str(tmp_path / "user.yaml")))
    monkeypatch.setattr(slurm, "check", lambda *_: [])
    notes = io.StringIO()
    monkeypatch.setattr(cli, "write_stderr", notes.write)

    def call(*words: str) -> Result:
        notes.truncate(0)
        notes.seek(0)
        monkeypatch.setattr(sys, "argv", ["srunddp", "sbatch", *words])
        done = CliRunner().invoke(main, ["sbatch", *words])
        return replace_notes(done, notes.getvalue())

    return call


def replace_notes(done: Result, notes: str) -> Result:
    done.stderr_bytes = notes.encode()
    return done


def directives(done: Result) -> list[str]:
    return re.findall("^#SBATCH (.*)$", done.stdout, re.MULTILINE)


def test_every_option_of_sbatch_gets_through_by_its_names(called: Callable[..., Result]) -> None:
    both = OPTIONS.items() - {("gres", OPTIONS["gres"])}  # not with --gpus-per-node
    values = {name: "=x" if option.takes == "=" else "" for name, option in both}
    wanted = {f"--{name}{value}" for name, value in values.items()}
    for words in (wanted, {word.replace("-", "_").replace("__", "--", 1) for word in wanted}):
        assert wanted <= {*directives(called(*words, "train.py"))}
    apart = [word for each in wanted for word in each.split("=")]
    assert wanted <= {*directives(called(*apart, "train.py"))}
    may = [f"--{name}=x" for name, option in OPTIONS.items() if option.takes == "?"]
    assert {*may} <= {*directives(called(*may, "train.py"))}
    letters = {name: option.letter for name, option in OPTIONS.items() if option.letter}
    # All of 22.05 but our own, -m, -h and -V; and -Q and -v, which concern what sbatch prints.
    assert {*letters.values()} == {*"aAbBCdDeFGHikLMnoOpqsStwWx"}
    short = [f"-{letter}{values[name].removeprefix('=')}" for name, letter in letters.items()]
    assert {f"--{name}{values[name]}" for name in letters} <= {
        *directives(called(*short, "train.py"))
    }


def test_letters_of_our_own_options_are_sbatchs(called: Callable[..., Result]) -> None:
    lines = directives(
        called("-N2", "-J", "a", "-t10", "-c", "4", "--tasks-per-node=3", "train.py")
    )
    assert {
        "--nodes=2",
        "--job-name=a",
        "--time=10",
        "--cpus-per-task=4",
        "--ntasks-per-node=3",
    } <= {*lines}
    assert "--partition=hold" in directives(called("-phold", "train.py"))
    assert called("-m", "pkg.train").stdout.endswith(" run -m pkg.train\n")


def test_output_error_and_chdir_mean_slurms(called: Callable[..., Result], tmp_path: Path) -> None:
    done = called(
        "--output=out/%j.log", "--error=errors/%j", "--chdir=sub", "--write=job.sh", "train.py"
    )
    assert done.stderr.endswith("srunddp: written: job.sh -> sbatch job.sh\n")
    text = (tmp_path / "job.sh").read_text()
    assert "#SBATCH --output=out/%j.log\n" in text
    assert text.count("--output") == 2
    assert "mkdir -p -- sub/out sub/errors && sbatch" in text
    assert sorted(each.name for each in (tmp_path / "sub").iterdir()) == ["errors", "out"]
    done = called("--salloc", "--write=alloc.sh", "train.py")
    assert done.stderr.endswith("srunddp: written: alloc.sh -> bash alloc.sh\n")


def test_setup_lines_and_options_of_srun_come_before_the_ranks(
    called: Callable[..., Result],
) -> None:
    words = (
        "--setup=source 'a b.sh'",
        "--setup=ulimit -c 0",
        "--srun-arg=--cpu-bind=cores",
        "--srun-arg=-l",
    )
    done = called(*words, "--preflight", "train.py")
    before, _, after = done.stdout.partition("\nset +u\nsource 'a b.sh'\nulimit -c 0\nset -u\n")
    assert "srun --" not in before
    assert after.count(" --cpu-bind=cores -l ") == 2


def test_defaults_of_site_and_user_give_way_and_are_told(
    called: Callable[..., Result], tmp_path: Path
) -> None:
    write(
        tmp_path / "site.yaml",
        "partition: gpu\naccount: site\nhold: true\nqos: long\nsetup: [umask 77]\n",
    )
    write(tmp_path / "user.yaml", "account: mine\nmail_type: [END, FAIL]\nmail-user: me@x\n")
    write(tmp_path / "job.yaml", "script: train.py\npartition: debug\nexport: NONE\n")
    done = called("--config=job.yaml", "--no-hold", "--qos=none", "--exclusive")
    wanted = (
        "--account=mine",
        "--partition=debug",
        "--mail-type=END",
        "--mail-type=FAIL",
        "--export=NONE",
    )
    assert {*wanted, "--exclusive", "--mail-user=me@x"} <= {*directives(done)}
    assert not [
        line for line in directives(done) if line.startswith(("--hold", "--qos", "--account=site"))
    ]
    assert f"note: {tmp_path}/site.yaml: setup=[umask 77]\n" in done.stderr
    assert (
        f"note: {tmp_path}/user.yaml: account=mine, mail_type=[END, FAIL], mail_user=me@x\n"
        in done.stderr
    )
    write(tmp_path / "site.yaml", "partitoin: gpu\n")
    assert called("train.py").exit_code == 78


def test_a_conversion_takes_what_concerns_the_ranks_command(
    called: Callable[..., Result], tmp_path: Path
) -> None:
    write(tmp_path / "job.sh", "srun torchrun --nproc-per-node=2 train.py\n")
    write(tmp_path / "site.yaml", "ifaces: /etc/ifaces.conf\npartition: gpu\nmpi: pmi2\n")
    done = called("--from=job.sh", "--backend=gloo", "--env=A=b c", "--run-options=--restarts=1")
    assert done.exit_code == 0
    assert " --mpi=pmi2 \\\n    env \\\n    A='b c' \\\n" in done.stdout
    assert done.stdout.endswith(
        " srunddp --backend=gloo --ifaces=/etc/ifaces.conf --restarts=1 train.py\n"
    )
    used, unused = [line for line in done.stderr.splitlines() if "site.yaml" in line]
    assert tells(used, f"{tmp_path}/site.yaml", "ifaces=/etc/ifaces.conf, mpi=pmi2")
    assert tells(unused, f"{tmp_path}/site.yaml", "not used", "partition")
    assert called("--from=job.sh", "--ifaces=mine.conf").stdout.endswith(
        " srunddp --ifaces=mine.conf train.py\n"
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--nodes=2"], ["--nodes"]),
        (["--preflight", "--time=4"], ["--preflight", "--time"]),
        (["train.py", "--lr=1"], ["SCRIPT"]),
        (["--salloc"], ["--salloc"]),
        (["--env=SLURM_A=1"], ["--env", "SLURM_A"]),
    ],
)
def test_a_conversion_refuses_what_the_job_script_has_itself(
    words: list[str], named: list[str], tmp_path: Path
) -> None:
    write(tmp_path / "job.sh", "srun torchrun --nproc-per-node=2 train.py\n")
    done = srunddp("sbatch", "--from=job.sh", *words, folder=tmp_path)
    assert done.returncode == (78 if words[0].startswith("--env") else 2)
    assert done.stdout == ""
    assert tells(done.stderr, "error", *named)


def test_a_conversion_checks_the_options_of_run(
    called: Callable[..., Result], tmp_path: Path
) -> None:
    write(tmp_path / "job.sh", "srun torchrun --nproc-per-node=2 train.py\n")
    for word in ("--port=80", "--show-ranks=all", "--show-ranks=-1", "--monitor-dir=x"):
        done = called("--from=job.sh", word)
        assert (done.exit_code != 0, done.stdout) == (True, ""), word
    # The number of ranks is not known, and the script may have what an option needs.
    assert called("--from=job.sh", "--log-dir=l", "--show-ranks=0,999").exit_code == 0
    write(tmp_path / "job.sh", "srun torchrun --nproc-per-node=2 --tee=3 --log-dir=logs train.py\n")
    assert called("--from=job.sh", "--show-ranks=none").exit_code == 0


def test_an_option_after_the_script_is_noted(called: Callable[..., Result]) -> None:
    assert "--submit comes after SCRIPT" in called("train.py", "--submit").stderr
    assert "after SCRIPT" not in called("train.py", "--lr=1").stderr


def test_a_job_that_is_not_to_start_again_says_so(called: Callable[..., Result]) -> None:
    """As a site may have JobRequeue=1."""
    assert "#SBATCH --no-requeue\n" in called("--no-requeue", "train.py").stdout
    assert "requeue" not in "".join(directives(called("train.py")))


def test_a_script_that_is_not_seen_is_noted_with_the_hint(tmp_path: Path) -> None:
    """The nodes may see it, so a job script is written all the same."""
    done = srunddp("sbatch", "--nodes=2", "there/train.py", folder=tmp_path)
    assert (done.returncode, "there/train.py" in done.stdout) == (0, True)
    (line,) = [line for line in done.stderr.splitlines() if "there/train.py" in line]
    assert tells(line, "srunddp: note: ", " -> ", "--force")


def test_submit_takes_an_unseen_script_if_that_is_meant(
    called: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "submit", lambda *_, **__: ("4711", 0))
    for words in (("--force",), ("--container=a.sif",), ("--stage", "--venv=env")):
        assert called("--submit", *words, "job.py").stdout == "4711\n"


REFUSES = """
case "$*" in *--test-only*)
    echo "allocation failure: Requested node configuration is not available" >&2
    exit 1
esac
touch submitted; echo 4711
"""


def test_a_job_that_slurm_says_cannot_run_is_not_submitted(tmp_path: Path) -> None:
    a_script(tmp_path)
    path = stub(tmp_path, "sbatch", REFUSES)
    done = srunddp("sbatch", "--submit", "--nodes=99", "train.py", folder=tmp_path, PATH=path)
    assert (done.returncode, done.stdout) == (78, "")
    assert tells(done.stderr, "node configuration", "--force")
    assert not (tmp_path / "submitted").exists()
    done = srunddp("sbatch", "--submit", "--force", "train.py", folder=tmp_path, PATH=path)
    assert (done.returncode, done.stdout) == (0, "4711\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), ["4711", "logs/train-4711.out", "srunddp triage logs/train-4711.out"]),
        (("--monitor",), ["srunddp report 4711", "srunddp triage logs/train-4711.out"]),
        (("--monitor", "--log-dir=a b"), ["srunddp report '--monitor-dir=a b' 4711", "'a b/train"]),
        (("--chdir=sub", "--output=%x.%j", "-Jx"), ["srunddp triage sub/x.4711"]),
        (("--array=0-3",), ["logs/train-4711_%a.out", "srunddp triage 4711"]),
        (("--output=100%%.%j",), ["srunddp triage 100%.4711"]),
    ],
    ids=str,
)
def test_after_submission_the_log_and_the_next_commands_are_told(
    words: tuple[str, ...],
    said: list[str],
    called: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm, "submit", lambda *_, **__: ("4711", 0))
    told: list[str] = []
    monkeypatch.setattr(cli, "say", told.append)
    # Standard output has the number alone, for scripts.
    assert called("--submit", "--force", *words, "train.py").stdout == "4711\n"
    assert tells(" ".join(told), *said)
    assert ("report" in "".join(told)) is ("--monitor" in words)


def test_every_option_of_run_is_an_option_of_a_job(called: Callable[..., Result]) -> None:
    """By its own name, and as a word of --run-options, with the same outcome."""
    values = {
        "--backend": "gloo",
        "--bind": "auto",
        "--channel": "env",
        "--port": "4000-4001",
        "--restarts": "2",
        "--show-ranks": "0",
    }
    assert not {*OPTIONS} & {name.replace("_", "-") for name in run_options.OPTIONS}
    for option in run_options.OPTIONS.values():
        name = max(option.opts, key=len)
        if name in ("--spare-nodes", "--min-nodes", "--module"):
            continue
        word = name if option.is_flag else f"{name}={values.get(name, '9')}"
        needed = {"--show-ranks": ["--log-dir=l"], "--monitor-dir": ["--monitor=9"]}.get(name, [])
        by_name = called(*needed, word, "train.py")
        assert by_name.exit_code == 0, by_name.stderr
        assert f" {word} " in by_name.stdout.replace("\\\n", " "), word
        by_word = called(*needed, f"--run-options={word}", "train.py")
        assert [line for line in by_word.stdout.splitlines() if line[:1] != "#"] == [
            line for line in by_name.stdout.splitlines() if line[:1] != "#"
        ]


def takes_none(option: click.Option) -> bool:
    """Whether srunddp run has a meaning of its own for none."""
    if option.name == "show_ranks":
        return shown_ranks("none", 2) == (range(0),)
    return isinstance(option.type, click.Choice) and "none" in option.type.choices


@pytest.mark.parametrize(
    "option", [one for one in run_options.OPTIONS.values() if takes_none(one)], ids=str
)
def test_none_stays_where_run_has_a_meaning_for_it(
    option: click.Option, called: Callable[..., Result], tmp_path: Path
) -> None:
    word = f"{option.opts[-1]}=none"
    folder = "--log-dir=l"
    write(tmp_path / "a.yaml", f"{option.name}: none\n")
    write(tmp_path / "job.sh", "srun torchrun --nproc-per-node=2 train.py\n")
    for words in (
        (word, "train.py"),
        (f"--run-options={word}", "train.py"),
        ("--config=a.yaml", "train.py"),
        ("--from=job.sh", word),
    ):
        assert f" {word} " in called(folder, *words).stdout.replace("\\\n", " "), words
    # Nothing is given by the other names of no value.
    taken_back = called(folder, "--config=a.yaml", f"{option.opts[-1]}=null", "train.py")
    assert option.opts[-1] not in taken_back.stdout.partition("set -e")[2]


@pytest.mark.parametrize("word", ["--help", "-h", "--", "-", "prefix"])
def test_a_word_of_run_options_has_to_name_an_option(
    word: str, called: Callable[..., Result]
) -> None:
    done = called(f"--run-options={word}", "train.py")
    assert (done.exit_code in (2, 78), done.stdout) == (True, "")


def test_log_dir_means_in_a_job_what_it_means_in_a_run(called: Callable[..., Result]) -> None:
    """Each rank's output goes to a file there. The job's log and the samples are there, too."""
    with_it = called("--log-dir=out", "--monitor", "train.py").stdout
    assert "--output=out/%x-%j.out\n" in with_it
    assert " --log-dir=out --monitor=5 --monitor-dir=out " in with_it
    without = called("--monitor", "train.py").stdout
    assert "--output=logs/%x-%j.out\n" in without
    assert "--log-dir" not in without
    assert " --monitor=5 --monitor-dir=logs " in without


def test_an_option_by_its_own_name_wins_unless_it_is_from_a_file(
    called: Callable[..., Result], tmp_path: Path
) -> None:
    write(tmp_path / "a.yaml", "monitor: 5s\nrun_options: [--stall-timeout=1m, --grace=1]\n")
    assert "--monitor=5s " in called("--config=a.yaml", "train.py").stdout
    done = called("--config=a.yaml", "--stall-timeout=2m", "train.py").stdout
    assert ("--stall-timeout=2m" in done, "--grace=1" in done) == (True, True)
    done = called("--config=a.yaml", "--run-options=--monitor=7s", "train.py").stdout
    assert "--monitor=7s " in done
    assert "--grace" not in done.partition("set -e")[2]  # a list on the command line replaces it
    assert "--monitor" not in called("--config=a.yaml", "--monitor=none", "a.py").stdout.partition(
        "set -e"
    )[2].replace("--stall", "")


def test_words_of_a_file_win_over_an_earlier_file(
    called: Callable[..., Result], tmp_path: Path
) -> None:
    write(tmp_path / "user.yaml", "grace: 5\nrun_options: [--fast-exit]\n")
    write(tmp_path / "a.yaml", "run_options: [--grace=8, --grace=9]\n")
    of_user = called("train.py").stdout.partition("set -e")[2]
    assert ("--grace=5" in of_user, "--fast-exit" in of_user) == (True, True)
    of_both = called("--config=a.yaml", "train.py").stdout.partition("set -e")[2]
    assert ("--grace=9" in of_both, "--fast-exit" in of_both) == (True, False)
    # Where the words are taken back, the value below them counts.
    words = ("--config=a.yaml", "--run-options=none", "train.py")
    assert "--grace=5" in called(*words).stdout.partition("set -e")[2]


def test_wait_ends_with_the_code_of_the_job(tmp_path: Path) -> None:
    a_script(tmp_path)
    path = stub(tmp_path, "sbatch", "echo 4711; exit 3")
    done = srunddp("sbatch", "--submit", "--wait", "train.py", folder=tmp_path, PATH=path)
    assert (done.returncode, done.stdout) == (3, "4711\n")
    assert "4711 has ended with exit code 3" in done.stderr
    assert "srunddp triage logs/train-4711.out\n" in done.stderr
    path = stub(tmp_path, "sbatch", "echo 4711")
    done = srunddp("sbatch", "--submit", "--wait", "train.py", folder=tmp_path, PATH=path)
    assert "4711 has ended with exit code 0, its log: logs/train-4711.out\n" in done.stderr
    assert "triage" not in done.stderr
