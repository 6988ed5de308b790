from __future__ import annotations

import itertools
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srunddp.bootstrap.environment import slurm
from srunddp.errors import ConfigError
from srunddp.util import hostlist
from tests.conftest import ROOT, missing
from tests.support.host_lists import by_scontrol, host_lists
from tests.support.launchers import (
    JOB,
    PID,
    batch_body,
    interactive_step,
    nested_in_pty_shell,
    pty_shell,
    step,
)

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
    "a[1-2]b[3-4]c[5-6]": ["a1b3c5", "a1b3c6", "a1b4c5", "a1b4c6", "a2b3c5", "a2b3c6", "a2b4c5", "a2b4c6"],
    "n[1-2]-ib": ["n1-ib", "n2-ib"],
    "node[1-2].site.org": ["node1.site.org", "node2.site.org"],
    "[1-3]": ["1", "2", "3"],
    "gpu[12]": ["gpu12"],
    "*": ["*"],
    "gpu*,login?": ["gpu*", "login?"],
    "": [],
}


@pytest.mark.parametrize(("host_list", "names"), HOST_LISTS.items())
def test_row_16_a_host_list_gives_all_names_in_slurms_order(host_list: str, names: list[str]) -> None:
    assert hostlist.expand(host_list) == names


@pytest.mark.parametrize(
    "host_list",
    [
        "node[1-2",
        "node1-2]",
        "node]1[",
        "node[[1-2]]",
        "node[]",
        "node[3-1]",
        "node[a-b]",
        "node[1-]",
        "node[-1]",
        "node[1--2]",
        "node[1,,2]",
        "node[1:2]",
        "node[1-2-3]",
        "node[1 - 2]",
        "node[*]",
        "node[0-65536]",
        "node[1-60000,1-60000]",
        "node[1-60000][1-60000]",
        "node[" + ",".join(["1-65000"] * 100_000) + "]",
        "node[0-99999999999999999999]",
        "node1,,node2",
        "node1,",
        ",node1",
        "node1 node2",
        "node1;rm",
        "node/1",
        "!node1",
        "@group",
        "node{1..3}",
    ],
    ids=lambda text: text if len(text) < 30 else text[:30],
)
def test_a_wrong_host_list_raises_one_error_that_shows_it(host_list: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hostlist.expand(host_list, where="ifaces.conf:3:10")
    text = str(caught.value)
    assert text.startswith("ifaces.conf:3:10: host list ")
    assert (host_list if len(host_list) <= 80 else host_list[:70]) in text
    assert "expected names and ranges like node[01-04,7],login" in text
    assert "->" in text
    assert "\n" not in text
    assert len(text) < 400


def test_a_host_list_of_the_largest_cluster_is_expanded() -> None:
    assert len(hostlist.expand("n[0-65535]")) == 65536
    assert len(hostlist.expand("r[1-256]n[1-256]")) == 65536


def _ranges() -> st.SearchStrategy[str]:
    def text(low: int, width: int, length: int) -> str:
        return f"{low:0{width}d}-{low + length:0{width}d}" if length else f"{low:0{width}d}"

    one = st.builds(text, st.integers(0, 1200), st.integers(1, 5), st.integers(0, 12))
    return st.lists(one, min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")


def _items() -> st.SearchStrategy[str]:
    name = st.from_regex(r"[a-z]([a-z0-9.-]{0,6}[a-z.-])?", fullmatch=True)
    plain = st.from_regex(r"[a-z]([a-z0-9-]{0,6}[a-z0-9])?", fullmatch=True)
    # scontrol knows no suffix after a bracket, so the lists that both can read end in one.
    folded = st.lists(st.tuples(name, _ranges()), min_size=1, max_size=2)
    return st.one_of(plain, folded.map(lambda pairs: "".join(prefix + ranges for prefix, ranges in pairs)))


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which ``scontrol show hostnames`` works without a cluster."""
    if shutil.which("scontrol") is None:
        missing("scontrol is not installed")
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    return {"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin:/usr/local/bin"}


def _by_scontrol(host_list: str, scontrol: dict[str, str]) -> list[str]:
    command = ["scontrol", "show", "hostnames", host_list]
    return subprocess.run(command, env=scontrol, capture_output=True, text=True, check=True, timeout=180).stdout.split()


def test_the_table_is_what_scontrol_says(scontrol: dict[str, str]) -> None:
    # scontrol knows no suffix after a bracket and no wildcards, and turns the brackets of a name with three around.
    both = {text: names for text, names in HOST_LISTS.items() if not re.search(r"\][^,[]+(,|$)|[*?]|\[.*\[.*\[", text)}
    assert len(both) >= 13
    for host_list, names in both.items():
        assert _by_scontrol(host_list, scontrol) == names


@settings(max_examples=40)
@given(items=st.lists(_items(), min_size=1, max_size=40))
def test_row_16_any_host_list_expands_as_scontrol_expands_it(scontrol: dict[str, str], items: list[str]) -> None:
    host_list = ",".join(items)
    assert hostlist.expand(host_list) == _by_scontrol(host_list, scontrol)


def test_seeded_host_lists_expand_as_scontrol_expands_them(scontrol: dict[str, str]) -> None:
    assert different_of(host_lists(random.Random(1), 2000), scontrol) == []


@pytest.mark.soak
def test_row_23_a_hundred_thousand_host_lists_expand_as_scontrol_expands_them(scontrol: dict[str, str]) -> None:
    assert different_of(host_lists(random.Random(23), 100_000), scontrol) == []


def different_of(lists: Iterator[str], scontrol: dict[str, str]) -> list[str]:
    """Those that we expand to something else; ten thousand at a time."""
    different = []
    while some := list(itertools.islice(lists, 10_000)):
        for text, names in zip(some, by_scontrol(some, scontrol), strict=True):
            assert names
            if hostlist.expand(text) != names:
                different.append(text)
    return different


@given(st.one_of(st.text(), st.text(alphabet="ab01[]-,*?. \n")))
def test_any_text_expands_or_raises_the_one_error(text: str) -> None:
    try:
        names = hostlist.expand(text)
    except ConfigError:
        return
    assert all(name or not text for name in names)


@pytest.mark.parametrize(
    ("counts", "expanded"),
    [
        ("4", [4]),
        ("4(x2)", [4, 4]),
        ("2(x2),1", [2, 2, 1]),
        ("3,1(x2)", [3, 1, 1]),
        ("8(x2),4", [8, 8, 4]),
        ("2(x1)", [2]),
        ("128(x1000)", [128] * 1000),
        ("", []),
    ],
)
def test_row_15_task_counts_are_unfolded(counts: str, expanded: list[int]) -> None:
    assert slurm.task_counts(counts) == expanded


@pytest.mark.parametrize("counts", ["x", "4(x", "4(x2", "4x2", "(x2)", "4(2)", "-1", "4,,2", "4 (x2)", "4(x2)3", "4.0"])
def test_wrong_task_counts_are_shown_with_their_variable(counts: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"SLURM_STEP_TASKS_PER_NODE={counts!r}")):
        slurm.task_counts(counts)


def test_a_task_of_a_step_is_one() -> None:
    assert slurm.in_step(step())


def test_a_step_named_interactive_by_salloc_is_one() -> None:
    """salloc gives the job this name, and its later steps inherit it."""
    assert slurm.in_step(step(SLURM_JOB_NAME="interactive"))


@pytest.mark.parametrize("name", ["batch", "interactive", "extern", "pending"])
@pytest.mark.parametrize("sign", ["unsigned", "negative"])
def test_slurms_reserved_steps_are_no_steps(name: str, sign: str) -> None:
    number = {"batch": 0xFFFFFFFB, "interactive": 0xFFFFFFFA, "extern": 0xFFFFFFFC, "pending": 0xFFFFFFFD}[name]
    step_id = str(number if sign == "unsigned" else number - (1 << 32))
    assert not slurm.in_step(step(SLURM_STEP_ID=step_id))
    assert not slurm.in_step(interactive_step(step_id))


def test_a_batch_body_is_no_step_but_an_allocation() -> None:
    assert not slurm.in_step(batch_body())
    assert slurm.in_allocation(batch_body())


def test_a_salloc_shell_is_no_step_but_an_allocation() -> None:
    assert not slurm.in_step(JOB)
    assert slurm.in_allocation(JOB)


def test_nothing_of_slurm_is_no_allocation() -> None:
    assert not slurm.in_step({})
    assert not slurm.in_allocation({})


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"])
def test_half_a_step_is_none(missing: str) -> None:
    assert not slurm.in_step(step(**{missing: ""}))


def test_a_program_typed_into_a_pty_shell_is_told_from_srun_pty_itself() -> None:
    assert slurm.read_step(pty_shell(), PID).typed
    assert not slurm.read_step(nested_in_pty_shell(), PID).typed
    assert not slurm.read_step(step(SLURM_PTY_PORT="40001"), PID).typed
    assert slurm.read_step(step(SLURM_PTY_PORT="40001"), PID).direct


TYPED = (
    "import os; from srunddp.bootstrap.environment import slurm; print(slurm.is_interactive_shell(os.environ['TASK']))"
)


@pytest.mark.parametrize(
    ("shell", "terminal", "typed"),
    [("bash --norc -i", True, True), ("bash", True, False), ("bash -m", False, False)],
    ids=["a-shell-at-a-terminal", "a-script-at-a-terminal", "no-terminal"],
)
def test_what_was_typed_into_a_shell_has_a_terminal_and_a_process_group(
    shell: str, terminal: bool, typed: bool, tmp_path: Path
) -> None:
    (tmp_path / "lines").write_text(f'export TASK=$$\n{sys.executable} -c "{TYPED}"\nexit\n')
    command = f"{shell} {tmp_path / 'lines'}" if shell != "bash --norc -i" else shell
    words = ["script", "-qec", command, "/dev/null"] if terminal else command.split()
    done = subprocess.run(
        words, cwd=ROOT, input=(tmp_path / "lines").read_text(), capture_output=True, text=True, timeout=60
    )
    assert str(typed) in done.stdout.split(), done.stdout + done.stderr


def test_only_the_steps_own_variables_are_read() -> None:
    """The step runs on a part of the job: nodes 2 and 3 of three."""
    found = slurm.read_step(step(3), PID)
    assert found.nodes == ("node02", "node03")
    assert found.tasks_per_node == (2, 2)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (3, 1, 4, 2)
    assert found.ranks_here == (2, 3)


def test_a_cyclic_step_counts_its_local_ranks_by_gtids() -> None:
    found = slurm.read_step(
        step(SLURM_STEP_TASKS_PER_NODE="4,1,1", SLURM_GTIDS="0,3,4,5", SLURM_STEP_NUM_TASKS="6"), PID
    )
    assert found.local_world_size == 4


def test_reserved_ports_and_the_restart_count_are_read() -> None:
    found = slurm.read_step(step(SLURM_STEP_RESV_PORTS="12021-12022,12040", SLURM_RESTART_COUNT="2"), PID)
    assert found.reserved_ports == (12021, 12022, 12040)
    assert found.restarts == "2"
    assert slurm.read_step(step(), PID).restarts == "0"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_PROCID", "-1"),
        ("SLURM_PROCID", "1e3"),
        ("SLURM_PROCID", "0x1"),
        ("SLURM_LOCALID", "none"),
        ("SLURM_STEP_NUM_TASKS", "4(x2)"),
        ("SLURM_STEP_NODELIST", "node[1-"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2"),
        ("SLURM_GTIDS", "0,x"),
        ("SLURM_STEP_RESV_PORTS", "12021-"),
        ("SLURM_JOB_ID", "1207;ls"),
        ("SLURM_JOB_ID", "$(ls)"),
        ("SLURM_RESTART_COUNT", "x"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x65537)"),
        ("SLURM_PROCID", "4"),  # of 4
        ("SLURM_GTIDS", "2,3"),  # without rank 0
    ],
)
def test_a_wrong_step_variable_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        slurm.read_step(step(**{name: value}), PID)
    assert name in str(caught.value)
    assert value in str(caught.value)


LAYOUTS = [
    ("block", "2(x2)", "a[1-2]", ["a1", "a1", "a2", "a2"]),
    ("block", "3,1(x2)", "a[1-3]", ["a1", "a1", "a1", "a2", "a3"]),
    ("block:cyclic,Pack", "2,1", "a[1-2]", ["a1", "a1", "a2"]),
    ("cyclic", "2(x2)", "a[1-2]", ["a1", "a2", "a1", "a2"]),
    ("cyclic", "4,1(x2)", "a[1-3]", ["a1", "a2", "a3", "a1", "a1", "a1"]),
    ("cyclic:block", "1,3", "a[1-2]", ["a1", "a2", "a2", "a2"]),
    ("", "1(x3)", "c,a,b", ["c", "a", "b"]),
    ("arbitrary", "2(x2)", "a[1-2]", []),
    ("plane=2", "2(x2)", "a[1-2]", []),
    ("block", "2", "a[1-2]", []),
    ("block", "", "a[1-2]", []),
]


def test_counts_that_are_not_the_steps_give_no_layout() -> None:
    """And no list of a thousand million ranks."""
    assert slurm.read_step(step(SLURM_STEP_TASKS_PER_NODE="999999999(x2)"), PID).layout() == {}


def test_a_job_of_a_federation_is_a_number_too() -> None:
    assert slurm.read_step(step(SLURM_JOB_ID="4294967295"), PID).job == "4294967295"


@pytest.mark.parametrize(("distribution", "counts", "nodes", "by_rank"), LAYOUTS)
def test_the_layout_says_which_node_each_rank_runs_on(
    distribution: str, counts: str, nodes: str, by_rank: list[str]
) -> None:
    ranks = str(sum(slurm.task_counts(counts)) or 2)
    changes = {"SLURM_DISTRIBUTION": distribution, "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_STEP_NUM_TASKS": ranks}
    found = slurm.read_step(step(SLURM_STEP_NODELIST=nodes, SLURM_GTIDS="", **changes), PID)
    assert found.layout() == dict(enumerate(by_rank))


def test_a_host_file_makes_a_step_arbitrary() -> None:
    found = slurm.read_step(step(SLURM_HOSTFILE="/home/me/hosts"), PID)
    assert found.distribution == "arbitrary"
    assert found.layout() == {}


def test_a_heterogeneous_step_has_no_layout() -> None:
    found = slurm.read_step(step(SLURM_HET_SIZE="2"), PID)
    assert found.heterogeneous
    assert found.layout() == {}


@pytest.mark.parametrize(
    ("components", "spans"),
    [
        (("node[02-03]", "node04"), False),  # srun --het-group=0
        (("node02", "node03"), True),  # srun without it, or --het-group=0,1
        (("node[02-03]", "node[02-03]"), True),  # nobody can tell
        ((), True),
    ],
)
def test_a_step_within_one_component_is_as_any_other(components: tuple[str, ...], spans: bool) -> None:
    """SLURM_HET_SIZE is in the environment of every step of a heterogeneous allocation."""
    groups = {f"SLURM_JOB_NODELIST_HET_GROUP_{number}": nodes for number, nodes in enumerate(components)}
    found = slurm.read_step(step(SLURM_HET_SIZE="2", **groups), PID)
    assert (found.heterogeneous, bool(found.layout())) == (spans, not spans)
