"""The command ``srunddp explain`` and the option ``--explain`` print who decided what, for each
rank.
"""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from srunddp.bootstrap.environment import detect
from srunddp.bootstrap.network.ifaces_entry import DEFAULT
from srunddp.bootstrap.rendezvous import discovery
from srunddp.errors import ConfigError
from srunddp.explain.cli import parse_environments, read_environments
from tests.support.facts import tells
from tests.support.launchers import step
from tests.support.starting import NODE, slurm, srunddp, write


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
    assert tells(table["interface"], "lo", "loopback", "one node")
    assert table["address"] == "127.0.0.1 of lo"
    assert table["backend"] == "auto the default"
    first = discovery.rendezvous_ports(detect.detect(slurm(1)), DEFAULT, None)[0]
    assert table["rank 0"].startswith(f"127.0.0.1:{first}, ")


def test_explain_starts_no_script_and_needs_none(tmp_path: Path) -> None:
    """The option prints what the command does."""
    script = write(tmp_path / "train.py", "import os; print('rank', os.environ['RANK'], 'ran')")
    with_script = srunddp("--explain", "train.py", folder=script.parent)
    assert explained(with_script, 0) == explained(srunddp("explain", folder=script.parent), 0)
    assert "rank 0 ran" not in with_script.stdout
    assert tells(explained(with_script, 0)["rank"], "0", "no launcher")


def test_explain_says_who_the_rank_is_beside_a_wrong_interface(tmp_path: Path) -> None:
    conf = write(tmp_path / "ifaces.conf", "- nodes: '*'\n  interface: nosuch0\n")
    done = srunddp("--ifaces", conf, "--timeout", "7", "--explain", folder=tmp_path, **slurm(1))
    *rows, error = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (78, "")
    assert "[rank 1] rank                 1                  SLURM_PROCID=1" in rows
    assert f"[rank 1] interface            nosuch0            {conf}:1:3; see the error" in rows
    assert "[rank 1] timeout              7 s                --timeout" in rows
    assert tells(error, "[rank 1] error: ", f"{conf}:1:3", "nosuch0", NODE, " -> ", "exit code 78")


def test_explain_reads_the_environments_of_other_ranks(tmp_path: Path) -> None:
    """As after ``srun --label env > FILE``, on a login node."""
    lines = [f"{rank}: {name}={value}" for rank in (1, 0) for name, value in step(rank).items()]
    file = write(tmp_path / "env", "\n".join(lines) + "\n")
    done = srunddp(
        "explain",
        "--env",
        file,
        folder=tmp_path,
        RANK="7",
        SLURM_PROCID="9",
        SRUNDDP_IFACES="/nowhere",
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = [line for line in done.stdout.splitlines() if " rank   " in line]
    assert said == [
        f"[rank {rank}] rank                 {rank}                  SLURM_PROCID={rank}"
        for rank in (0, 1)
    ]


def test_a_placement_that_hides_rank_zero_is_explained(tmp_path: Path) -> None:
    variables = slurm(1, SLURM_LOCALID="0", SLURM_HOSTFILE="hosts")
    done = srunddp("--explain", folder=tmp_path, **variables)
    assert done.returncode == 78
    assert "not found: -m arbitrary: " in done.stdout


def as_text(rank: dict[str, Any]) -> list[str]:
    """The lines of a rank's table, made of its JSON."""
    lines = []
    for row in rank["values"]:
        lines.append(f"{row['name']:<20} {row['value']:<18} {row['why']}".rstrip())
        lines += [f"{'':<20} not chosen: {each}" for each in row["not_chosen"]]
    lines += [f"note: {note}" for note in rank["notes"]]
    for error in rank["errors"]:
        said = f"{error['found']}; expected {error['expected']} -> {error['hint']}"
        lines.append(f"error: {said} (exit code {rank['exit_code']})")
    return [f"[rank {rank['rank']}] {line}" for line in lines]


@pytest.mark.parametrize(
    ("words", "variables", "code", "ranks"),
    [
        ((), slurm(1, SLURM_NTASKS="6"), 0, 1),
        (("--ifaces=wrong",), slurm(1), 78, 1),
        (("--env=env",), {}, 0, 2),
    ],
    ids=["a rank", "a wrong file", "environments"],
)
def test_json_is_a_line_for_each_rank_with_its_table(
    words: tuple[str, ...], variables: dict[str, str], code: int, ranks: int, tmp_path: Path
) -> None:
    write(tmp_path / "wrong", "- nodes: '*'\n  interface: nosuch0\n")
    write(
        tmp_path / "env",
        "".join(
            f"{rank}: {name}={each}\n"
            for rank in (0, 1)
            for name, each in (step(rank) | {"SLURM_PTY_PORT": "1"}).items()
        ),
    )
    text, done = (
        srunddp("explain", *words, *more, folder=tmp_path, **variables)
        for more in ((), ("--json",))
    )
    assert (done.returncode, text.returncode, done.stderr) == (code, code, "")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == ranks
    assert [line for each in lines for line in as_text(each)] == text.stdout.splitlines()


# Environments as other processes print them.

ODD = {
    "A": "1",
    "LINES": "one\n two\nthree =3\n",
    "EMPTY": "",
    "BASH_FUNC_ml%%": "() {  x\n}",
    "Z": "a=b",
}


@pytest.mark.parametrize("option", [(), ("-0",)])
def test_values_of_several_lines_are_read_back(option: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "env").write_bytes(
        subprocess.run(["/usr/bin/env", *option], env=ODD, capture_output=True).stdout
    )
    assert read_environments(str(tmp_path / "env")) == [ODD]
    (tmp_path / "env").write_bytes(b"A=\xff\nB=2\n")  # bytes that are no text do not matter
    assert read_environments(str(tmp_path / "env"))[0]["B"] == "2"


@pytest.mark.parametrize("separator", ["\n", "\0"])
def test_a_name_that_comes_again_begins_the_next_rank(separator: str) -> None:
    items = [f"{name}={rank}" for rank in range(3) for name in ("RANK", "X")]
    assert parse_environments(separator.join(items) + separator) == [
        {"RANK": str(rank), "X": str(rank)} for rank in range(3)
    ]


def test_labelled_lines_may_be_mixed() -> None:
    lines = [f"{rank:02d}: {name}={rank}" for rank in range(12) for name in ("RANK", "X")]
    random.Random(0).shuffle(lines)
    assert parse_environments("\n".join(lines) + "\n") == [
        {"RANK": f"{rank}", "X": f"{rank}"} for rank in range(12)
    ]


@pytest.mark.parametrize("content", [None, "", "no variable\n"])
def test_what_holds_no_environment_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "env").write_text(content)
    with pytest.raises(ConfigError, match=r"--env: .* -> srun --label env > FILE"):
        read_environments(str(tmp_path / "env"))
