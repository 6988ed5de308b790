"""With --offline no rank asks a server, all look in one cache, and no rank has more threads than CPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from srunddp.stage.offline import caches, contradictions, offline
from tests.support.starting import srunddp, write
from tests.support.worlds import world

SWITCHES = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
HOME = {"HOME": "/home/u"}
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def test_a_bare_environment_gets_switches_and_caches() -> None:
    assert offline(HOME) == SWITCHES | {
        "HF_HOME": "/home/u/.cache/huggingface",
        "TORCH_HOME": "/home/u/.cache/torch",
        "TOKENIZERS_PARALLELISM": "false",
    }


@pytest.mark.parametrize("name", [*offline(HOME)])
@pytest.mark.parametrize("value", ["0", ""])
def test_what_the_user_exported_stays(name: str, value: str) -> None:
    assert set(offline(HOME | {name: value})) == {*offline(HOME)} - {name}


@pytest.mark.parametrize(("xdg", "folder"), [("/cache", "/cache"), ("~/c", "/home/u/c"), ("", "/home/u/.cache")])
def test_caches_are_where_the_libraries_look_by_themselves(xdg: str, folder: str) -> None:
    found = caches(HOME | {"XDG_CACHE_HOME": xdg})
    assert found == {"HF_HOME": f"{folder}/huggingface", "TORCH_HOME": f"{folder}/torch"}


def test_a_cache_has_an_absolute_path_also_without_home() -> None:
    assert all(os.path.isabs(path) for path in caches({}).values())


@pytest.mark.parametrize("value", ["1", "on", "YES", "True"])
def test_a_switch_that_is_on_is_no_contradiction(value: str) -> None:
    assert contradictions(dict.fromkeys(SWITCHES, value)) == []


def test_a_contradiction_is_said_once_by_rank_0(tmp_path: Path) -> None:
    variables = {"HF_HUB_OFFLINE": "0"}
    script = 'say("seen", os.environ["HF_HUB_OFFLINE"] + os.environ["TRANSFORMERS_OFFLINE"])'
    with world(tmp_path, script, "--offline", size=2, variables=variables) as it:
        ended = it.wait()
    said = "srunddp: HF_HUB_OFFLINE=0 is exported, which wins; expected 1 with --offline -> unset it\n"
    assert (ended.codes, ended.errors) == ([0, 0], [said, ""])
    assert [(tmp_path / f"seen.{rank}").read_text() for rank in (0, 1)] == ["01", "01"]


def test_without_the_option_nothing_is_exported(tmp_path: Path) -> None:
    write(tmp_path / "train.py", SHOW)
    assert not {*offline({})} & {*json.loads(srunddp("train.py", folder=tmp_path).stdout)}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("options", [(), ("--offline",)])
@pytest.mark.parametrize("own", [False, True])
def test_ranks_divide_the_cpus_that_they_share_and_keep_their_own(
    tmp_path: Path, own: bool, options: tuple[str, ...]
) -> None:
    """One rank has all CPUs, the other the same, or only one: then nobody has its mask."""
    cpus = len(os.sched_getaffinity(0))
    below = {1: ["taskset", "-c", str(min(os.sched_getaffinity(0)))]} if own else {}
    script = 'say("threads", os.environ["OMP_NUM_THREADS"])'
    with world(tmp_path, script, *options, size=2, below=below) as it:
        assert it.wait().codes == [0, 0]
    threads = [int((tmp_path / f"threads.{rank}").read_text()) for rank in (0, 1)]
    assert threads == ([cpus, 1] if own else [cpus // 2] * 2)


def test_explain_says_what_is_exported_and_what_stays(tmp_path: Path) -> None:
    rows = srunddp("explain", "--offline", folder=tmp_path, HF_DATASETS_OFFLINE="off", HOME="/home/u").stdout
    table = {line.split()[2]: " ".join(line.split()[3:]) for line in rows.splitlines()}
    assert table["HF_HUB_OFFLINE"] == "1 --offline"
    assert table["HF_HOME"] == "/home/u/.cache/huggingface --offline"
    assert table["HF_DATASETS_OFFLINE"] == "off exported"
    assert "note: HF_DATASETS_OFFLINE=off is exported, which wins" in rows
