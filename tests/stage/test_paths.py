"""Which path is a copy on this node, and what of a run follows it there; with --offline no rank asks a server."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.run.cli import _staged_script
from srunddp.run.script import Script
from srunddp.stage.paths import PathMapping, StagedPaths, caches, contradictions, offline
from tests.support.starting import srunddp, write
from tests.support.worlds import world

SEEN = StagedPaths(
    "/f", (PathMapping("project", "/shared/project", "/shared/project"), PathMapping("data", "/d", "/tmp/f/d"))
)

names = st.text("ab.-", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
paths = st.lists(names, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))


@given(places=st.dictionaries(paths, paths, min_size=1, max_size=4), path=paths)
def test_path_is_below_the_longest_place_above_it(places: dict[str, str], path: str) -> None:
    staged = StagedPaths("/f", tuple(PathMapping("data", shared, here) for shared, here in places.items()))
    above = [shared for shared in places if Path(path).is_relative_to(shared)]
    longest = max(above, key=len, default=None)
    expected = str(Path(places[longest], Path(path).relative_to(longest))) if longest else path
    assert staged.here(path) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("/d", "/tmp/f/d"),
        ("/d/", "/tmp/f/d/"),
        ("//d//x", "/tmp/f/d/x"),
        ("/d/./x", "/tmp/f/d/x"),
        ("/d/../e", "/d/../e"),
        ("/e/../d/x", "/tmp/f/d/x"),
        ("/shared/project//x/", "/shared/project//x/"),
        ("d", "d"),
        ("", ""),
        ("/", "/"),
    ],
)
def test_path_is_found_however_it_is_written(written: str, expected: str) -> None:
    assert SEEN.here(written) == expected
    assert SEEN.note == ""  # this node sees the project


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/d/x", "/tmp/f/d/x"),
        ("--data=/d/x", "--data=/tmp/f/d/x"),
        ("data=/d", "data=/tmp/f/d"),
        ("--a=b=/d", "--a=b=/d"),
        ("/d/a=b", "/tmp/f/d/a=b"),
        ("--data", "--data"),
        ("s3://d", "s3://d"),
        ("x/d", "x/d"),
        ("=", "="),
    ],
)
def test_argument_is_a_path_or_has_one_after_equals(word: str, expected: str) -> None:
    assert _staged_script(SEEN, Script("/d/train.py", (word,))) == Script("/tmp/f/d/train.py", (expected,))
    assert _staged_script(SEEN, Script("/d/train", (word,), module=True)) == Script(
        "/d/train", (expected,), module=True
    )


def test_variables_that_name_places_change() -> None:
    """Also those of caches in their usual place."""
    given = {"PATH": "/usr/bin::/d/bin", "HF_HOME": "/d/hf", "VIRTUAL_ENV": "/other", "DATA": "/d", "HOME": "/h"}
    assert SEEN.variables(given) == {"PATH": "/usr/bin::/tmp/f/d/bin", "HF_HOME": "/tmp/f/d/hf"}
    caches = {"HF_HOME": "/tmp/f/d/.cache/huggingface", "TORCH_HOME": "/tmp/f/d/.cache/torch"}
    assert SEEN.variables({"HOME": "/d"}) == caches


@pytest.mark.parametrize(
    ("folder", "environ", "expected"),
    [
        ("/tmp", {"PWD": "/d/x"}, "/d/x"),
        ("/tmp", {"PWD": "/tmp", "SLURM_SUBMIT_DIR": "/d"}, "/d"),  # as a shell corrects it
        ("/home/u", {"HOME": "/home/u", "PWD": "/d"}, "/d"),
        ("/scratch", {"PWD": "/d"}, "/scratch"),  # srun --chdir leaves PWD as it was
        ("/tmp", {"PWD": "/shared/project"}, "/tmp"),
        ("/tmp", {}, "/tmp"),
    ],
)
def test_working_directory_is_the_intended_one(folder: str, environ: dict[str, str], expected: str) -> None:
    assert SEEN.intended_cwd(environ, folder) == expected
    pushed = replace(SEEN, cwd="/d/y")  # by a push in that folder, which counts where a shell has corrected PWD
    assert pushed.intended_cwd({"PWD": "/tmp", "SLURM_SUBMIT_DIR": "/d"}, "/tmp") == "/d/y"
    assert pushed.intended_cwd(environ, "/") == "/d/y"


SWITCHES = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
HOME = {"HOME": "/home/u"}


def test_bare_environment_gets_switches_and_caches() -> None:
    assert offline(HOME) == SWITCHES | {
        "HF_HOME": "/home/u/.cache/huggingface",
        "TORCH_HOME": "/home/u/.cache/torch",
        "TOKENIZERS_PARALLELISM": "false",
    }


@pytest.mark.parametrize("name", [*offline(HOME)])
@pytest.mark.parametrize("value", ["0", ""])
def test_exported_variable_stays(name: str, value: str) -> None:
    assert set(offline(HOME | {name: value})) == {*offline(HOME)} - {name}


@pytest.mark.parametrize(("xdg", "folder"), [("/cache", "/cache"), ("~/c", "/home/u/c"), ("", "/home/u/.cache")])
def test_caches_are_where_libraries_look(xdg: str, folder: str) -> None:
    found = caches(HOME | {"XDG_CACHE_HOME": xdg})
    assert found == {"HF_HOME": f"{folder}/huggingface", "TORCH_HOME": f"{folder}/torch"}
    assert all(os.path.isabs(path) for path in caches({}).values())


def test_switch_that_is_on_is_no_contradiction() -> None:
    assert contradictions(dict(zip(SWITCHES, ("on", "YES", "True"), strict=True))) == []


def test_contradiction_is_said_once_by_rank_0(tmp_path: Path) -> None:
    variables = {"HF_HUB_OFFLINE": "0"}
    script = 'say("seen", os.environ["HF_HUB_OFFLINE"] + os.environ["TRANSFORMERS_OFFLINE"])'
    with world(tmp_path, script, "--offline", size=2, variables=variables) as it:
        ended = it.wait()
    said = "srunddp: HF_HUB_OFFLINE=0 is exported, which wins; expected 1 with --offline -> unset it\n"
    assert (ended.codes, ended.errors) == ([0, 0], [said, ""])
    assert [(tmp_path / f"seen.{rank}").read_text() for rank in (0, 1)] == ["01", "01"]


def test_without_the_option_nothing_is_exported(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import json, os; print(json.dumps(dict(os.environ)))")
    assert not {*offline({})} & {*json.loads(srunddp("train.py", folder=tmp_path).stdout)}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(("own", "options"), [(False, ("--offline",)), (True, ())])
def test_ranks_divide_the_cpus_that_they_share(tmp_path: Path, own: bool, options: tuple[str, ...]) -> None:
    """One rank has all CPUs, the other the same, or only one: then nobody has its mask."""
    cpus = len(os.sched_getaffinity(0))
    below = {1: ["taskset", "-c", str(min(os.sched_getaffinity(0)))]} if own else {}
    script = 'say("threads", os.environ["OMP_NUM_THREADS"])'
    with world(tmp_path, script, *options, size=2, below=below) as it:
        assert it.wait().codes == [0, 0]
    threads = [int((tmp_path / f"threads.{rank}").read_text()) for rank in (0, 1)]
    assert threads == ([cpus, 1] if own else [cpus // 2] * 2)


def test_explain_says_what_offline_exports(tmp_path: Path) -> None:
    rows = srunddp("explain", "--offline", folder=tmp_path, HF_DATASETS_OFFLINE="off", HOME="/home/u").stdout
    table = {line.split()[2]: " ".join(line.split()[3:]) for line in rows.splitlines()}
    assert table["HF_HUB_OFFLINE"] == "1 --offline"
    assert table["HF_HOME"] == "/home/u/.cache/huggingface --offline"
    assert table["HF_DATASETS_OFFLINE"] == "off exported"
    assert "note: HF_DATASETS_OFFLINE=off is exported, which wins" in rows
