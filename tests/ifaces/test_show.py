"""On a login node it is told what a node gets by ifaces.conf, by the functions that decide on the
node.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from srunddp.bootstrap.network import ifaces_conf
from srunddp.bootstrap.network.ifaces_conf import load
from srunddp.bootstrap.network.interface import select_interface
from srunddp.cli import main
from srunddp.errors import ConfigError
from srunddp.explain.explain import ExplainOptions, Row, explain
from srunddp.ifaces.show import show
from tests.bootstrap.network.test_interface import link, rank
from tests.support.facts import tells
from tests.support.starting import slurm, write

CONF = """\
- nodes: gpu[001-128]
  interface: [ib0, ib1]
  address: "{node}-ib0"
  env: {NCCL_IB_HCA: mlx5_0, NCCL_IB_TC: 106}
  ports: 40000-40100
- nodes: gpu*,dgx1
  interface: hsn0
- nodes: cpu*
  network: [10.20.0.0/16, 10.21.0.0/16]
- nodes: all*
  interface: auto
  env: {NCCL_IB_TC: 106}
"""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ifaces_conf, "default_files", list)
    return str(write(tmp_path / "ifaces.conf", CONF))


def rows(conf: str, node: str, **variables: str) -> dict[str, Row]:
    return {row.name: row for row in show(node, conf, variables, ()).rows}


def test_the_entry_is_told_with_its_line_and_those_that_match_too(conf: str) -> None:
    entry = rows(conf, "gpu001")["entry"]
    assert (entry.value, entry.why) == ("gpu[001-128]", f"{conf}:1:3: the first that matches")
    assert entry.not_chosen == [f"{conf}:6:3: matches too, but the first entry counts"]
    assert rows(conf, "gpu129")["entry"].not_chosen == []
    assert rows(conf, "gpu001.site.org")["entry"].value == "gpu[001-128]"


def test_all_that_an_entry_gives_is_told(conf: str) -> None:
    found = rows(conf, "gpu007")
    assert {name: row.value for name, row in found.items()} == {
        "node": "gpu007",
        "ifaces.conf": conf,
        "entry": "gpu[001-128]",
        "local rank 0: interface": "ib0",
        "local rank 0: GLOO_SOCKET_IFNAME": "ib0",
        "local rank 0: NCCL_SOCKET_IFNAME": "=ib0",
        "local rank 0: TP_SOCKET_IFNAME": "ib0",
        "local rank 1: interface": "ib1",
        "local rank 1: GLOO_SOCKET_IFNAME": "ib1",
        "local rank 1: NCCL_SOCKET_IFNAME": "=ib1",
        "local rank 1: TP_SOCKET_IFNAME": "ib1",
        "NCCL_IB_HCA": "mlx5_0",
        "NCCL_IB_TC": "106",
        "address": "gpu007-ib0",
        "ports": "40000-40100",
    }
    assert "not checked" in found["local rank 0: interface"].why
    for name in ("NCCL_IB_HCA", "address", "ports"):
        assert f"{conf}:1:3" in found[name].why
    found = rows(conf, "dgx1")
    assert (found["interface"].value, found["address"].value, found["ports"].value) == (
        "hsn0",
        "dgx1",
        "any",
    )


def test_what_only_the_node_can_choose_is_told_as_that(conf: str) -> None:
    found = rows(conf, "cpu3")
    for number, network in enumerate(("10.20.0.0/16", "10.21.0.0/16")):
        row = found[f"local rank {number}: network"]
        assert (row.value, tells(row.why, f"{conf}:8:3", "-w cpu3", "explain")) == (network, True)
    found = rows(conf, "all1")
    assert (found["interface"].value, found["NCCL_IB_TC"].value) == ("auto", "106")
    assert "GLOO_SOCKET_IFNAME" not in found


def test_what_the_user_exports_wins(conf: str) -> None:
    found = rows(conf, "dgx1", GLOO_SOCKET_IFNAME="eth7")
    assert (found["interface"].value, found["GLOO_SOCKET_IFNAME"].why) == ("eth7", "exported")
    assert found["interface"].why.startswith("GLOO_SOCKET_IFNAME=eth7; ")
    assert tells(found["interface"].not_chosen[0], f"{conf}:6:3", "come first")
    found = rows(conf, "all1", NCCL_IB_TC="7")
    assert (found["NCCL_IB_TC"].value, found["NCCL_IB_TC"].why) == ("7", "exported")


@pytest.mark.parametrize("exported", [{}, {"NCCL_SOCKET_IFNAME": "ib1", "NCCL_IB_TC": "9"}])
@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_node_itself_chooses_the_same(
    conf: str, local_rank: int, exported: dict[str, str]
) -> None:
    """By the choice of a start, and by `srunddp explain` there."""
    who = replace(rank(local_rank=local_rank), node="gpu007")
    links = (link("ib0", "10.0.0.7"), link("ib1", "10.0.1.7"))
    there = select_interface(load(conf, {}).entries, who, exported, links)
    here = rows(conf, "gpu007", **exported)
    before = f"local rank {local_rank}: "
    assert here[f"{before}interface"].value == there.name
    assert here[f"{before}interface"].not_chosen == there.passed_over
    for name, value in there.exports.items():
        row = here.get(name) or here[before + name]
        assert (row.value, row.why) == (value, there.export_sources[name])
    step = slurm(local_rank, 4, SLURMD_NODENAME="gpu007")
    explained = explain(step | exported, ExplainOptions(ifaces=conf), None)
    row = next(row for row in explained.rows if row.name == "interface")
    assert (row.value, row.why) == (there.name, here[f"{before}interface"].why)
    assert here["entry"].not_chosen[0] in row.not_chosen


def test_without_a_file_the_node_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ifaces_conf, "default_files", lambda: [tmp_path / "none.conf"])
    found = {row.name: row for row in show("n1", None, {}, ()).rows}
    assert (found["ifaces.conf"].value, found["interface"].value) == ("none", "auto")
    assert found["ifaces.conf"].not_chosen == (f"{tmp_path}/none.conf: not there",)


def test_a_node_that_slurm_does_not_know_is_noted(conf: str) -> None:
    def notes(node: str, *cluster: str) -> list[str]:
        return list(show(node, conf, {}, cluster).notes)

    assert notes("gpu007") == notes("gpu007", "gpu007") == []
    assert notes("gpu007", "gpu007.site.org") == notes("gpu007.site.org", "gpu007") == []
    assert notes("gpu007", "gpu070") == ["sinfo lists no node gpu007"]


@pytest.mark.parametrize("node", ["login", "gp", "GPU001"])
def test_a_node_without_an_entry_is_an_error_as_on_the_node(conf: str, node: str) -> None:
    with pytest.raises(ConfigError) as caught:
        show(node, conf, {}, ())
    assert caught.value.exit_code == 78
    assert tells(str(caught.value), f"no entry matches node {node}", f"`- nodes: {node}`")


@pytest.mark.parametrize("node", ["gpu*", "gpu[001-002]", "a,b", "", " ", "a b", "x" * 1000 + "*"])
def test_a_node_is_one_name(conf: str, node: str) -> None:
    with pytest.raises(ConfigError, match="; expected the name of one node -> ") as caught:
        show(node, conf, {}, ())
    assert (caught.value.exit_code, len(str(caught.value)) < 300) == (78, True)


def test_the_command_prints_a_table_or_json(conf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    words = ["ifaces", "show", "--ifaces", conf, "dgx1"]
    lines = CliRunner().invoke(main, words).output.splitlines()
    assert lines[0].split() == ["node", "dgx1"]
    assert f"interface           hsn0       {conf}:6:3; not checked" in "\n".join(lines)
    assert f"ifaces.conf         {conf}  --ifaces" in lines
    record = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)
    assert (record["node"], record["notes"]) == ("dgx1", [])
    assert {row["name"]: row["value"] for row in record["rows"]}["interface"] == "hsn0"
