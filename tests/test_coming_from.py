"""The pages of docs/coming-from: each command to type now is one that srunddp takes, and starts the
ranks it says.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from srunddp.cli import main
from tests.conftest import ROOT
from tests.mpirun.conftest import LIMIT, there
from tests.support.job_specs import written

PAGES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
PEERS = {"torchrun", "accelerate", "lightning", "deepspeed", "mpiexec"}
TITLE = {"lightning": "Lightning", "deepspeed": "DeepSpeed"}
RANK = (
    "import os, sys\nprint('rank', *(os.environ[name] for name in ('RANK', 'WORLD_SIZE')),"
    " *sys.argv[1:])\n"
)


def spans(text: str) -> list[str]:
    """What stands as code, within lines and in blocks of shell."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    of_blocks = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    return [*(" ".join(each.split()) for each in inline), *of_blocks]


def starts(text: str) -> list[str]:
    """Each command that starts a SCRIPT, or writes a job for one."""
    return [span for span in spans(text) if re.search(r"\bsrunddp .*(\.py\b|-m )", span)]


ALL = "\n".join(page.read_text() for page in PAGES)
COMMANDS = {span: shlex.split(span) for span in starts(ALL)}
MENTIONED = sorted({span for span in spans(ALL) if span.startswith("srunddp ")})
# On this host alone, with two ranks where the page has eight.
UNDER_MPIRUN = sorted(
    {
        shlex.join(["2" if word == "8" else word for word in words])
        for words in COMMANDS.values()
        if words[0] == "mpirun" and not {"--host", "--hostfile"} & {*words}
    }
)


def ours(words: list[str]) -> list[list[str]]:
    """What follows each `srunddp`: several where mpirun starts several programs."""
    programs = " ".join(":" if word == ":" else shlex.quote(word) for word in words).split(" : ")
    return [(each := shlex.split(program))[each.index("srunddp") + 1 :] for program in programs]


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command of srunddp, and what follows its name."""
    command: click.Command = main
    rest = list(words)
    while isinstance(command, click.Group):
        known = command.get_command(click.Context(command), rest[0])
        if known:
            command = known
            rest = rest[1:]
        else:
            run = command.get_command(click.Context(command), "run")
            assert run
            command = run
    return command, rest


def test_there_is_a_page_for_each_and_the_readme_leads_there() -> None:
    assert {page.stem for page in PAGES} == PEERS
    assert all(f"docs/coming-from/{peer}.md)" in (ROOT / "README.md").read_text() for peer in PEERS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_says_what_to_type_for_the_same_topics(page: Path) -> None:
    text = page.read_text()
    assert text.startswith(f"# Coming from {TITLE.get(page.stem, page.stem)}\n")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    topics = ["Options", "Environment variables", "The script", "Failures and restarts"]
    assert [heading for heading in headings if heading in topics] == topics
    table = text.split("\n| you typed | now type |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(table) >= 6
    for before, now in ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table):
        assert "srunddp" not in before, before
        assert starts(now) or now.startswith(("none", "the same without srunddp")), now


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_to_type_now_is_one_that_srunddp_takes(command: str) -> None:
    words = COMMANDS[command]
    if words[:2] == ["srunddp", "sbatch"]:
        assert "train.py" in written(words)
        return
    for each in ours(words):
        command_there, rest = command_of(each)
        # A UsageError where it does not parse.
        params = command_there.make_context(
            "srunddp", rest, help_option_names=["-h", "--help"]
        ).params
        assert params["script"] == each[each.index(params["script"])]
        assert params["script"].endswith(".py") or params["module"]


def test_every_option_that_is_named_is_there() -> None:
    for span in MENTIONED:
        command, words = command_of(span.split()[1:])
        known = {name for option in command.params for name in option.opts} | {"-h", "--help"}
        end = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
        assert {word.partition("=")[0] for word in words[:end] if word.startswith("-")} <= known, (
            span
        )


@pytest.mark.slow
@pytest.mark.mpirun
@pytest.mark.parametrize("command", UNDER_MPIRUN)
def test_every_command_with_mpirun_starts_its_ranks(command: str, tmp_path: Path) -> None:
    for name in ("train.py", "a.py", "b.py", "package/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(RANK)
    mpi = there("openmpi5")
    words = shlex.split(command)
    real = [str(ROOT / "bin" / "srunddp") if word == "srunddp" else word for word in words[1:]]
    done = subprocess.run(
        [mpi.mpirun, *mpi.options, *real],
        env=mpi.here(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    size = sum(int(words[place + 1]) for place, word in enumerate(words) if word == "-n")
    last = ours(words)[-1]
    named = next(
        place for place, word in enumerate(last) if word.endswith(".py") or word == "package.train"
    )
    lines = [" ".join(["rank", str(rank), str(size), *last[named + 1 :]]) for rank in range(size)]
    shown = [re.sub(r"^\S+:\d+: ", "", line) for line in done.stdout.splitlines()]
    assert sorted(shown) == sorted(lines)
