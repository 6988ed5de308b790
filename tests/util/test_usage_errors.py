"""Each wrong command line is one line that says what was found, what was expected and what to write."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

import click
import pytest
import yaml

from srunddp.cli import main
from srunddp.util.console import coloured
from tests.conftest import ROOT

RUN = "expected an option of srunddp run -> "
DURATION = "expected a duration such as 90, 90s, 5m or 1h30m -> see srunddp "
COMMANDS = "expected check, completion, explain, ifaces, report, run, sbatch, stage or triage -> "
LOST = "; expected a script to run -> "
REPORTED = "expected an option of srunddp report -> "
EXPLAINED = "expected an option of srunddp explain -> "
CHECKED = "expected an option of srunddp check -> "

# What is typed, and how the line goes on after "srunddp: error: ", by exit code.
WRONG: dict[int, dict[str, str]] = {
    2: {
        # Commands.
        "chekc": f"no command and no file 'chekc'; {COMMANDS}did you mean check?",
        "repotr": f"no command and no file 'repotr'; {COMMANDS}did you mean report?",
        "sbtach --nodes=2 train.py": f"no command and no file 'sbtach'; {COMMANDS}did you mean sbatch?",
        "version": f"no command and no file 'version'; {COMMANDS}did you mean --version?",
        "help chekc": f"no command 'chekc'; {COMMANDS}did you mean check?",
        "help train.py": f"no command 'train.py'; {COMMANDS}see srunddp --help",
        "ifaces chek": "no command 'chek'; expected check or scan -> did you mean check?",
        "stage": "no command; expected build, clean or push -> see srunddp stage --help",
        "completion": "no bash|zsh|fish; expected srunddp completion [OPTIONS] bash|zsh|fish -> see ",
        "completion fsh": "shell=fsh; expected bash, zsh or fish -> did you mean fish?",
        "stage psh": "no command 'psh'; expected build, clean or push -> did you mean push?",
        # run: no script, and options of its own.
        "run": "no SCRIPT; expected srunddp [OPTIONS] SCRIPT [ARGUMENTS]... -> see srunddp run --help",
        "--quiet": "no SCRIPT; expected ",
        "-m": "no SCRIPT; expected ",
        "--module": "no SCRIPT; expected ",
        "--no-such-option train.py": f"no option --no-such-option; {RUN}",
        "--backend=mpi train.py": "--backend=mpi; expected nccl, gloo or auto -> see srunddp run --help",
        "--backend": "--backend without a value; expected --backend VALUE -> see srunddp ",
        "--backend=glo train.py": "--backend=glo; expected nccl, gloo or auto -> did you mean gloo?",
        "--ifaces": "--ifaces without a value",
        "--iface=ib0 train.py": f"no option --iface; {RUN}did you mean --ifaces?",
        "--timeout=soon train.py": f"--timeout=soon; {DURATION}run --help",
        "--timeout 0 train.py": "--timeout=0; expected a duration above 0 to 1000000s -> ",
        "--timeout=5mm train.py": f"--timeout=5mm; {DURATION}run --help",
        "--timeout=2000000 train.py": "--timeout=2000000; expected a duration above 0 to 1000000s -> ",
        "--timeout=nan train.py": f"--timeout=nan; {DURATION}run --help",
        "--channel=tcp train.py": "--channel=tcp; expected pmi, slurm, mpi or env -> ",
        "--channel=slrum train.py": "--channel=slrum; expected pmi, slurm, mpi or env -> did you mean slurm?",
        "--port=80 train.py": "--port: ports '80'; expected two ports or more, from 1024 to 65535 -> write a range ",
        "--port any train.py": "--port: ports 'any'; expected two ports or more, from 1024 to 65535 -> write a range ",
        "--stall-timeout=-1 train.py": f"--stall-timeout=-1; {DURATION}run --help",
        "--stall_timeout=x train.py": f"--stall-timeout=x; {DURATION}run --help",
        "--lost-after=1 train.py": "--lost-after=1; expected a duration from 2s to 1000000s -> ",
        "--lost-after= train.py": f"--lost-after=; {DURATION}run --help",
        "--grace=long train.py": f"--grace=long; {DURATION}run --help",
        "--grace=1d train.py": f"--grace=1d; {DURATION}run --help",
        "--log-dir": "--log-dir without a value",
        "--logdir=logs train.py": f"no option --logdir; {RUN}did you mean --log-dir?",
        "--show-ranks=0 train.py": "--show-ranks: given without --log-dir; expected a folder for",
        "--log-dir=logs --show-ranks=9 train.py": "--show-ranks: '9'; expected ranks from 0 to 0 -> leave rank 9 out",
        "--log_dir=logs --show_ranks=x train.py": "--show-ranks: 'x'; expected ranks, all or none -> write a list",
        "--tee 3 train.py": "--tee is an option of torchrun; expected an option of srunddp run -> srunddp --log-dir "
        "logs --show-ranks all",
        "--prefix=1 train.py": "--prefix with a value; expected --prefix -> remove the value",
        "--prefx train.py": f"no option --prefx; {RUN}did you mean --prefix?",
        "--monitor 5 train.py": "--monitor 5; expected a script after --monitor -> write --monitor=5",
        "--monitor 1m train.py": "--monitor 1m; expected a script after --monitor -> write --monitor=1m",
        "--monitor=often train.py": f"--monitor=often; {DURATION}run --help",
        "--monitor=0.01 train.py": "--monitor=0.01; expected a duration from 0.1s to 1000000s -> ",
        "--monitor-dir=x train.py": "--monitor-dir without --monitor -> add --monitor",
        "--monitor-dir": "--monitor-dir without a value",
        "--offline=1 train.py": "--offline with a value",
        "--ofline train.py": f"no option --ofline; {RUN}did you mean --offline?",
        "--staged=x train.py": "--staged with a value",
        "--stagd train.py": f"no option --stagd; {RUN}did you mean --staged?",
        "--fast-exit=0 train.py": "--fast-exit with a value",
        "--fastexit train.py": f"no option --fastexit; {RUN}did you mean --fast-exit?",
        "--explain=x": "--explain with a value",
        "--explian": f"no option --explian; {RUN}did you mean --explain?",
        "--quiet=3 train.py": "--quiet with a value; expected --quiet -> remove the value",
        "--verbos train.py": f"no option --verbos; {RUN}did you mean --verbose?",
        "--verbose=2 train.py": "--verbose with a value",
        "--module=package.train": "--module with a value",
        # Options of other launchers.
        "--nproc-per-node=8 train.py": f"--nproc-per-node is an option of torchrun; {RUN}srun's --ntasks-per-node=8",
        "--nproc_per_node 8 train.py": f"--nproc-per-node is an option of torchrun; {RUN}srun's --ntasks-per-node=8",
        "--nnodes=2 train.py": f"--nnodes is an option of torchrun; {RUN}srun's --nodes=2, or mpirun's hosts",
        "--rdzv-backend=c10d train.py": f"--rdzv-backend is an option of torchrun; {RUN}leave it out",
        "--master-port=29500 train.py": f"--master-port is an option of torchrun; {RUN}leave it out",
        "--standalone train.py": f"--standalone is an option of torchrun; {RUN}leave it out",
        "--num_processes 16 train.py": f"--num-processes is an option of accelerate launch; {RUN}srun's --nodes and",
        "-n 2 train.py": f"-n is an option of mpirun; {RUN}mpirun's, before srunddp: mpirun -n 8",
        "-np 2 train.py": f"-n is an option of mpirun; {RUN}mpirun's, before srunddp: mpirun -n 8",
        "--host a,b train.py": f"--host is an option of mpirun; {RUN}mpirun's, before srunddp: ",
        "--ntasks-per-node=8 train.py": f"--ntasks-per-node is an option of srun; {RUN}srun's, before srunddp: srun ",
        "check --nnodes=2": f"--nnodes is an option of torchrun; {CHECKED}srun's --nodes=2",
        # check.
        "check --port 80": "--port: ports '80'; expected two ports or more, from 1024 to 65535 -> ",
        "check --ifaces": "--ifaces without a value; expected --ifaces VALUE -> see srunddp check --help",
        "check --iface ib0": f"no option --iface; {CHECKED}did you mean --ifaces?",
        "check --channel=pmix": "--channel=pmix; expected pmi, slurm, mpi or env -> did you mean pmi?",
        "check --backend=glo": "--backend=glo; expected nccl, gloo or auto -> did you mean gloo?",
        "check --timeout=x": f"--timeout=x; {DURATION}check --help",
        "check --timeout=0s": "--timeout=0s; expected a duration above 0",
        "check --path": "--path without a value",
        "check --paths=/data": f"no option --paths; {CHECKED}did you mean --path?",
        "check --package": "--package without a value",
        "check --packages=torch": f"no option --packages; {CHECKED}did you mean --package?",
        "check --staged=1": "--staged with a value",
        "check --colective": f"no option --colective; {CHECKED}did you mean --collective?",
        "check --collective=1": "--collective with a value",
        "check --json=1": "--json with a value; expected --json -> remove the value",
        "check --jsn train.py": f"no option --jsn; {CHECKED}did you mean --json?",
        "check --output-dir": "--output-dir without a value",
        "check --output=x": f"no option --output; {CHECKED}did you mean --output-dir?",
        "check --module=x": "--module with a value",
        "check --port": "--port without a value",
        "check --chanel=pmi": f"no option --chanel; {CHECKED}did you mean --channel?",
        "check --backend": "--backend without a value",
        "check --stagd": f"no option --stagd; {CHECKED}did you mean --staged?",
        "check --modul": f"no option --modul; {CHECKED}did you mean --module?",
        # explain.
        "explain --env": "--env without a value; expected --env VALUE -> see srunddp explain --help",
        "explain --envs=x": f"no option --envs; {EXPLAINED}did you mean --env?",
        "explain --port=1": "--port: ports '1'; expected two ports or more",
        "explain --channel=no": "--channel=no; expected pmi, slurm, mpi or env -> see srunddp explain --help",
        "explain --backend=cuda": "--backend=cuda; expected nccl, gloo or auto -> ",
        "explain --timeout=x": f"--timeout=x; {DURATION}explain --help",
        "explain --stall-timeout=y": f"--stall-timeout=y; {DURATION}explain --help",
        "explain --ifaces": "--ifaces without a value",
        "explain --offline=x": "--offline with a value",
        "explain --json=x": "--json with a value",
        "explain --jso": f"no option --jso; {EXPLAINED}did you mean --json?",
        "explain --ifcaes=x": f"no option --ifcaes; {EXPLAINED}did you mean --ifaces?",
        "explain --prot=1-2": f"no option --prot; {EXPLAINED}did you mean --port?",
        "explain --chanel=pmi": f"no option --chanel; {EXPLAINED}did you mean --channel?",
        "explain --bakend=nccl": f"no option --bakend; {EXPLAINED}did you mean --backend?",
        "explain --timeouts=3": f"no option --timeouts; {EXPLAINED}did you mean --timeout?",
        "explain --stall_timeout": "--stall-timeout without a value",
        "explain --ofline": f"no option --ofline; {EXPLAINED}did you mean --offline?",
        "explain --staged=1": "--staged with a value",
        "explain --module=x": "--module with a value",
        "explain --modul x": f"no option --modul; {EXPLAINED}did you mean --module?",
        "explain --stagd": f"no option --stagd; {EXPLAINED}did you mean --staged?",
        # report and triage.
        "report": "no DIR|JOBID; expected srunddp report [OPTIONS] DIR|JOBID -> see srunddp report --help",
        "report 1 2": "unexpected argument 2; expected srunddp report [OPTIONS] DIR|JOBID -> ",
        "report --restart=-1 4": "--restart=-1; expected a whole number, 0 or more -> see srunddp report --help",
        "report --restart=a 4": "--restart=a; expected a whole number, 0 or more -> see srunddp report --help",
        "report --monitor-dir": "--monitor-dir without a value",
        "report --monitor=x 4": f"no option --monitor; {REPORTED}did you mean --monitor-dir?",
        "report --baseline": "--baseline without a value",
        "report --base-line 3 4": f"no option --base-line; {REPORTED}did you mean --baseline?",
        "report --output": "--output without a value",
        "report --ouput x 4": f"no option --ouput; {REPORTED}did you mean --output?",
        "report --text=1 4": "--text with a value",
        "report --txt 4": f"no option --txt; {REPORTED}did you mean --text?",
        "report --live=1 4": "--live with a value",
        "report --json=out 4": "--json with a value",
        "report --jsons 4": f"no option --jsons; {REPORTED}did you mean --json?",
        "report --lve 4": f"no option --lve; {REPORTED}did you mean --live?",
        "triage --jsno log": "no option --jsno; expected an option of srunddp triage -> did you mean --json?",
        "triage --json=x log": "--json with a value; expected --json -> remove the value",
        "stage build": "no --requirement; expected --requirement FILE -> see srunddp stage build --help",
    },
    78: {
        "absent.py": f"no file absent.py in {{folder}}{LOST}correct the path",
        "trian.py": f"no file trian.py in {{folder}}{LOST}did you mean train.py? Else correct the path",
        "train": f"no file train in {{folder}}{LOST}did you mean train.py?",
        "python train.py": f"no file python in {{folder}}{LOST}leave python out",
        "torchrun --nnodes=2 train.py": f"no file torchrun in {{folder}}{LOST}leave it out, as srun or mpirun starts",
        "srun train.py": f"no file srun in {{folder}}{LOST}it comes before srunddp: srun --ntasks",
        "-m no_such.part": f"no module 'no_such'{LOST}correct the name after -m",
        "--ifaces=no.conf train.py": "--ifaces: no.conf is not there; expected ",
        "explain --env none.txt": "--env: none.txt: No such file or directory; expected what env or env -0 printed",
        "report --monitor-dir=logs 4713": "no files of job 4713 in logs; expected a folder 4713.STEP/monitor.0",
        "report none": "no folder none",
        "triage": "no file and no folder; expected logs -> srunddp triage slurm-4711.out",
        "triage none.out": "none.out",
    },
}
ROWS = [(code, typed, said) for code, rows in WRONG.items() for typed, said in rows.items()]


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, and nothing of a launcher in the environment."""
    for name in [name for name in os.environ if name.startswith(("SRUNDDP_", "SLURM_", "PMI", "OMPI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def typed_in(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(words), prog_name="srunddp")
    return (end.value.code, *capfd.readouterr())


@pytest.mark.parametrize(("code", "typed", "said"), ROWS, ids=[typed for _, typed, _ in ROWS])
def test_each_wrong_command_line_is_one_line(
    code: int, typed: str, said: str, bare: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    got, out, line = typed_in(capfd, *typed.split())
    assert line.startswith(f"srunddp: error: {said.format(folder=bare)}")
    assert (got, out, line.count("\n")) == (code, "", 1)
    assert " -> " in line


def test_every_option_has_two_wrong_uses() -> None:
    context, few = click.Context(main), []
    for name in ("check", "explain", "report", "run", "triage"):
        words = [typed.split() for _, typed, _ in ROWS if typed.startswith(name if name != "run" else "-")]
        for option in main.get_command(context, name).params:
            uses = [line for line in words if any(get_close_matches(word.split("=")[0], option.opts) for word in line)]
            few += [(name, option.opts)] if len(uses) < 2 and isinstance(option, click.Option) else []
    assert few == []


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (
            "SRUNDDP_TIMEOUT",
            "soon",
            "SRUNDDP_TIMEOUT=soon; expected a duration such as 90, 90s, 5m or 1h30m -> correct",
        ),
        ("SRUNDDP_STALL_TIMEOUT", "-1", "SRUNDDP_STALL_TIMEOUT=-1; expected a duration"),
        ("SRUNDDP_MONITOR", "0", "SRUNDDP_MONITOR=0; expected a duration from 0.1s"),
        ("SRUNDDP_IFACES", "no.conf", "SRUNDDP_IFACES: no.conf is not there; expected "),
    ],
)
def test_a_wrong_variable_is_named_and_is_configuration(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    code, _, line = typed_in(capfd, "train.py")
    assert line.startswith(f"srunddp: error: {said}")
    assert (code, line.count("\n")) == (78, 1)


def test_a_limit_comes_from_its_variable_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SRUNDDP_TIMEOUT", "2m")
    rows = typed_in(capfd, "explain")[1]
    assert re.search(r"timeout +120 s +SRUNDDP_TIMEOUT\n", rows)
    assert re.search(r"stall_timeout +300 s +the default\n", rows)
    rows = typed_in(capfd, "explain", "--timeout=1h30m", "train.py", "--epochs=3")[1]
    assert re.search(r"timeout +5400 s +--timeout\n", rows)


# Help.


def test_help_lists_the_commands_and_the_options_of_one(capfd: pytest.CaptureFixture[str]) -> None:
    code, page, _ = typed_in(capfd, "--help")
    assert code == 0
    assert max(map(len, page.splitlines())) <= 80
    for name in (
        "ifaces scan",
        "ifaces check",
        "check",
        "explain",
        "sbatch",
        "stage",
        "run",
        "report",
        "triage",
        "completion",
    ):
        assert re.search(rf"^  {name}  +[A-Z]", page, re.MULTILINE), name
    assert typed_in(capfd, "-h")[1] == typed_in(capfd, "help")[1] == page
    assert typed_in(capfd) == (2, "", page)
    assert typed_in(capfd, "help", "run")[1] == typed_in(capfd, "run", "--help")[1]
    assert typed_in(capfd, "help", "ifaces", "scan")[1].startswith("Usage: srunddp ifaces scan ")


def test_the_options_of_run_are_in_groups(capfd: pytest.CaptureFixture[str]) -> None:
    page = typed_in(capfd, "run", "--help")[1]
    assert re.findall(r"^(\S.*):$", page, re.MULTILINE) == [
        "Network and rendezvous",
        "Failures",
        "Output and monitoring",
        "Environment",
        "Other",
    ]
    assert page.split("\nOther:\n")[1].split()[0] == "--explain"
    assert "default: 5m" in page


# The table of other launchers' options.


def plain(cell: str) -> str:
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", cell).replace("`", "").strip()


def test_the_foreign_options_are_those_of_the_pages() -> None:
    """Each answer begins the cell of a page; each option of the pages' tables has one, but for what is only named."""
    table = yaml.safe_load((ROOT / "srunddp" / "util" / "foreign_options.yaml").read_text())
    pages = {"torchrun": "torchrun", "accelerate launch": "accelerate", "mpirun": "mpiexec", "srun": "mpiexec"}
    for launcher, rows in table.items():
        text = (ROOT / "docs" / "coming-from" / f"{pages[launcher]}.md").read_text()
        lines = text.split("\n## Options\n")[1].split("\n## ")[0].splitlines()
        cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `-")]
        said: dict[str, list[str]] = {}
        for first, here in cells:
            for name in re.findall(r"[ `](--?[a-z][\w-]*)", first, re.IGNORECASE):
                said.setdefault(name.replace("_", "-"), []).append(plain(here))
        for names, answer in rows.items():
            for name in names.split():
                assert any(each.startswith(answer) for each in said.get(name, ())), (launcher, name, answer)
        known = {name for names in rows for name in names.split()}
        if launcher == "torchrun":
            assert {*said} - known <= {"--log-dir", "-m"}


# Colour.


class Terminal:
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_and_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "FAIL  paths  node01  a; expected b -> move it\nok    cpus\nsrunddp: error: a -> b\nFAILED -> c"
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert coloured(text, Terminal()).split("\n") == [
        "\x1b[31mFAIL\x1b[0m  paths  node01  a; expected b -> \x1b[1mmove it\x1b[0m",
        "\x1b[32mok\x1b[0m    cpus",
        "srunddp: error: a -> \x1b[1mb\x1b[0m",
        "FAILED -> c",
    ]
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured(text, Terminal()) == text
    monkeypatch.delenv("NO_COLOR")
    with open(os.devnull) as file:
        assert coloured(text, file) == text
