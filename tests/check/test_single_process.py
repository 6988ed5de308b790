"""The commands for before a job, as ranks on this machine: how they end, what they say, and that
they say it once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS
from tests.support.facts import tells
from tests.support.starting import JOB, NODE, ended, one_message, slurm, srunddp, started, write

pytestmark = pytest.mark.slow

QUICK = {"PYTHONPATH": str(PROGRAMS / "other_torch")}  # the real one takes seconds to import
Ended = tuple[int, str, str]


def together(worlds: Sequence[Mapping[str, str]], *words: object, folder: Path) -> list[Ended]:
    """Exit code, output and errors of each of these ranks, started at once."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(started(*words, folder=folder, **QUICK | dict(each)))
            for each in worlds
        ]
        every = [ended(rank) for rank in ranks]
    assert not any("Traceback" in errors for _, _, errors in every), every
    return every


def codes(every: Sequence[Ended]) -> list[int]:
    return [code for code, _, _ in every]


def findings(folder: Path, job: str = JOB) -> list[tuple[str, str, list[int], str]]:
    found = json.loads((folder / f"preflight.{job}.json").read_text())["findings"]
    return [(each["level"], each["check"], each["ranks"], each["found"]) for each in found]


# srunddp check.


def test_alone_it_passes_and_writes_its_report(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "raise SystemExit('not to be run')\n")
    words = ("check", f"--output-dir={tmp_path}/out", script, "--epochs=3", "--lr", "0.1")
    ((code, out, errors),) = together([{}], *words, folder=tmp_path)
    assert (code, errors) == (0, "")
    first, second = out.splitlines()[:2]
    assert tells(
        first, "check: ", "this machine alone", "all is well", "srun --nodes=N srunddp check"
    )
    assert second.startswith("ok  launch ")
    assert out.endswith(
        f"written: {tmp_path}/out/preflight.local.txt, {tmp_path}/out/preflight.local.json\n"
    )
    assert findings(tmp_path / "out", "local") == []


def test_ranks_of_one_world_pass_and_rank_0_alone_speaks(tmp_path: Path) -> None:
    every = together([slurm(rank, 3) for rank in range(3)], "check", folder=tmp_path)
    assert codes(every) == [0, 0, 0]
    assert [(out, errors) for _, out, errors in every[1:]] == [("", ""), ("", "")]
    assert tells(every[0][1], "3 of 3 ranks", "1 node", "all is well")
    report = json.loads((tmp_path / f"preflight.{JOB}.json").read_text())
    assert [(rank["rank"], rank["local_rank"], rank["node"]) for rank in report["ranks"]] == [
        (rank, rank, NODE) for rank in range(3)
    ]
    assert all(set(rank["checks"]) >= {"launch", "interface", "limits"} for rank in report["ranks"])


def test_what_would_stop_the_job_ends_all_ranks_with_69(tmp_path: Path) -> None:
    """A wrong interface of rank 0 keeps nobody from it; nothing is measured then."""
    write(tmp_path / "train.py", "for x in:\n")
    worlds = [slurm(0) | {"GLOO_SOCKET_IFNAME": "nope0"}, slurm(1)]
    every = together(worlds, "check", "--collective", "train.py", folder=tmp_path)
    assert codes(every) == [69, 69]
    script, wrong = findings(tmp_path)
    assert script == ("FAIL", "launch", [], "train.py:1: invalid syntax")
    assert wrong[:2] == ("FAIL", "interface")
    assert tells(wrong[3], "GLOO_SOCKET_IFNAME=nope0", NODE, "lo")
    assert every[0][1].count("invalid syntax") == 1
    skipped = [
        line.split(maxsplit=2)[1:] for line in every[0][1].splitlines() if line.startswith("--")
    ]
    assert [name for name, _ in skipped] == ["rate", "collective"]
    for _, why in skipped:
        assert tells(why, "not run")
    assert [errors for _, _, errors in every] == ["", ""]


def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    every = together([slurm(rank, 3) for rank in (0, 1)], "check", "--timeout=8", folder=tmp_path)
    assert codes(every) == [69, 69]
    assert findings(tmp_path) == [("FAIL", "launch", [2], "no word within 8 s")]
    assert tells(every[0][1], "FAIL  launch", "rank 2", NODE, "8 s", "; expected ", " -> ")


def test_without_rank_0_a_rank_says_what_it_sees_by_itself(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "for x in:\n")
    world = slurm(1) | {"SLURM_LOCALID": "0"}
    ((code, out, errors),) = together([world], "check", "--timeout=1", "train.py", folder=tmp_path)
    # Rank 0's code is the job's; another one here would have a launcher end rank 0 before it has
    # reported.
    assert (code, out) == (0, "")
    first, *others = errors.splitlines()
    assert tells(first, "srunddp: check", NODE, "error: ", "rank 1", NODE, "rank 0")
    assert any(tells(line, "train.py:1: ", "; expected ") for line in others)


def test_a_report_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    write(tmp_path / "file", "")
    worlds = [slurm(rank) for rank in range(2)]
    every = together(worlds, "check", "--output-dir=file", folder=tmp_path)
    assert codes(every) == [69, 69]
    assert tells(every[0][1], "2 of 2 ranks", "1 node", "all is well")
    words = (
        "the report cannot be written to file: File exists; expected a folder that rank 0 may"
        " write to"
    )
    assert every[0][2] == f"srunddp: error: {words} -> name another with --output-dir\n"
    assert every[1][1:] == ("", "")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("words", [("check", "train.py"), ("ifaces", "check", "ifaces.conf")])
def test_json_has_the_rows_of_the_text_and_leaves_no_file(
    words: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    write(tmp_path / "train.py", "for x in:\n")
    write(
        tmp_path / "ifaces.conf",
        "".join(f"- nodes: '{name}'\n  interface: auto\n" for name in ("*", "n1")),
    )
    there = sorted(tmp_path.iterdir())
    worlds: list[dict[str, str]] = [slurm(rank) for rank in range(2)] if ranks == 2 else [{}]
    every = together(worlds, *words[:-1], "--json", words[-1], folder=tmp_path)
    assert sorted(tmp_path.iterdir()) == there
    text = together(worlds, *words, folder=tmp_path)
    assert codes(every) == codes(text)
    assert {errors for _, _, errors in every} == {""}
    assert [out for _, out, _ in every[1:]] == [""] * (ranks - 1)
    found = json.loads(every[0][1])
    rows = [
        line.split(maxsplit=2)
        for line in text[0][1].splitlines()
        if line.startswith(("FAIL", "WARN", "ok"))
    ]
    wrong = [(level, check) for level, check, _ in rows if level != "ok"]
    assert found["exit_code"] == every[0][0]
    assert wrong == [(each["level"], each["check"]) for each in found["findings"]]
    assert wrong
    for each, line in zip(found["findings"], rows, strict=False):
        assert line[2].endswith(f"{each['found']}; expected {each['expected']} -> {each['hint']}")
    assert found["summaries"].keys() >= {check for level, check, _ in rows if level == "ok"}
    assert [f"note: {note}" for note in found.get("notes", [])] == [
        line for line in text[0][1].splitlines() if line.startswith("note: ")
    ]


def test_only_ranks_look_at_the_interfaces_of_an_ifaces_conf(tmp_path: Path) -> None:
    """One process reads the file, and says so."""
    write(tmp_path / "ifaces.conf", "- nodes: '*'\n  interface: none9\n")
    for worlds, code in (([{}], 0), ([slurm(rank) for rank in range(2)], 78)):
        first = together(worlds, "ifaces", "check", "ifaces.conf", folder=tmp_path)[0]
        assert first[0] == code
        assert tells(first[1], "no interface was looked at", "srun") == (len(worlds) == 1)


def test_json_is_the_file_that_an_output_folder_gets(tmp_path: Path) -> None:
    ((code, out, errors),) = together([{}], "check", "--json", "--output-dir=out", folder=tmp_path)
    assert (code, errors) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "out" / "preflight.local.json").read_text())


@pytest.mark.parametrize(
    "words",
    [
        ("check", "--bogus"),
        ("check", "--timeout=0"),
        ("check", "--backend=mpi"),
        ("check", "--channel=radio"),
        ("ifaces", "scan", "--timeout=nan"),
        ("ifaces", "scan", "file"),
        ("ifaces", "check", "one", "two"),
        ("ifaces", "draft"),
    ],
)
def test_a_wrong_command_line_ends_with_2(words: tuple[str, ...], tmp_path: Path) -> None:
    done = srunddp(*words, folder=tmp_path, **slurm(0))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("srunddp: error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("check", "--help"),
        ("ifaces", "-h"),
        ("ifaces", "scan", "--help"),
        ("ifaces", "check", "-h"),
    ],
)
def test_each_command_has_its_help(words: tuple[str, ...], tmp_path: Path) -> None:
    done = srunddp(*words, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: srunddp {' '.join(words[:-1])} ")


def test_a_wrong_node_list_is_one_message(tmp_path: Path) -> None:
    done = srunddp("check", folder=tmp_path, **slurm(0, SLURM_STEP_NODELIST="n[1"))
    assert "brackets that do not match" in one_message(done, 69)


# srunddp ifaces.


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scan_of_one_node_says_that_it_takes_two(ranks: int, tmp_path: Path) -> None:
    worlds: list[dict[str, str]] = [slurm(rank) for rank in range(2)] if ranks == 2 else [{}]
    every = together(worlds, "ifaces", "scan", "-o", "new.conf", folder=tmp_path)
    assert every[0][0] == 78
    assert all(code for code in codes(every))
    words = f"all ranks that came are on {NODE}; expected ranks on two nodes or more -> srun "
    assert every[0][2].startswith(f"srunddp: error: {words}")
    assert not (tmp_path / "new.conf").exists()


@pytest.mark.parametrize(
    ("ranks", "line", "code", "said"),
    [
        (1, "interface: auto", 0, "1 entry in "),
        (2, "interface: auto", 0, "1 entry in "),
        (1, "interfaces: auto", 78, "ifaces.conf:2:3: unknown key 'interfaces'"),
        (2, "interfaces: auto", 78, "ifaces.conf:2:3: unknown key 'interfaces'"),
        (1, "interface: nope0", 0, "1 entry in "),  # it is found by ranks alone
        (2, "interface: nope0", 78, "ifaces.conf:1:3: interface nope0 is not there on node"),
    ],
)
def test_a_file_is_judged_alone_and_by_ranks(
    ranks: int, line: str, code: int, said: str, tmp_path: Path
) -> None:
    conf = write(tmp_path / "ifaces.conf", f'- nodes: "*"\n  {line}\n')
    worlds: list[dict[str, str]] = [slurm(rank) for rank in range(2)] if ranks == 2 else [{}]
    every = together(worlds, "ifaces", "check", conf, folder=tmp_path)
    assert codes(every) == [code] * ranks
    assert (every[0][1] + every[0][2]).count(said) == 1
    assert all(out + errors == "" for _, out, errors in every[1:])
