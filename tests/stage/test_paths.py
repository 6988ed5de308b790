"""Which path is a copy on this node, however it is written, and what of a run follows it there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.run.cli import _staged_script
from srunddp.run.script import Script
from srunddp.stage.paths import PathMapping, StagedPaths

SEEN = StagedPaths(
    "/f", (PathMapping("project", "/shared/project", "/shared/project"), PathMapping("data", "/d", "/tmp/f/d"))
)

names = st.text("ab.-", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
paths = st.lists(names, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))


@given(places=st.dictionaries(paths, paths, min_size=1, max_size=4), path=paths)
def test_a_path_is_below_the_copy_of_the_longest_place_above_it(places: dict[str, str], path: str) -> None:
    staged = StagedPaths("/f", tuple(PathMapping("data", shared, here) for shared, here in places.items()))
    above = [shared for shared in places if Path(path).is_relative_to(shared)]
    longest = max(above, key=len, default=None)
    expected = str(Path(places[longest], Path(path).relative_to(longest))) if longest else path
    assert staged.here(path) == expected


@given(path=paths, suffix=names)
def test_a_place_says_nothing_of_one_whose_name_only_begins_alike(path: str, suffix: str) -> None:
    staged = StagedPaths("/f", (PathMapping("project", path, "/tmp/copy"),))
    assert staged.here(path + suffix) == path + suffix
    assert staged.here(f"{path}/{suffix}") == f"/tmp/copy/{suffix}"


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
def test_a_path_is_found_however_it_is_written_and_stays_so_where_it_is_seen(written: str, expected: str) -> None:
    assert SEEN.here(written) == expected


def test_a_place_within_another_one_counts_for_what_is_in_it() -> None:
    """Though its node sees it, and the outer one it does not."""
    staged = StagedPaths("/f", (PathMapping("project", "/p", "/tmp/p"), PathMapping("data", "/p/data", "/p/data")))
    assert (staged.here("/p/x"), staged.here("/p/data/x")) == ("/tmp/p/x", "/p/data/x")


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
def test_an_argument_is_a_path_as_a_whole_or_after_its_first_equals_sign(word: str, expected: str) -> None:
    assert _staged_script(SEEN, Script("/d/train.py", (word,))) == Script("/tmp/f/d/train.py", (expected,))
    assert _staged_script(SEEN, Script("/d/train", (word,), module=True)) == Script(
        "/d/train", (expected,), module=True
    )


def test_variables_that_name_places_change_and_others_do_not() -> None:
    given = {"PATH": "/usr/bin::/d/bin", "HF_HOME": "/d/hf", "VIRTUAL_ENV": "/other", "DATA": "/d", "HOME": "/h"}
    assert SEEN.variables(given) == {"PATH": "/usr/bin::/tmp/f/d/bin", "HF_HOME": "/tmp/f/d/hf"}


def test_a_cache_that_was_staged_from_its_usual_place_is_named() -> None:
    assert SEEN.variables({"HOME": "/d"}) == {
        "HF_HOME": "/tmp/f/d/.cache/huggingface",
        "TORCH_HOME": "/tmp/f/d/.cache/torch",
    }


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
def test_the_working_directory_is_the_wished_one_where_the_launcher_could_not_enter_it(
    folder: str, environ: dict[str, str], expected: str
) -> None:
    assert SEEN.wished(environ, folder) == expected


def test_the_folder_from_which_was_staged_counts_where_a_shell_has_corrected_the_wished_one() -> None:
    staged = replace(SEEN, cwd="/d/y")
    assert staged.wished({"PWD": "/tmp", "SLURM_SUBMIT_DIR": "/d"}, "/tmp") == "/d/y"
    assert staged.wished({"PWD": "/d/x"}, "/tmp") == "/d/x"
    assert staged.wished({"PWD": "/d/x"}, "/") == "/d/y"
