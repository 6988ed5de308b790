"""An ifaces.conf that writes itself: what a scan of the nodes drafts is what they train with."""

from __future__ import annotations

from pathlib import Path

import pytest

from srunddp.bootstrap.network.ifaces_conf import parse
from srunddp.bootstrap.network.ifaces_entry import entry_for
from tests.chaos.network import link_down
from tests.cluster.nodes import NODES, node
from tests.conftest import ROOT
from tests.slurm.conftest import SRUNDDP, Outcome, SlurmJobRunner

pytestmark = pytest.mark.slurm

ONE_EACH = ("--mpi=pmi2", "-N6", "--ntasks-per-node=1")


def scan(
    runner: SlurmJobRunner, name: str, *, srun: tuple[str, ...] = ONE_EACH
) -> tuple[Outcome, Path]:
    """Scan as a site that has no ifaces.conf yet."""
    draft = runner.cluster.shared / name
    empty = runner.write_ifaces("empty.conf", "")
    return runner.srun(*srun, SRUNDDP, "ifaces", "scan", "-o", str(draft), ifaces=empty), draft


@pytest.fixture(scope="module")
def draft(runner: SlurmJobRunner) -> Path:
    done, path = scan(runner, "drafted.conf")
    assert (done.code, done.errors) == (0, "srunddp: scan of 6 nodes: an entry for each\n"), done
    return path


@pytest.mark.gate
def test_each_node_has_the_interface_that_reaches_all_others(draft: Path) -> None:
    entries = parse(draft.read_bytes(), str(draft))
    for each in NODES:
        entry = entry_for(entries, each.name)
        assert (entry.interfaces, entry.address) == ((each.data_interface,), "{node}-data")
    assert [entry.nodes for entry in entries] == ["node[01-02,04]", "node[03,06]", "node05"]


def test_the_draft_says_why(draft: Path) -> None:
    text = draft.read_text()
    for line in (
        "# Not chosen: ens6 on node[01-06], which reach each other (10 Gbit/s, IPv6).",
        "# Not chosen: mgmt0 on node[01-06], reaches no other node.",
        "# Not chosen: spare0 on node[01-06], down.",
        "  interface: ens1f0  # up, 10 Gbit/s, reaches all 5 other nodes",
    ):
        assert f"{line}\n" in text, text


def test_mnist_trains_on_six_nodes_with_the_draft_as_it_is(
    runner: SlurmJobRunner, draft: Path
) -> None:
    """Over SLURM_* alone, for which names have to lead to rank 0."""
    mnist = (
        str(ROOT / "docs" / "examples" / "mnist.py"),
        "--data-dir",
        str(runner.cluster.shared / "scan-digits"),
    )
    done = runner.srun(
        "-N6", "--ntasks-per-node=1", SRUNDDP, *mnist, "--epochs=1", ifaces=draft, timeout=240
    )
    assert done.code == 0, done.errors
    assert "6 ranks on 6 nodes, launcher Slurm, channel slurm, master 10.88.0.11 " in done.errors
    assert "val accuracy" in done.output


def test_with_a_link_down_the_network_that_reaches_all_is_taken(runner: SlurmJobRunner) -> None:
    with link_down(node("node03")):
        done, path = scan(runner, "without-one.conf")
    text = path.read_text()
    assert done.code == 0, done
    assert (
        "- nodes: node[01-06]\n  interface: ens6  # up, 10 Gbit/s, reaches all 5 other nodes\n"
        in text
    ), text


def test_over_slurms_variables_it_says_how_rank_0_can_be_found(runner: SlurmJobRunner) -> None:
    """The nodes' names lead to a network that a firewall closes."""
    words = ("-N2", "--ntasks-per-node=1", SRUNDDP, "ifaces", "scan", "--timeout=4")
    done = runner.srun(*words, ifaces=runner.write_ifaces("empty.conf", ""))
    assert done.code in (69, 78)
    assert "srun --mpi=pmi2" in done.errors
    assert "Traceback" not in done.errors


@pytest.mark.gate
def test_a_check_on_every_node_names_the_one_it_is_wrong_for(runner: SlurmJobRunner) -> None:
    words = (*ONE_EACH, SRUNDDP, "ifaces", "check")
    done = runner.srun(*words, str(runner.ifaces))
    assert done.code == 0, done
    assert f"6 entries in {runner.ifaces}, 6 nodes in the cluster\n" in done.output
    wrong = runner.write_ifaces(
        "wrong.conf", runner.ifaces.read_text().replace("ens1f0\n", "ens1f9\n")
    )
    done = runner.srun(*words, str(wrong))
    assert done.code == 78
    (line,) = [line for line in done.output.splitlines() if line.startswith("FAIL")]
    assert line.startswith(
        f"FAIL  interface  node05  {wrong}:13:3: interface ens1f9 is not there on node node05"
    ), line
