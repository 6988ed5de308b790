"""Each wrong command line is one line that says what was found, what was expected and what to
write.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from srunddp.cli import main
from srunddp.sbatch.run_options import OPTIONS as RUN_OPTIONS
from srunddp.sbatch.slurm_options import OPTIONS
from srunddp.util.console import coloured
from tests.conftest import ROOT
from tests.support.starting import srunddp

TABLE: dict[str, dict[str, dict[str, str]]] = yaml.safe_load(
    (ROOT / "tests" / "util" / "wrong_inputs.yaml").read_text()
)
ROWS = [
    (name, *row)
    for name, options in TABLE.items()
    for rows in options.values()
    for row in rows.items()
]
FILES = {
    "train.py": "",
    "half.py": "for\n",
    "job.sh": "#!/bin/bash\ntorchrun train.py\n",
    "run.yaml": "run_options: [--stal-timeout=5m]\n",
    "monitor.yaml": "monitor: often\n",
    "job.yaml": "script: train.py\ngpus-per-nod: 4\n",
}


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with some files, and nothing of a launcher, of Slurm or of the user in the
    environment.
    """
    for name in [*os.environ]:
        if name.startswith(
            ("SRUNDDP_", "SLURM_", "SBATCH_", "SALLOC_", "PMI", "OMPI_", "VIRTUAL_ENV")
        ):
            monkeypatch.delenv(name)
    for name in ("PATH", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["srunddp"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def typed_in(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    before = signal.getsignal(signal.SIGTERM)  # stage push sets its own
    with pytest.raises(SystemExit) as end:
        main(list(words), prog_name="srunddp")
    signal.signal(signal.SIGTERM, before)
    return (end.value.code, *capfd.readouterr())


@pytest.mark.parametrize(("command", "typed", "said"), ROWS, ids=[typed for _, typed, _ in ROWS])
def test_each_wrong_input_is_one_line(
    command: str,
    typed: str,
    said: str,
    bare: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if command == "ifaces.conf":
        (bare / "x.conf").write_text(f"{typed}\n")
        typed = "--ifaces=x.conf train.py"
    words = shlex.split(typed)
    while re.match("[A-Z_]+=", words[0]):
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    code, _, line = said.replace("FOLDER", str(bare)).partition(" ")
    found, arrow, hint = map(re.escape, line.partition(" -> "))
    got, out, errors = typed_in(capfd, *words)
    lines = [
        line
        for line in errors.splitlines()
        if command == "notes" or not line.startswith("srunddp: note: ")
    ]
    fits = [
        re.fullmatch(f"srunddp: (error|note): {found}(; expected .+)?{arrow}{hint}", line)
        for line in lines
    ]
    assert any(fits), errors
    assert (got or 0) == int(code)
    assert command == "notes" or (out, len(fits)) == ("", 1)


def options(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Option]]:
    """Those of all commands, with the command's name."""
    if isinstance(command, click.Group):
        for each in command.list_commands(context := click.Context(command)):
            yield from options(command.get_command(context, each), f"{name} {each}".strip())  # type: ignore[arg-type]
    yield from (
        (name, option) for option in command.params if name and isinstance(option, click.Option)
    )


def test_every_option_has_two_rows_in_the_table() -> None:
    """Each with the option in what is typed or said, or with its variable."""
    assert len([typed for command, typed, _ in ROWS if command != "notes"]) >= 150
    for command, option in options(main):
        name = max(option.opts, key=len)
        if option.hidden:
            rows = []
        else:
            rows = [*TABLE[command].get(name, {}).items()]
        assert len(rows) >= 2 or option.hidden, (command, name)
        words = [*option.opts, f"SRUNDDP_{name[2:].replace('-', '_').upper()}="]
        assert [
            row
            for row in rows
            if not any(word in f"{row} {row[0].replace('_', '-')}" for word in words)
        ] == []


@pytest.mark.parametrize("name", [option.opts[0] for _, option in options(main) if option.hidden])
def test_options_that_are_passed_on_are_refused_if_wrong(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A misspelt one, and one with or without a value where it is the other way round."""
    passed_on = OPTIONS.get(name[2:])
    if passed_on:
        takes = passed_on.takes
    else:
        takes = "" if RUN_OPTIONS[name[2:].replace("-", "_")].is_flag else "="
    wrong, found = {
        "=": (name, f"{name} without a value"),
        "": (f"{name}=1", f"{name} with a value"),
        "?": (f"--sbatch-arg={name} 1", f"--sbatch-arg '{name} 1'"),
    }[takes]
    words = [wrong, "train.py"] if takes == "?" else [wrong]
    assert typed_in(capfd, "sbatch", *words)[2].startswith(f"srunddp: error: {found}; expected ")
    code, _, line = typed_in(capfd, "sbatch", f"{name}x", "train.py")
    assert (code, line.partition("; ")[0], line.rpartition(" -> ")[2]) == (
        2,
        f"srunddp: error: no option {name}x",
        f"did you mean {name}?\n",
    )


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
        "ifaces show",
        *main.list_commands(click.Context(main)),
    ):
        assert re.search(rf"^  {name}  +[A-Z]", page, re.MULTILINE) or name == "ifaces", name
        code, page_of_one, _ = typed_in(capfd, *name.split(), "--help")
        assert (code, page_of_one[: len(name) + 16]) == (0, f"Usage: srunddp {name} ")
        assert (
            typed_in(capfd, "help", *name.split())[1]
            == typed_in(capfd, *name.split(), "-h")[1]
            == page_of_one
        )
    assert typed_in(capfd, "-h")[1] == typed_in(capfd, "help")[1] == page
    assert typed_in(capfd) == (2, "", page)


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
    """Each answer begins the cell of a page; each option of the pages' tables has one, but for what
    is only named.
    """
    table = yaml.safe_load((ROOT / "srunddp" / "util" / "foreign_options.yaml").read_text())
    pages = {
        "torchrun": "torchrun",
        "accelerate launch": "accelerate",
        "mpirun": "mpiexec",
        "srun": "mpiexec",
    }
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
                assert any(each.startswith(answer) for each in said.get(name, ())), (
                    launcher,
                    name,
                    answer,
                )
        known = {name for names in rows for name in names.split()}
        if launcher == "torchrun":
            assert {*said} - known <= {"--log-dir", "-m"}


# Colour.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_and_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "FAIL  paths  node01  a; expected b -> move it\nok    cpus\nsrunddp: error: a -> b\nFAILED"
        " -> c"
    )
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


def test_a_letter_for_the_version_is_told_its_name(tmp_path: Path) -> None:
    done = srunddp("-V", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("-> did you mean --version?\n")
