from __future__ import annotations

import itertools
import random
import shutil
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.errors import ConfigError
from srunddp.util.hostlist import count, expand, fold, fold_in_order, fold_ranks, ranges
from tests.conftest import missing
from tests.support.host_lists import by_scontrol, host_lists

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


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ("n1 n2 n3", "n[1-3]"),
        ("n3 n1 n2", "n3,n[1-2]"),
        ("n01 n03 n06 n02", "n[01,03,06],n02"),
        ("a1 b1 a2", "a1,b1,a2"),
        ("login", "login"),
        ("", ""),
    ],
)
def test_names_in_an_order_keep_it(names: str, folded: str) -> None:
    assert fold_in_order(names.split()) == folded
    assert expand(folded) == names.split()


@given(
    st.lists(
        st.from_regex(r"[a-z]{0,2}[0-9]{1,3}([a-z][0-9]{0,3})?(\.[a-z]{1,3})?", fullmatch=True)
    )
)
def test_what_is_folded_unfolds_to_the_same_names(names: list[str]) -> None:
    assert sorted(expand(fold(names))) == sorted(set(names))


@given(st.text())
def test_a_name_of_any_text_is_folded(name: str) -> None:
    assert fold([name]) == name


@pytest.mark.parametrize(
    "many",
    ["a" + "[0-65535]" * 1500, "n[" + ",".join(["0-65535"] * 3000) + "]", "r[1-257]n[1-256]"],
)
def test_a_short_list_of_too_many_names_is_refused_before_it_fills_the_memory(many: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="65536 names"):
            expand(many)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1000 * len(many) + (1 << 20)


def test_numbers_are_ranges_up_to_the_largest_cluster_s() -> None:
    assert [ranges(numbers) for numbers in ((), (5,), (3, 2, 0, 2), range(10, 1000))] == [
        "",
        "5",
        "0,2-3",
        "10-999",
    ]
    layout = {0: "node01", 1: "node01", 4: "node03"}
    assert fold_ranks([0, 1, 4, 5], layout) == "ranks 0-1 on node01, rank 4 on node03, rank 5"
    assert len(expand("n[0-65535]")) == 65536
    assert len(expand("r[1-256]n[1-256]")) == 65536


# Host lists of Slurm, expanded.

HOST_LISTS = {
    "node01": ["node01"],
    "alpha,beta": ["alpha", "beta"],
    "beta,alpha": ["beta", "alpha"],
    "a-b[1-3,007],c": ["a-b1", "a-b2", "a-b3", "a-b007", "c"],
    "x[1-2],y[3-4]": ["x1", "x2", "y3", "y4"],
    "a7,b[1-2]": ["a7", "b1", "b2"],
    "n[0010-0012]": ["n0010", "n0011", "n0012"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "n[9-011]": ["n9", "n10", "n11"],
    "n[3,1-2]": ["n3", "n1", "n2"],
    "n[1,1]": ["n1", "n1"],
    "rack[1-2]n[03-04]": ["rack1n03", "rack1n04", "rack2n03", "rack2n04"],
    "a[1-2]b[3-4]c[5-6]": [
        "a1b3c5",
        "a1b3c6",
        "a1b4c5",
        "a1b4c6",
        "a2b3c5",
        "a2b3c6",
        "a2b4c5",
        "a2b4c6",
    ],
    "n[1-2]-ib": ["n1-ib", "n2-ib"],
    "node[1-2].site.org": ["node1.site.org", "node2.site.org"],
    "[1-3]": ["1", "2", "3"],
    "gpu[12]": ["gpu12"],
    "*": ["*"],
    "gpu*,login?": ["gpu*", "login?"],
    "": [],
}


@pytest.mark.parametrize(("host_list", "names"), HOST_LISTS.items())
def test_expand_gives_all_names_in_slurms_order(host_list: str, names: list[str]) -> None:
    assert expand(host_list) == names


@pytest.mark.parametrize(
    "host_list",
    [
        "node[1-2",
        "node1-2]",
        "node[[1-2]]",
        "node[]",
        "node[3-1]",
        "node[a-b]",
        "node[1-]",
        "node[-1]",
        "node[1,,2]",
        "node[1:2]",
        "node[0-65536]",
        "node[1-60000,1-60000]",
        "node[" + ",".join(["1-65000"] * 100_000) + "]",
        "node[0-99999999999999999999]",
        "node1,,node2",
        ",node1",
        "node1 node2",
        "!node1",
        "node{1..3}",
    ],
    ids=lambda text: text if len(text) < 30 else text[:30],
)
def test_a_wrong_host_list_raises_one_error_that_shows_it(host_list: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(host_list, where="ifaces.conf:3:10")
    text = str(caught.value)
    assert text.startswith("ifaces.conf:3:10: host list ")
    assert (host_list if len(host_list) <= 80 else host_list[:70]) in text
    assert "expected names and ranges like node[01-04,7],login" in text
    assert "->" in text
    assert "\n" not in text
    assert len(text) < 400


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which ``scontrol show hostnames`` works without a cluster."""
    if shutil.which("scontrol") is None:
        missing("scontrol is not installed")
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    return {"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin:/usr/local/bin"}


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 2000), pytest.param(23, 100_000, marks=pytest.mark.soak)]
)
def test_seeded_host_lists_expand_as_scontrol_expands_them(
    seed: int, count: int, scontrol: dict[str, str]
) -> None:
    lists = host_lists(random.Random(seed), count)
    while some := list(itertools.islice(lists, 10_000)):
        assert [expand(text) for text in some] == by_scontrol(some, scontrol)


@given(st.one_of(st.text(), st.text(alphabet="ab01[]-,*?. \n")))
def test_any_text_expands_or_raises_the_one_error(text: str) -> None:
    try:
        names = expand(text)
        assert count(text) == len(names)
    except ConfigError:
        return
    assert all(name or not text for name in names)


def test_a_name_without_a_number_stands_beside_those_with_one() -> None:
    names = {"gpu-a", "gpu-a1", "gpu-a2"}
    assert fold(names) == "gpu-a,gpu-a[1-2]"
    assert set(expand(fold(names))) == names
