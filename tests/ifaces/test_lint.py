"""An ifaces.conf is checked on a login node, before any job: against itself, Slurm's nodes and the
names there.
"""

from __future__ import annotations

import fnmatch
import itertools
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.bootstrap.network import ifaces_conf
from srunddp.bootstrap.network.ifaces_entry import EntryIndex, IfacesEntry
from srunddp.bootstrap.network.interface import select_interface
from srunddp.check.finding import Finding, Severity
from srunddp.ifaces import lint
from srunddp.ifaces.lint import SINFO, LintReport, check_file, evaluate
from tests.bootstrap.network.test_interface import link, rank
from tests.conftest import ROOT
from tests.support.facts import tells
from tests.support.starting import write

HERE = socket.gethostname()


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return tmp_path / "ifaces.conf"


def sinfo(folder: Path, body: str) -> dict[str, str]:
    """An environment whose sinfo does this."""
    write(folder / "bin" / "sinfo", f"#!/bin/sh\n{body}\n").chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}


def checked(conf: Path, text: str, nodes: str = "") -> LintReport:
    """The check of a file with this text, on a cluster of these nodes."""
    write(conf, text)
    write(conf.with_name("nodes"), nodes.replace(" ", "\n"))
    return check_file(str(conf), sinfo(conf.parent, f"cat {conf.with_name('nodes')}"))


def entry(nodes: str, more: str = "") -> str:
    return f'- nodes: "{nodes}"\n  interface: ib0\n{more}'


def only(report: LintReport) -> Finding:
    (finding,) = report.findings
    return finding


def test_a_file_that_suits_the_cluster_has_no_findings(conf: Path) -> None:
    report = checked(conf, entry("n[1-2]") + entry("gpu*") + entry("*"), "n1 n2 gpu1 login")
    assert (report.findings, report.notes) == ([], [])
    assert tells(report.summary, 3, conf, "4 nodes")


def test_a_file_without_entries_is_passed_over_and_that_is_noted(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write(conf.with_name("other.conf"), entry("a"))
    monkeypatch.setattr(ifaces_conf, "default_files", lambda: [other])
    report = checked(conf, "# nothing\n", "a")
    assert report.summary.startswith(f"1 entry in {other}, ")
    assert report.notes == [f"{conf} has no entries"]
    write(other, "")
    assert tells(checked(conf, "", "a").summary, "no ifaces.conf")


# Entries that never count.


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("*", "gpu*"),
        ("n[1-4]", "n[2-3]"),
        ("n[1-4]", "n1.site.org"),
        ("n?", "n[1-9]"),
        ("n[1-2],m*", "n2,m7,mm*"),
    ],
)
def test_an_entry_whose_nodes_are_all_taken_is_found(conf: Path, first: str, second: str) -> None:
    finding = only(checked(conf, entry(first) + entry(second)))
    assert finding.level is Severity.WARN
    assert tells(finding.found, f"{conf}:3:3", "line 1")
    assert tells(finding.hint, "line 1")
    finding = only(checked(conf, entry("a") + entry("b") + entry("a,b")))
    assert tells(finding.found, "line 1", "line 3")


@pytest.mark.parametrize(
    ("first", "second"),
    [("n1", "*"), ("n?", "n*"), ("n1.site.org", "n1"), ("n1", "n01"), ("g*u*", "g?p*")],
)
def test_an_entry_that_may_count_is_not_found(conf: Path, first: str, second: str) -> None:
    assert checked(conf, entry(first) + entry(second)).findings == []


def test_a_pattern_is_covered_by_one_that_takes_all_its_names() -> None:
    """All patterns of three characters, against all names of up to four; one of ``*`` and ``?`` may
    do so unseen.
    """
    names = [
        "".join(name) for length in range(5) for name in itertools.product("ab", repeat=length)
    ]
    patterns = ["".join(pattern) for pattern in itertools.product("a?*", repeat=3)]
    fits = {
        pattern: {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        for pattern in patterns
    }
    for inner, outer in itertools.product(patterns, repeat=2):
        entries = [
            IfacesEntry(nodes, ("ib0",), where=f"x:{at}:3")
            for at, nodes in enumerate((outer, inner))
        ]
        covered = any("never applies" in finding.found for finding in evaluate(entries, (), "x")[0])
        assert covered <= (fits[inner] <= fits[outer]), (inner, outer)
        assert covered == (fits[inner] <= fits[outer]) or {*"?*"} <= {*outer}, (inner, outer)


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        ("n[01-03]", "n[03-05]", ("n03",)),
        ("cpu[001-080]", "cpu[075-090]", tuple(f"cpu{number:03}" for number in range(75, 81))),
        ("n[1-3],m1", "m[1-2],n2", ("m1", "n2")),
        ("gpu*", "gpu1,cpu1", ("gpu1",)),
        ("gpu*", "gpu1*,cpu*", ("gpu1*",)),
        ("n1,n2", "n2.site.org,n3", ("n2.site.org",)),
        ("n?,m1", "n[1-2],k1", ("n1", "n2")),
    ],
)
def test_entries_that_overlap_are_found(
    conf: Path, first: str, second: str, taken: tuple[str, ...]
) -> None:
    finding = only(checked(conf, entry("x") + entry(first) + entry(second)))
    assert (finding.level, finding.nodes) == (Severity.WARN, taken)
    assert tells(finding.found, f"{conf}:5:3", "does not apply", "line 3")
    assert tells(finding.hint, "line 3")


@pytest.mark.parametrize(
    ("first", "second"),
    [("n3", "n[1-9]"), ("n[3-4],m1", "n[1-9],m*"), ("n3", "n3.site.org,n*"), ("n1*", "n*,m1")],
)
def test_an_exception_before_the_rule_is_not_found(conf: Path, first: str, second: str) -> None:
    assert checked(conf, entry(first) + entry(second)).findings == []


_ITEMS = st.lists(
    st.sampled_from(["n1", "n2", "n1.a", "n?", "n*", "*1", "?", "m[1-2]", "m1", "m1.b", "n?*"]),
    min_size=1,
    max_size=3,
)


@given(st.lists(_ITEMS, max_size=5), st.lists(_ITEMS, min_size=1, max_size=1))
def test_the_index_tells_the_first_entry_that_matches(
    lists: list[list[str]], asked: list[list[str]]
) -> None:
    entries = [IfacesEntry(",".join(items), ("ib0",)) for items in lists]
    index = EntryIndex()
    for each in entries:
        index.add(each)
    for node in IfacesEntry(",".join(asked[0]), ("ib0",)).items:
        assert index.first(node) is next((one for one in entries if one.matches(node)), None)


def test_the_nodes_of_each_entry_are_told(conf: Path) -> None:
    text = entry("n[1-2]") + entry("n*") + entry("*")
    report = checked(conf, text, "n1 n2 n3 n4 m1")
    assert [one.nodes for one in report.entries] == [("n1", "n2"), ("n3", "n4"), ("m1",)]
    assert str(report.entries[0]) == f"{conf}:1:3: interface ib0: 2 nodes (n[1-2])"
    assert str(report.entries[2]) == f"{conf}:5:3: interface ib0: 1 node (m1)"
    # Without Slurm, those of the file.
    report = checked(conf, entry("n[1-2]") + entry("n[2-3],g*"))
    assert [one.nodes for one in report.entries] == [("n1", "n2"), ("n3", "g*")]
    assert str(report.entries[1]) == f"{conf}:3:3: interface ib0: g*,n3"
    report = checked(conf, entry("n1") + entry("m*"), "n1")
    assert str(report.entries[1]) == f"{conf}:3:3: interface ib0: 0 nodes"


def test_as_many_names_as_a_file_may_have_are_checked_soon(conf: Path) -> None:
    """Each name was looked for in each entry before: forty lists of 65,535 took two minutes."""
    text = "".join(entry(f"r{number}n[1-6000]") for number in range(40))
    began = time.process_time()
    assert checked(conf, text).findings == []
    assert time.process_time() - began < 10


# The cluster's nodes.


def test_entries_and_nodes_that_do_not_fit_are_found(conf: Path) -> None:
    finding = only(checked(conf, entry("n[1-2]"), "n1 n2 n3 m1 n3"))
    assert (finding.level, finding.nodes) == (Severity.FAIL, ("n3", "m1"))
    assert finding.found == f"{conf} has no entry"
    finding = only(checked(conf, entry("n[1-3]") + entry("*"), "n1 n2"))
    assert (finding.level, finding.nodes) == (Severity.WARN, ("n3",))
    assert tells(finding.found, f"{conf}:1:3", "not nodes")
    unfit = only(checked(conf, entry("gpu*") + entry("n*"), "n1"))
    assert tells(unfit.found, "no node", "'gpu*'")


@pytest.mark.parametrize(
    ("text", "nodes"), [(entry(HERE) + entry("n1"), "n1"), (entry("n1"), "n1.site.org")]
)
def test_the_login_node_and_short_names_are_known(conf: Path, text: str, nodes: str) -> None:
    assert checked(conf, text, nodes).findings == []


@pytest.mark.slow
def test_thousands_of_nodes_are_checked_soon(conf: Path) -> None:
    nodes = " ".join(f"n{number}" for number in range(1, 10_001))
    text = "".join(entry(f"n[{low}-{low + 99}]") for low in range(1, 10_001, 100))
    began = time.process_time()
    assert checked(conf, text, nodes).findings == []
    assert time.process_time() - began < 30


# Digits, nodes.
KINDS = {"cpu": (3, 200), "gpu": (3, 96), "dgx": (2, 40), "arm": (2, 48), "viz": (2, 16)}


def test_the_admins_file_for_400_nodes_is_checked_soon(conf: Path) -> None:
    """It is as short as it is said to be, and each of the five kinds has its interface by it."""
    text = (ROOT / "docs" / "admin.md").read_text().split("```yaml\n")[1].split("```")[0]
    nodes = [
        f"{kind}{number:0{digits}d}"
        for kind, (digits, count) in KINDS.items()
        for number in range(1, count + 1)
    ]
    assert (len(nodes), len(text.splitlines()) <= 12) == (400, True)
    began = time.process_time()
    report = checked(conf, text, " ".join(nodes))
    assert time.process_time() - began < 3
    assert report.findings == []
    chosen = (
        "network 10.20.0.0/16",
        "interface nearest",
        "network 10.21.0.0/16 10.22.0.0/16 10.23.0.0/16 10.24.0.0/16",
        "interface enP*",
        "network fd00:20::/64",
    )
    for note, each in zip(report.notes, chosen, strict=True):
        assert tells(note, each)
    names = {"cpu": "enp65s0f0", "dgx": "eth7", "arm": "enP5s1", "viz": "bond0"}
    addresses = {"cpu": "10.20.1.1", "dgx": "10.22.0.1", "arm": "10.20.7.7", "viz": "fd00:20::9"}
    others = (
        link("eno1", "10.99.0.1"),
        link("eno2", "10.30.0.1"),
        link("enP9s1", "10.31.0.1", up=False),
    )
    for kind, name in names.items():
        who = replace(
            rank(local_rank=1), node=next(node for node in nodes if node.startswith(kind))
        )
        found = select_interface(
            ifaces_conf.parse(text.encode(), "x"), who, {}, (*others, link(name, addresses[kind]))
        )
        assert (found.name, found.address) == (name, addresses[kind])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_IB_HCAS", "NCCL_IB_HCA"),
        ("NCCL_IB_GID_INDX", "NCCL_IB_GID_INDEX"),
        ("NCCL_P2P_ENABLE", "NCCL_P2P_DISABLE"),
        ("NCCL_IB_TC", ""),
        ("NCCL_SOME_PLUGINS_OWN", ""),
        ("NCLL_DEBUG", ""),
    ],
)
def test_a_misspelt_variable_of_nccl_is_noted(conf: Path, name: str, meant: str) -> None:
    notes = checked(conf, entry("n1", f"  env: {{{name}: 1}}\n"), "n1").notes
    expected = (
        f"{conf}:1:3: env {name} is not a variable that NCCL documents; did you mean {meant}?"
    )
    assert notes == ([expected] if meant else [])


@pytest.mark.parametrize(
    "name", ["mlx5_0", "mlx5_bond_0", "mlx4_1", "hfi1_0", "bnxt_re0", "rocep65s0f0", "mlx5_*"]
)
def test_a_device_for_an_interface_is_found(conf: Path, name: str) -> None:
    finding = only(checked(conf, f'- nodes: n1\n  interface: ["{name}"]\n', "n1"))
    assert finding.level is Severity.WARN
    assert tells(finding.found, f"{conf}:1:3", name, "device")
    assert f"{{NCCL_IB_HCA: {name.removesuffix('*')}}}" in finding.hint


@pytest.mark.parametrize(
    "name", ["ib0", "ibp65s0", "enp65s0f0np0", "mlnx0", "qib", "ib*", "hsn0", "e*", "auto"]
)
def test_an_interface_is_not_taken_for_a_device(conf: Path, name: str) -> None:
    assert checked(conf, f"- nodes: n1\n  interface: {name}\n", "n1").findings == []


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("ib0", ["ib0"]),
        ("=mlx5_0,ib1:1", ["ib1"]),
        ("^enp65s0f0,eth0", ["enp65s0f0", "eth0"]),
        ("mlx5_0", []),
        ("=mlx5_0:1,mlx5_1:1", []),
        ("ibp65s0", []),
        ("mlx5", []),
    ],
)
def test_an_interface_for_a_device_is_found(conf: Path, value: str, wrong: list[str]) -> None:
    findings = checked(conf, entry("n1", f'  env: {{NCCL_IB_HCA: "{value}"}}\n'), "n1").findings
    assert len(findings) == len(wrong)
    for finding, name in zip(findings, wrong, strict=True):
        assert finding.level is Severity.WARN
        assert tells(finding.found, f"{conf}:1:3", "NCCL_IB_HCA", name)


# Asking Slurm.


def test_slurm_is_asked_for_its_nodes_by_a_list_of_words(conf: Path, tmp_path: Path) -> None:
    write(conf, entry("n1"))
    variables = sinfo(
        tmp_path, f'echo "$@" "$SINFO_PARTITION" > {tmp_path}/asked; echo n1; echo n2; echo n1'
    )
    report = check_file(str(conf), variables | {"SINFO_PARTITION": "debug"})
    assert tells(report.summary, "2 nodes")
    assert (tmp_path / "asked").read_text().split() == list(SINFO[1:])


@pytest.mark.parametrize(
    "body", [None, "echo 'slurm is down' >&2; exit 1", "true", "exec sleep 60"]
)
def test_without_slurm_the_file_is_checked_against_itself(
    conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str | None
) -> None:
    monkeypatch.setattr(lint, "_WITHIN", 0.5)
    write(conf, entry("*") + entry("n1"))
    report = check_file(str(conf), sinfo(tmp_path, body) if body else {"PATH": str(tmp_path)})
    assert "never applies" in only(report).found
    (note,) = report.notes
    assert tells(note, "not compared", "sinfo")
    assert tells(report.summary, "not available", "sinfo")
