from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.util.hostlist import expand, fold, fold_ranks, ranges

FOLDED = {
    "node01": ["node01"],
    "login,node[01-03,07]": ["node07", "node02", "login", "node01", "node03", "node02"],
    "n[8-11]": ["n8", "n9", "n10", "n11"],
    "n[1,01-02]": ["n1", "n01", "n02"],
    "n[1-2]-ib": ["n1-ib", "n2-ib"],
    "n[1-2].site1.org": ["n1.site1.org", "n2.site1.org"],
    "rack1n[01-02],rack2n01": ["rack1n01", "rack1n02", "rack2n01"],
    "[1-3]": ["1", "2", "3"],
    "": [],
}


@pytest.mark.parametrize(("folded", "names"), FOLDED.items())
def test_names_are_folded_as_slurm_writes_them(folded: str, names: list[str]) -> None:
    assert fold(names) == folded


@given(st.lists(st.from_regex(r"[a-z]{0,2}[0-9]{1,3}([a-z][0-9]{0,3})?(\.[a-z]{1,3})?", fullmatch=True)))
def test_what_is_folded_unfolds_to_the_same_names(names: list[str]) -> None:
    assert sorted(expand(fold(names))) == sorted(set(names))


@given(st.text())
def test_a_name_of_any_text_is_folded(name: str) -> None:
    assert fold([name]) == name


def test_numbers_are_ranges() -> None:
    assert [ranges(numbers) for numbers in ((), (5,), (3, 2, 0, 2), range(10, 1000))] == ["", "5", "0,2-3", "10-999"]


def test_ranks_are_named_by_node() -> None:
    layout = {0: "node01", 1: "node01", 4: "node03"}
    assert fold_ranks([0, 1, 4, 5], layout) == "ranks 0-1 on node01, rank 4 on node03, rank 5"
